#ifndef DDP_BASE_PROCESS_CLOSE_ON_EXEC_H_
#define DDP_BASE_PROCESS_CLOSE_ON_EXEC_H_

namespace ddp {

// Sets FD_CLOEXEC on every open descriptor from `first` on. Uses close_range(2) on Linux 5.11 and
// later, otherwise the list in /proc/self/fd. Without /proc it tries each number up to the limit of
// open files. Returns 0, or errno when none of the three is possible.
//
// Async-signal-safe, for use between fork and exec: allocates nothing, takes no lock.
int SetCloseOnExecFrom(int first);

}  // namespace ddp

#endif  // DDP_BASE_PROCESS_CLOSE_ON_EXEC_H_
