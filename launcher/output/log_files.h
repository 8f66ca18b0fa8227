// Folders and files for the workers' output that no other user can write, replace or redirect.
#ifndef DDP_LAUNCHER_OUTPUT_LOG_FILES_H_
#define DDP_LAUNCHER_OUTPUT_LOG_FILES_H_

#include <sys/types.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace ddp::launcher {

// A folder that this process made, and its owner as the file system reports it. On a network file
// system that owner need not be this process's user.
struct LogRoot {
  std::string path;  // absolute
  uid_t owner = 0;
  // For making the folder again, with the same permissions and in no other user's folder.
  mode_t mode = 0700;
  uid_t owner_of_parent = 0;
};

// Makes `path` and the missing folders above it. The folders that it makes are not writable by the
// group or by others. Links in `path` are followed: the user chose it. Errors: kInvalidArgument;
// the message is the reason alone.
absl::Status MakeFolders(const std::string& path);

// Makes a folder `<parent>/<name>_<random>`. The group and others can read it if they can read
// `parent` and the umask allows it; they can never write it. Errors: kInvalidArgument; the message
// is the reason alone.
absl::StatusOr<LogRoot> MakeLogRoot(const std::string& parent, const std::string& name);

// Makes the missing folders of `relative`, such as "attempt_0/3", below `root`. An existing folder
// is accepted if `root.owner` owns it and no other user can write it. Follows no link.
//
// Makes `root` and the folders above it again when something has removed them, such as a cleaner of
// /tmp. The parent of `root` must then belong to the same user as before, or to `root.owner`.
//
// Errors, which name the folder:
// - kFailedPrecondition: a link, a folder of another user, or one that others can write.
// - kResourceExhausted: no descriptor or memory is left.
// - kInternal: any other reason.
absl::Status MakeLogFolder(const LogRoot& root, const std::string& relative);

// Opens `path`, a file below `root`, for appending. Makes a missing file with mode 0644, less the
// umask. Follows no link, neither at the file nor between `root` and the file. An existing file
// must be a regular one of `root.owner` with one name, and no other user may write it. Errors: as
// MakeLogFolder(); kInternal also when `path` is not below `root`.
absl::StatusOr<UniqueFd> OpenLogFile(const LogRoot& root, const std::string& path);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OUTPUT_LOG_FILES_H_
