// A program in a child process: fork, exec, and a pipe that reports how the exec ended.
#ifndef DDP_BASE_PROCESS_CHILD_PROCESS_H_
#define DDP_BASE_PROCESS_CHILD_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "base/unique_fd.h"

namespace ddp {

// Result of StartChild().
struct ChildProcess {
  pid_t pid = -1;                     // -1: there is no child
  UniqueFd exec_error;                // readable once the exec has ended; for ReadExecError()
  const char* failed_call = nullptr;  // "pipe" or "fork", where there is no child; errno is set
};

// Starts a child process, in which `become` makes the settings of the child and executes a program.
// Does not wait for the exec. The caller reaps the child, also a child whose exec failed.
//
// `become` runs between fork and exec. It returns errno when the program cannot be executed, and
// otherwise does not return. Rules for `become`:
// - Make async-signal-safe calls only. Do not allocate, lock or throw: another thread of this
//   process may have held the lock at the fork, and nobody would release it in the child.
// - Do not close descriptors, because the child writes the error into one. Set FD_CLOEXEC instead
//   (SetCloseOnExecFrom()).
//
// The child begins with the signal mask and dispositions of the calling thread. The kernel kills
// the child with SIGKILL when the calling *thread* ends.
ChildProcess StartChild(absl::FunctionRef<int()> become);

// Blocks until the exec has ended, that is, until ChildProcess::exec_error is readable. Returns the
// errno that `become` returned. Returns 0 when the exec succeeded, or when the child was killed
// before it.
int ReadExecError(const UniqueFd& exec_error);

// Returns argv or envp in the form of exec(3): pointers into `strings`, then a null pointer.
std::vector<char*> ExecPointers(std::vector<std::string>& strings);

}  // namespace ddp

#endif  // DDP_BASE_PROCESS_CHILD_PROCESS_H_
