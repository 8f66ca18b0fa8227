#include "examples/example_file.h"

#include <filesystem>
#include <memory>
#include <stdexcept>

#include "tools/cpp/runfiles/runfiles.h"

namespace fs = std::filesystem;
using bazel::tools::cpp::runfiles::Runfiles;

std::string ExampleFile(const std::string& path_in_repository, const std::string& flag) {
  const std::string program = fs::read_symlink("/proc/self/exe");
#ifdef BAZEL_CURRENT_REPOSITORY  // Bazel 6 and later, where "ddp" may stand for another folder
  const std::unique_ptr<Runfiles> files(Runfiles::Create(program, BAZEL_CURRENT_REPOSITORY));
#else
  const std::unique_ptr<Runfiles> files(Runfiles::Create(program));
#endif
  if (files != nullptr) {
    const std::string path = files->Rlocation("ddp/" + path_in_repository);
    if (fs::exists(path)) return path;
  }
  if (fs::exists(path_in_repository)) return path_in_repository;
  throw std::runtime_error(path_in_repository + " is neither in the runfiles of " + program +
                           " nor in the current folder: name another with " + flag);
}
