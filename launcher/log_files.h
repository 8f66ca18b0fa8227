// Folders and files for the workers' output that no other user can write, replace or redirect.
#ifndef DDP_LAUNCHER_LOG_FILES_H_
#define DDP_LAUNCHER_LOG_FILES_H_

#include <sys/types.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace ddp::launcher {

// A folder that this process has made, and the user that the file system gave it to. On a network
// file system that user need not be ours.
struct LogRoot {
  std::string path;  // absolute
  uid_t owner = 0;
};

// Makes `path` and the folders above it that are missing. No folder that it makes can be written by
// the group or by others. Links in `path` are followed: the user named it.
// Errors: kInvalidArgument, the reason alone.
absl::Status MakeFolders(const std::string& path);

// Makes a folder `<parent>/<name>_<random>`. The group and others may read it where they may read
// `parent` and the umask agrees; they never may write it.
// Errors: kInvalidArgument, the reason alone.
absl::StatusOr<LogRoot> MakeLogRoot(const std::string& parent, const std::string& name);

// Makes the folders of `relative`, "attempt_0/3", below `root` where they are missing. A folder
// that is there already may stay where it is a folder of `root.owner` that nobody else can write.
// Follows no link. Errors: kFailedPrecondition (a link, a folder of another user, or one that
// others can write), kInternal (another reason). Both name the folder.
absl::Status MakeLogFolder(const LogRoot& root, const std::string& relative);

// Opens `path`, a file below `root`, for appending. Makes it where it is missing: with mode 0644
// and the umask. Follows no link, neither at the file nor between `root` and it. A file that is
// there already must be a regular one of `root.owner`, with one name, that nobody else can write.
// Errors: as MakeLogFolder; kResourceExhausted (no descriptor is left).
absl::StatusOr<UniqueFd> OpenLogFile(const LogRoot& root, const std::string& path);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_LOG_FILES_H_
