// The body of a trainer's main().
//
//   int main(int argc, char** argv) {
//     return ddp::elastic::run_worker([&] { return train(argc, argv); });
//   }
#ifndef DDP_ELASTIC_WORKER_RUN_WORKER_H_
#define DDP_ELASTIC_WORKER_RUN_WORKER_H_

#include <functional>

namespace ddp::elastic {

// Runs `body` and returns its result as the exit code of the process.
// - An exception that leaves `body` is written to the error file (error_file.h) and to stderr, as
//   one line "<type>: <text>". The result is then 1.
// - An exception that cannot leave `body`, because it was thrown on another thread or out of a
//   noexcept function, ends in std::terminate. It is written in the same way; the process aborts.
// - A fault of the process (SIGSEGV, SIGFPE, ...) is written too: see fatal_signal.h.
int run_worker(const std::function<int()>& body);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_WORKER_RUN_WORKER_H_
