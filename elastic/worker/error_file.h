// Reports to the launcher why this process failed, so that the launcher's failure report names the
// exception and not only the exit code.
//
// A trainer calls run_worker() (run_worker.h), which reports every exception that leaves its body.
//
// The report goes to the file that the launcher names in TORCHELASTIC_ERROR_FILE, in the form that
// torchrun and ddprun read:
//   {"message": {"message": "<type>: <text>",
//                "extraInfo": {"py_callstack": "<all of what(), if more>",
//                              "timestamp": "<seconds>", "victim": true}}}
// "victim" is true only in the error of a rank that failed because a peer did (ddp::PeerFailedError
// and classes derived from it). ddprun does not report such an error as the root cause.
//
// - A reader sees the whole file or none: the file is written under another name, then renamed.
// - The first error of a process is kept. Later errors, usually its consequences, do not replace
// it.
// - Without the variable no file is written.
// - A file that cannot be written costs one line on stderr and changes nothing else.
#ifndef DDP_ELASTIC_WORKER_ERROR_FILE_H_
#define DDP_ELASTIC_WORKER_ERROR_FILE_H_

#include <exception>

// Exported for programs that include this header for run_worker().
#include "elastic/worker/run_worker.h"  // IWYU pragma: export

namespace ddp::elastic {

// Makes std::terminate write the error file and the line on stderr, and then call the previously
// installed handler. run_worker() calls it.
void install_terminate_handler();

// Writes the error file for `error`, which must not be null. A trainer that catches exceptions
// itself calls it before it exits. Thread: any.
void write_error_file(const std::exception_ptr& error);

namespace internal {

// Writes `error` to stderr, as one line "<type>: <text>", and to the error file. Null stands for a
// std::terminate without an exception. Thread: any.
void report_error(const std::exception_ptr& error);

}  // namespace internal

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_WORKER_ERROR_FILE_H_
