#ifndef DDP_EXAMPLES_EXAMPLE_FILE_H_
#define DDP_EXAMPLES_EXAMPLE_FILE_H_

#include <string>

// Returns the path of a file or folder of this repository, such as "examples/digits/data": in the
// program's runfiles, where Bazel built it, or else below the current folder. Throws
// std::runtime_error when it is in neither, and then names `flag`, by which a user names another.
std::string ExampleFile(const std::string& path_in_repository, const std::string& flag);

#endif  // DDP_EXAMPLES_EXAMPLE_FILE_H_
