// The body of a trainer's main().
//
//   int main(int argc, char** argv) {
//     return ddp::elastic::run_worker([&] { return train(argc, argv); });
//   }
#ifndef DDP_ELASTIC_WORKER_RUN_WORKER_H_
#define DDP_ELASTIC_WORKER_RUN_WORKER_H_

#include <functional>

namespace ddp::elastic {

struct RunOptions {
  // When true, malloc keeps the memory that a step frees for the next step. By default glibc
  // returns large blocks to the kernel, which zeroes the pages again in each step. The process then
  // keeps its peak of memory until malloc_trim(0). Nothing changes when DDP_KEEP_FREED_MEMORY=0 is
  // in the environment, when the user has set MALLOC_MMAP_THRESHOLD_, MALLOC_MMAP_MAX_,
  // MALLOC_TRIM_THRESHOLD_ or one of their names in GLIBC_TUNABLES, or with another malloc.
  bool keep_freed_memory = true;

  // When true, run_worker() does not return. It flushes C's and C++'s standard streams and all of
  // C's open files, and ends the process by _exit(). The destructors of LibTorch's libraries, which
  // take tens of milliseconds, do not run. Neither do these, so the default is false:
  // - functions of atexit(), and destructors of static and thread-local objects: a profiler that
  //   writes its file there writes nothing, and an std::ofstream there loses its buffer;
  // - the rest of main(): objects outside of `body` are not destroyed. A ProcessGroup, a
  //   Checkpointer or a WorkerSession has to live inside `body`;
  // - the reports of gcov, LLVM's coverage and the leak check of AddressSanitizer;
  // - glog's log files: call google::FlushLogFiles() in `body`. Its stderr needs no flush.
  bool exit_at_once = false;
};

// Runs `body` and returns its result as the exit code of the process.
// - An exception that leaves `body` is written to the error file (error_file.h) and to stderr, as
//   one line "<type>: <text>". The result is then 1.
// - An exception that cannot leave `body`, because it was thrown on another thread or out of a
//   noexcept function, ends in std::terminate. It is written in the same way; the process aborts.
// - A fault of the process (SIGSEGV, SIGFPE, ...) is written too: see fatal_signal.h.
// - SIGXFSZ is ignored, unless the program handles it: a write beyond `ulimit -f` fails by EFBIG.
int run_worker(const std::function<int()>& body, const RunOptions& options = {});

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_WORKER_RUN_WORKER_H_
