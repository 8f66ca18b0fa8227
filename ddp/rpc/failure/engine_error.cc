#include "ddp/rpc/failure/engine_error.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/text_fields.h"

namespace ddp::rpc::internal {

namespace {

// Begins the fields of an error. No text for a person has it.
constexpr char kFields[] = "\x1e";

// Reads "Error on Node 2: " and removes it. Returns false, and changes nothing, for another text.
bool ReadNode(absl::string_view& text, int& worker) {
  absl::string_view rest = text;
  if (!absl::ConsumePrefix(&rest, kErrorOnNode)) return false;
  const size_t colon = rest.find(": ");
  int id = 0;
  if (colon == absl::string_view::npos || !absl::SimpleAtoi(rest.substr(0, colon), &id)) {
    return false;
  }
  worker = id;
  text = rest.substr(colon + 2);
  return true;
}

}  // namespace

std::string EngineError::Serialize() const {
  return absl::StrCat(kFields, lost.value_or(-1), " ", int{timeout}, " ", message);
}

EngineError EngineError::Parse(absl::string_view text) {
  EngineError error;
  while (ReadNode(text, error.worker)) continue;
  error.message = std::string(text);
  int lost = -1;
  int timeout = 0;
  std::string message;
  if (!absl::ConsumePrefix(&text, kFields) || !ReadFields(text, ' ', lost, timeout, message)) {
    return error;
  }
  error.message = message;
  error.timeout = timeout != 0;
  if (lost >= 0) error.lost = lost;
  return error;
}

std::string LostWorkerText(const std::string& name, const std::string& reason) {
  return absl::StrCat("worker ", name, " is gone (", reason, ")");
}

}  // namespace ddp::rpc::internal
