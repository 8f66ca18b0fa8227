#include "launcher/output/log_layout.h"

#include <cctype>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace ddp::launcher {
namespace {

// Limit of the run id's part: a file name has at most 255 bytes.
constexpr size_t kMaxName = 200;

std::string FileName(std::string name) {
  for (char& c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) == 0 && std::strchr("-_.+:@", c) == nullptr && byte < 0x80) c = '_';
  }
  if (name.size() > kMaxName) {
    size_t end = kMaxName;  // between two characters of UTF-8
    while (end > 0 && (static_cast<unsigned char>(name[end]) & 0xC0) == 0x80) --end;
    name.resize(end);
  }
  return name[0] == '.' ? absl::StrCat("_", name) : name;
}

}  // namespace

LogLayout::LogLayout(LogRoot root) : root_(std::move(root)) {}

absl::StatusOr<LogLayout> LogLayout::Create(const std::string& log_dir, const std::string& run_id) {
  if (log_dir == "/dev/null") return LogLayout();
  std::error_code error;
  const std::string absolute = std::filesystem::absolute(log_dir, error).string();
  const absl::Status made =
      error ? absl::InvalidArgumentError(error.message()) : MakeFolders(absolute);
  if (!made.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot make the log folder ", log_dir, ": ", std::string(made.message())));
  }
  absl::StatusOr<LogRoot> root = MakeLogRoot(absolute, FileName(run_id));
  if (!root.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("cannot write to the log folder ", log_dir, ": ",
                                                   std::string(root.status().message())));
  }
  return LogLayout(*std::move(root));
}

absl::StatusOr<LogLayout::WorkerFiles> LogLayout::MakeWorkerFolder(int attempt, uint64_t generation,
                                                                   int local_rank) {
  if (root().empty()) return WorkerFiles();
  const uint64_t first = first_generation_.emplace(attempt, generation).first->second;
  std::string attempt_name = absl::StrCat("attempt_", attempt);
  if (generation != first) absl::StrAppend(&attempt_name, ".g", generation);
  DDP_RETURN_IF_ERROR(MakeLogFolder(root_, absl::StrCat(attempt_name, "/", local_rank)));
  const std::string attempt_folder = absl::StrCat(root(), "/", attempt_name);
  const std::string folder = absl::StrCat(attempt_folder, "/", local_rank);
  return WorkerFiles{.folder = folder,
                     .stdout_log = folder + "/stdout.log",
                     .stderr_log = folder + "/stderr.log",
                     .error_file = folder + "/error.json",
                     .filtered_stdout = attempt_folder + "/filtered_stdout.log",
                     .filtered_stderr = attempt_folder + "/filtered_stderr.log"};
}

absl::StatusOr<UniqueFd> LogLayout::OpenFile(const std::string& path) const {
  return OpenLogFile(root_, path);
}

}  // namespace ddp::launcher
