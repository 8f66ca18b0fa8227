#include "ddp/comm/check/rank_position.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ddp::internal {
std::string RankPosition::Serialize() const {
  std::string text = absl::StrCat(launched, " ", barriers, " ", in_barrier ? 1 : 0);
  if (rpc.world != 0) {
    absl::StrAppend(&text, " ", rpc.world, " ", rpc.meetings, " ", static_cast<int>(rpc.waits_in));
  }
  for (const CollectiveRecord& item : newest) absl::StrAppend(&text, "\n", item.Serialize());
  return text;
}

std::optional<RankPosition> RankPosition::Parse(absl::string_view text) {
  const std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  const std::vector<absl::string_view> numbers = absl::StrSplit(lines[0], ' ');
  RankPosition position;
  int in_barrier = 0;
  if ((numbers.size() != 3 && numbers.size() != 6) ||
      !absl::SimpleAtoi(numbers[0], &position.launched) ||
      !absl::SimpleAtoi(numbers[1], &position.barriers) ||
      !absl::SimpleAtoi(numbers[2], &in_barrier)) {
    return std::nullopt;
  }
  position.in_barrier = in_barrier != 0;
  if (numbers.size() == 6) {
    int waits_in = 0;
    if (!absl::SimpleAtoi(numbers[3], &position.rpc.world) ||
        !absl::SimpleAtoi(numbers[4], &position.rpc.meetings) ||
        !absl::SimpleAtoi(numbers[5], &waits_in) || waits_in < 0 ||
        waits_in > static_cast<int>(RpcPlace::Meeting::kShutdown)) {
      return std::nullopt;
    }
    position.rpc.waits_in = static_cast<RpcPlace::Meeting>(waits_in);
  }
  for (size_t i = 1; i < lines.size(); ++i) {
    std::optional<CollectiveRecord> item = CollectiveRecord::Parse(lines[i]);
    if (!item.has_value()) return std::nullopt;
    position.newest.push_back(*std::move(item));
  }
  return position;
}

}  // namespace ddp::internal
