#include "launcher/log_layout.h"

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp::launcher {
namespace {

// A file name has at most 255 bytes.
constexpr size_t kMaxName = 200;

std::string FileName(std::string name) {
  for (char& c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) == 0 && std::strchr("-_.+:@", c) == nullptr && byte < 0x80) c = '_';
  }
  if (name.size() > kMaxName) name.resize(kMaxName);
  return name[0] == '.' ? absl::StrCat("_", name) : name;
}

}  // namespace

LogLayout::LogLayout(std::string root) : root_(std::move(root)) {}

absl::StatusOr<LogLayout> LogLayout::Create(const std::string& log_dir, const std::string& run_id) {
  if (log_dir == "/dev/null") return LogLayout();
  std::error_code error;
  const std::string absolute = std::filesystem::absolute(log_dir, error).string();
  if (!error) std::filesystem::create_directories(absolute, error);
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot make the log folder ", log_dir, ": ", error.message()));
  }
  std::string root =
      absl::StrCat(absolute, absolute.back() == '/' ? "" : "/", FileName(run_id), "_XXXXXX");
  if (::mkdtemp(root.data()) == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot write to the log folder ", log_dir, ": ", std::strerror(errno)));
  }
  // mkdtemp's folders are for their user only; the user who named a folder chose who may read it.
  std::filesystem::permissions(root, std::filesystem::status(absolute).permissions(), error);
  return LogLayout(std::move(root));
}

absl::StatusOr<LogLayout::WorkerFiles> LogLayout::MakeWorkerFolder(int attempt, uint64_t generation,
                                                                   int local_rank) {
  if (root_.empty()) return WorkerFiles();
  const uint64_t first = first_generation_.emplace(attempt, generation).first->second;
  std::string attempt_folder = absl::StrCat(root_, "/attempt_", attempt);
  if (generation != first) absl::StrAppend(&attempt_folder, ".g", generation);
  const std::string folder = absl::StrCat(attempt_folder, "/", local_rank);
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return absl::InternalError(
        absl::StrCat("cannot make the log folder ", folder, ": ", error.message()));
  }
  return WorkerFiles{.folder = folder,
                     .stdout_log = folder + "/stdout.log",
                     .stderr_log = folder + "/stderr.log",
                     .error_file = folder + "/error.json",
                     .filtered_stdout = attempt_folder + "/filtered_stdout.log",
                     .filtered_stderr = attempt_folder + "/filtered_stderr.log"};
}

}  // namespace ddp::launcher
