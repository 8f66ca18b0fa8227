#ifndef DDP_BASE_PROCESS_PROCESS_STATE_H_
#define DDP_BASE_PROCESS_PROCESS_STATE_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace ddp {

// Returns the fields of /proc/<pid>/stat from the third one, the state, on. Empty where /proc does
// not tell. Thread: any.
std::vector<std::string> ProcessStat(pid_t pid);

// Returns the state of a process as proc(5) names it: 'R' running, 'S' sleeping, 'D' in
// uninterruptible sleep, 'T' stopped by a signal, 't' stopped by a debugger, 'Z' ended. Of a
// process with several threads: that of the main thread. Returns '?' where /proc does not tell.
// Thread: any.
char ProcessState(pid_t pid);

}  // namespace ddp

#endif  // DDP_BASE_PROCESS_PROCESS_STATE_H_
