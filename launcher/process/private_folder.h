#ifndef DDP_LAUNCHER_PROCESS_PRIVATE_FOLDER_H_
#define DDP_LAUNCHER_PROCESS_PRIVATE_FOLDER_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::launcher {

// Makes a folder that only this user can enter (0700), named `<prefix>XXXXXX` with random letters.
// Its parent is TMPDIR, or /tmp if TMPDIR is unset, relative, or too long for the path of a unix
// socket inside. Returns its path. Errors: kInternal, names the parent folder and the reason.
absl::StatusOr<std::string> MakePrivateFolder(const std::string& prefix);

// Returns true when a file in `folder`, or in a folder below it, is not empty. Follows no symbolic
// link. A missing folder holds nothing.
bool HoldsData(const std::string& folder);

// Removes `folder` and everything in it. Follows no symbolic link. A missing folder is no error.
// Errors: kInternal (some of it could not be removed; the rest is removed).
//
// Safe to call from two processes at the same time.
absl::Status RemoveFolder(const std::string& folder);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_PROCESS_PRIVATE_FOLDER_H_
