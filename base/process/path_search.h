#ifndef DDP_BASE_PROCESS_PATH_SEARCH_H_
#define DDP_BASE_PROCESS_PATH_SEARCH_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace ddp {

// Search path of execvp(3) where the environment variable PATH is unset.
inline constexpr char kDefaultPath[] = "/bin:/usr/bin";

// Returns true when `path` names a regular file, or a symbolic link to one.
bool IsRegularFile(const std::string& path);

// Returns true when `path` names a regular file that this process may execute.
bool IsExecutableFile(const std::string& path);

// Returns the path of the program `name` in the first folder of `folders` that has it; nullopt:
// none has. `folders` has the form of the variable PATH: folders with ':' between them, where an
// empty one is the current folder. `name` holds no '/'. Reads file metadata only. Thread: any.
std::optional<std::string> SearchPath(const std::string& name, absl::string_view folders);

}  // namespace ddp

#endif  // DDP_BASE_PROCESS_PATH_SEARCH_H_
