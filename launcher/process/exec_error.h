#ifndef DDP_LAUNCHER_PROCESS_EXEC_ERROR_H_
#define DDP_LAUNCHER_PROCESS_EXEC_ERROR_H_

#include <string>

#include "absl/status/status.h"

namespace ddp::launcher {

// Returns the error of an execve() of `program` that failed with `error`, an errno: one line that
// names the program and says what is wrong with it. Reads the beginning of the program, so it may
// block on a stalled mount. Thread: any.
//
// - kNotFound: there is no such program, or no such interpreter or loader.
// - kPermissionDenied: the program is not executable, or it is no program for this machine.
// - kInternal: any other reason.
absl::Status ExecError(const std::string& program, int error);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_PROCESS_EXEC_ERROR_H_
