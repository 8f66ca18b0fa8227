// Runs a function in several threads of a test, and defines test cases of such threads.
#ifndef DDP_TESTING_BACKEND_TEST_THREADS_H_
#define DDP_TESTING_BACKEND_TEST_THREADS_H_

#include <functional>
#include <vector>

namespace ddp::testing {

// Runs `body` with 0 to count - 1, each in a thread of its own, and `conduct`, unless it is null,
// on the calling thread at the same time. Blocks until all have returned. An exception that leaves
// a body or `conduct` is a failure of the test case. The output of a failed check names the rank.
// Ends the process after two minutes, and names the ranks that have not returned.
void RunThreads(int count, const std::function<void(int rank)>& body,
                const std::function<void()>& conduct = nullptr);

namespace internal {

// Registers a case that calls `run`, for each size: with the suffix On2, On3 when there are
// several. Returns true, so that a macro can initialize a variable with the result.
bool RegisterSizedTest(const char* suite, const char* name, const char* file, int line,
                       const std::vector<int>& sizes, const std::function<void(int size)>& run);

}  // namespace internal
}  // namespace ddp::testing

#endif  // DDP_TESTING_BACKEND_TEST_THREADS_H_
