#include "elastic/checkpoint/format/checkpoint_id.h"

#include <algorithm>
#include <functional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "glog/logging.h"

namespace ddp::elastic {

std::string FolderName(const CheckpointId& id) {
  CHECK_GE(id.step, 0) << "a checkpoint of a negative step";
  return absl::StrFormat("step-%012d.g%04d", id.step, id.generation);
}

std::optional<CheckpointId> ParseFolderName(const std::string& name) {
  const std::string prefix = "step-";
  const size_t separator = name.find(".g");
  if (name.compare(0, prefix.size(), prefix) != 0 || separator == std::string::npos) {
    return std::nullopt;
  }
  const std::string step = name.substr(prefix.size(), separator - prefix.size());
  const std::string generation = name.substr(separator + 2);
  CheckpointId id;
  if (!absl::SimpleAtoi(step, &id.step) || !absl::SimpleAtoi(generation, &id.generation)) {
    return std::nullopt;
  }
  // A number has many spellings, a folder name only one.
  if (id.step < 0 || FolderName(id) != name) return std::nullopt;
  return id;
}

std::vector<CheckpointId> NewestFirst(const std::vector<std::string>& names) {
  std::vector<CheckpointId> ids;
  for (const std::string& name : names) {
    const std::optional<CheckpointId> id = ParseFolderName(name);
    if (id.has_value()) ids.push_back(*id);
  }
  std::sort(ids.begin(), ids.end(), std::greater<>());
  return ids;
}

}  // namespace ddp::elastic
