#include "ddp/rpc/failure/engine_error.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ddp::rpc::internal {

namespace {

std::string StartOfLostWorkerText(const std::string& name) {
  return absl::StrCat("worker ", name, " is gone (");
}

std::optional<int> LostWorker(const std::string& message, const std::vector<std::string>& names) {
  for (int worker = 0; worker < static_cast<int>(names.size()); ++worker) {
    if (absl::StartsWith(message, StartOfLostWorkerText(names[worker]))) return worker;
  }
  return std::nullopt;
}

}  // namespace

std::string LostWorkerText(const std::string& name, const std::string& reason) {
  return absl::StrCat(StartOfLostWorkerText(name), reason, ")");
}

std::optional<EngineError> ReadEngineError(const std::string& text,
                                           const std::vector<std::string>& names) {
  const size_t last = text.rfind(kErrorOnNode);
  if (last == std::string::npos) return std::nullopt;
  EngineError error;
  error.worker = std::atoi(text.c_str() + last + sizeof(kErrorOnNode) - 1);
  const size_t colon = text.find(": ", last);
  error.message = colon == std::string::npos ? text : text.substr(colon + 2);
  error.message = error.message.substr(0, error.message.find('\n'));
  error.lost = LostWorker(error.message, names);
  return error;
}

}  // namespace ddp::rpc::internal
