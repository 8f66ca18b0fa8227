#include "elastic/checkpoint/group/wire_status.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ddp::elastic {

std::string EncodeResult(const absl::StatusOr<std::string>& result) {
  if (result.ok()) return absl::StrCat("0\n", *result);
  return absl::StrCat(static_cast<int>(result.status().code()), "\n", result.status().message());
}

absl::StatusOr<std::string> DecodeResult(const std::string& text) {
  const size_t end = text.find('\n');
  int code = 0;
  if (end == std::string::npos || !absl::SimpleAtoi(text.substr(0, end), &code) || code < 0 ||
      code > static_cast<int>(absl::StatusCode::kUnauthenticated)) {
    return absl::InternalError("a rank has sent something that is no result");
  }
  if (code == 0) return text.substr(end + 1);
  return absl::Status(static_cast<absl::StatusCode>(code), text.substr(end + 1));
}

absl::Status FromRank(size_t rank, const absl::Status& error) {
  return absl::Status(error.code(), absl::StrCat("rank ", rank, ": ", error.message()));
}

}  // namespace ddp::elastic
