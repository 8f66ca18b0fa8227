#ifndef DDP_LAUNCHER_PROCESS_OPEN_FILES_H_
#define DDP_LAUNCHER_PROCESS_OPEN_FILES_H_

#include <sys/resource.h>

namespace ddp::launcher {

// Raises this process's soft limit of open files to the hard limit, at most 262,144. Returns the
// limits before, for the workers, which keep the user's limits. An agent holds a connection of
// every Python worker of the job while rank 0 is on its node, and systems grant 1,024 by default.
rlimit RaiseOpenFiles();

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_PROCESS_OPEN_FILES_H_
