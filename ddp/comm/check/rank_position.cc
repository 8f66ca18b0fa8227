#include "ddp/comm/check/rank_position.h"

#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/text_fields.h"

namespace ddp::internal {
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
