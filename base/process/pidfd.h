#ifndef DDP_BASE_PROCESS_PIDFD_H_
#define DDP_BASE_PROCESS_PIDFD_H_

#include <sys/types.h>

#include "base/unique_fd.h"

namespace ddp {

// A pidfd is a descriptor of a process. It is readable once the process has ended. Unlike a process
// number, a pidfd never comes to mean another process. Needs Linux 5.3 or newer.

// Returns a pidfd of process `pid`, with close-on-exec set. On an error returns an invalid
// descriptor and sets errno. Thread: any.
UniqueFd OpenPidfd(pid_t pid);

// Sends `signal` to the process of `pidfd`, whose number is `pid`. Returns false and sets errno
// when the signal cannot be sent: ESRCH after the process was reaped, EBADF for no descriptor.
// Where a filter of system calls refuses pidfd_send_signal(), kill() sends the signal, provided
// that the process has not ended, so that the number still means it. Thread: any.
bool SignalPidfd(int pidfd, pid_t pid, int signal);

}  // namespace ddp

#endif  // DDP_BASE_PROCESS_PIDFD_H_
