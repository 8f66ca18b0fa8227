// Tells the launcher why this process failed, so that its failure report names the exception and
// not only the exit code.
//
//   int main(int argc, char** argv) {
//     return ddp::elastic::run_worker([&] { return train(argc, argv); });
//   }
//
// The report goes to the file that the launcher names in TORCHELASTIC_ERROR_FILE, in the form that
// torchrun and ddprun read:
//   {"message": {"message": "<type>: <text>",
//                "extraInfo": {"py_callstack": "<all of what(), if more>",
//                              "timestamp": "<seconds>", "victim": true}}}
// where "victim" is true only in the error of a rank that failed because a peer did
// (ddp::PeerFailedError and what is derived from it): ddprun does not take it for the root cause.
// It appears at once and whole (written beside, then renamed). The first error of a process wins;
// later ones, usually its consequences, do not replace it. Without the variable nothing is written.
// Nothing here ever makes a failure worse: an error file that cannot be written costs one line on
// stderr.
#ifndef DDP_ELASTIC_WORKER_ERROR_FILE_H_
#define DDP_ELASTIC_WORKER_ERROR_FILE_H_

#include <exception>
#include <functional>

namespace ddp::elastic {

// Runs `body` and returns its result as the exit code of the process. An exception that leaves
// `body` is written to the error file and to stderr in one line "<type>: <text>", and the result is
// 1. An exception that cannot leave `body`, because it was thrown on another thread or out of a
// noexcept function, ends in std::terminate: it is written in the same way and the process aborts.
// So is a signal that ends the process by its own fault, SIGSEGV and the like (fatal_signal.h).
int run_worker(const std::function<int()>& body);

// One part of run_worker alone: from now on std::terminate writes the error file and the
// line on stderr before the handler that was installed until now runs.
void install_terminate_handler();

// Writes the error file for `error`, which must not be null: for a trainer that catches exceptions
// itself and is about to give up. From any thread.
void write_error_file(const std::exception_ptr& error);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_WORKER_ERROR_FILE_H_
