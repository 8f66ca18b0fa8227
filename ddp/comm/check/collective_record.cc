#include "ddp/comm/check/collective_record.h"

#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace ddp::internal {
namespace {

std::string ByteText(int64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " bytes");
  if (bytes < 1024 * 1024) return absl::StrFormat("%.1f KiB", static_cast<double>(bytes) / 1024);
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1024 * 1024));
}

}  // namespace

std::string CollectiveRecord::Serialize() const {
  return absl::StrJoin(
      {absl::StrCat(sequence), absl::StrCat(absl::Hex(fingerprint)), operation, absl::CEscape(what),
       dtype, absl::StrCat(bytes), shape, layout, device, absl::StrCat(root)},
      "\t");
}

std::optional<CollectiveRecord> CollectiveRecord::Parse(absl::string_view text) {
  const std::vector<std::string> fields = absl::StrSplit(text, '\t');
  CollectiveRecord record;
  if (fields.size() != 10 || !absl::SimpleAtoi(fields[0], &record.sequence) ||
      !absl::SimpleHexAtoi(fields[1], &record.fingerprint) ||
      !absl::CUnescape(fields[3], &record.what) || !absl::SimpleAtoi(fields[5], &record.bytes) ||
      !absl::SimpleAtoi(fields[9], &record.root)) {
    return std::nullopt;
  }
  record.operation = fields[2];
  record.dtype = fields[4];
  record.shape = fields[6];
  record.layout = fields[7];
  record.device = fields[8];
  return record;
}

std::string CollectiveRecord::Describe() const {
  return absl::StrCat(what, " (", operation, ", ", ByteText(bytes), " of ", dtype, ")");
}

std::string CollectiveRecord::DescribeTensor() const {
  return absl::StrCat(operation, root >= 0 ? absl::StrCat(" from rank ", root) : "", " of a ",
                      layout == "Strided" ? "" : absl::StrCat(layout, " "), dtype,
                      " tensor of shape ", shape, " on ", device, " (", what, ")");
}

}  // namespace ddp::internal
