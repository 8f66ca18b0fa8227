#ifndef DDP_BASE_CLOSE_ON_EXEC_H_
#define DDP_BASE_CLOSE_ON_EXEC_H_

namespace ddp {

// Sets FD_CLOEXEC on every descriptor from `first` on: close_range(2) from Linux 5.11 on, before
// that by the list in /proc/self/fd, and without /proc one by one up to the limit of open files.
// Returns 0, or errno where none of the three is possible.
//
// Async-signal-safe, for the time between fork and exec: allocates nothing, takes no lock.
int SetCloseOnExecFrom(int first);

}  // namespace ddp

#endif  // DDP_BASE_CLOSE_ON_EXEC_H_
