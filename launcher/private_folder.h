#ifndef DDP_LAUNCHER_PRIVATE_FOLDER_H_
#define DDP_LAUNCHER_PRIVATE_FOLDER_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::launcher {

// Makes a folder that only this user can enter (0700), named `<prefix>XXXXXX` with random letters,
// under TMPDIR, or under /tmp where TMPDIR is unset or so long that the path of a unix socket
// inside would not fit. Returns its path. Errors: kInternal, names the folder and the reason.
absl::StatusOr<std::string> MakePrivateFolder(const std::string& prefix);

// Removes `folder` and all that is in it. Follows no symbolic link; a folder that is not there is
// fine. Errors: kInternal (some of it could not be removed; the rest is gone).
//
// Safe to call from two processes at the same time.
absl::Status RemoveFolder(const std::string& folder);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_PRIVATE_FOLDER_H_
