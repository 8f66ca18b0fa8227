#include "ddp/comm/check/collective_record.h"

#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/text_fields.h"

namespace ddp::internal {
namespace {

std::string ByteText(int64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " bytes");
  if (bytes < 1024 * 1024) return absl::StrFormat("%.1f KiB", static_cast<double>(bytes) / 1024);
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1024 * 1024));
}

}  // namespace

std::string CollectiveRecord::Serialize() const {
  return absl::StrJoin(std::tuple(sequence, fingerprint, operation, absl::CEscape(what), dtype,
                                  bytes, shape, layout, device, root),
                       "\t");
}

std::optional<CollectiveRecord> CollectiveRecord::Parse(absl::string_view text) {
  CollectiveRecord record;
  std::string escaped;
  const bool read = ReadFields(text, '\t', record.sequence, record.fingerprint, record.operation,
                               escaped, record.dtype, record.bytes, record.shape, record.layout,
                               record.device, record.root);
  return read && absl::CUnescape(escaped, &record.what) ? std::optional(record) : std::nullopt;
}

std::string CollectiveRecord::Describe() const {
  if (dtype.empty()) return what;
  return absl::StrCat(what, " (", operation, ", ", ByteText(bytes), " of ", dtype, ")");
}

std::string CollectiveRecord::DescribeTensor() const {
  return absl::StrCat(operation, root >= 0 ? absl::StrCat(" from rank ", root) : "", " of a ",
                      layout == "Strided" ? "" : absl::StrCat(layout, " "), dtype,
                      " tensor of shape ", shape, " on ", device, " (", what, ")");
}

std::string RankPosition::Serialize() const {
  std::string text = absl::StrJoin(
      std::tuple(launched, rpc.world, rpc.meetings, static_cast<int>(rpc.waits_in)), " ");
  for (const CollectiveRecord& item : newest) absl::StrAppend(&text, "\n", item.Serialize());
  return text;
}

std::optional<RankPosition> RankPosition::Parse(absl::string_view text) {
  const std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  RankPosition position;
  int waits_in = 0;
  if (!ReadFields(lines[0], ' ', position.launched, position.rpc.world, position.rpc.meetings,
                  waits_in) ||
      waits_in < 0 || waits_in > static_cast<int>(RpcPlace::Meeting::kShutdown)) {
    return std::nullopt;
  }
  position.rpc.waits_in = static_cast<RpcPlace::Meeting>(waits_in);
  for (size_t i = 1; i < lines.size(); ++i) {
    std::optional<CollectiveRecord> item = CollectiveRecord::Parse(lines[i]);
    if (!item.has_value()) return std::nullopt;
    position.newest.push_back(*std::move(item));
  }
  return position;
}

}  // namespace ddp::internal
