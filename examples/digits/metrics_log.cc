#include "examples/digits/metrics_log.h"

#include <filesystem>
#include <fstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace ddp::examples {

MetricsLog::MetricsLog(std::string path) : path_(std::move(path)) {}

absl::Status MetricsLog::Append(const Entry& entry) const {
  const nlohmann::ordered_json line = {{"step", entry.step},
                                       {"epoch", entry.epoch},
                                       {"loss", entry.loss},
                                       {"test_accuracy", entry.test_accuracy},
                                       {"samples_per_second", entry.samples_per_second}};
  std::ofstream file(path_, std::ios::app);
  file << line.dump() << std::endl;
  if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", path_));
  return absl::OkStatus();
}

absl::Status MetricsLog::CutBackTo(int64_t step) const {
  std::ifstream file(path_);  // a missing file has no lines to keep
  std::string kept;
  for (std::string line; std::getline(file, line);) {
    const nlohmann::json entry = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!entry.is_object() || !entry.contains("step") || !entry["step"].is_number_integer())
      continue;
    if (entry["step"].get<int64_t>() <= step) absl::StrAppend(&kept, line, "\n");
  }
  const std::string beside = path_ + ".tmp";
  std::ofstream out(beside, std::ios::trunc);
  out << kept << std::flush;
  std::error_code error;
  if (out) std::filesystem::rename(beside, path_, error);
  if (!out || error) return absl::UnavailableError(absl::StrCat("cannot write ", path_));
  return absl::OkStatus();
}

}  // namespace ddp::examples
