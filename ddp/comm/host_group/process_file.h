#ifndef DDP_COMM_HOST_GROUP_PROCESS_FILE_H_
#define DDP_COMM_HOST_GROUP_PROCESS_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace ddp::internal {

// Names a file that a process has open, so that another process opens it too: a memfd, which has
// no name of its own. The kernel lets processes of the same user (and root) do so, in the same PID
// namespace, as they may read each other's memory: proc_pid_fd(5). A plain value.
struct ProcessFile {
  uint64_t pid_space = 0;  // inode of the PID namespace
  uint64_t inode = 0;      // of the file
  int32_t pid = 0;
  int32_t fd = -1;

  // Names the open file `fd` of this process.
  static ProcessFile Of(int fd);

  // Opens the file for reading and writing. The message of an error says whose file it is.
  absl::StatusOr<UniqueFd> Open() const;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HOST_GROUP_PROCESS_FILE_H_
