#include "launcher/output/root_cause_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "elastic/error_file/error_record.h"
#include "launcher/output/failure_report.h"

namespace ddp::launcher {
namespace {

elastic::ErrorRecord RecordOf(const elastic::WorkerFailure& failure) {
  if (!failure.error_file.empty()) {
    absl::StatusOr<elastic::ErrorRecord> record = elastic::ReadErrorRecord(failure.error_file);
    if (record.ok()) {
      if (record->time == absl::InfinitePast()) record->time = failure.wall_time;
      if (!failure.instead.empty()) {
        record->message = absl::StrCat(AgentsWords(failure), "\n", record->message);
      }
      return *std::move(record);
    }
  }
  elastic::ErrorRecord record;
  record.message = DescribeFailure(failure, {}).text;
  record.time = failure.wall_time;
  record.is_victim = failure.is_victim;
  return record;
}

std::string Contents(const elastic::ErrorRecord& record, int exit_code) {
  using Json = nlohmann::json;
  const std::string text = elastic::FormatErrorRecord(record);
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (exit_code != 0) json["message"]["errorCode"] = exit_code;
  return json.dump();
}

absl::Status Write(const std::string& path, const std::string& contents) {
  const auto error = [&path] {
    return absl::InternalError(
        absl::StrCat("TORCHELASTIC_ERROR_FILE=", path, ": ", std::strerror(errno)));
  };
  const UniqueFd file(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!file.valid()) return error();
  size_t written = 0;
  while (written < contents.size()) {
    const ssize_t count = ::write(file.get(), contents.data() + written, contents.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return error();
    written += static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteRootCauseFile(const std::string& path, const elastic::WorkerFailure& root_cause) {
  const int signal = root_cause.status.signal;
  return Write(path,
               Contents(RecordOf(root_cause), signal != 0 ? -signal : root_cause.status.exit_code));
}

absl::Status WriteRootCauseFile(const std::string& path, const std::string& text, int exit_code,
                                absl::Time time) {
  elastic::ErrorRecord record;
  record.message = text;
  record.time = time;
  return Write(path, Contents(record, exit_code));
}

}  // namespace ddp::launcher
