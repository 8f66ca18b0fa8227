#ifndef DDP_LAUNCHER_OPEN_FILES_H_
#define DDP_LAUNCHER_OPEN_FILES_H_

#include <sys/resource.h>

namespace ddp::launcher {

// Raises this process's limit of open files as far as it may be raised, and returns what it was,
// for the workers, who are to have what the user gave them. An agent holds a connection of every
// Python worker of the job while rank 0 is on its node, and systems give 1,024 to programs that do
// not ask for more.
rlimit RaiseOpenFiles();

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OPEN_FILES_H_
