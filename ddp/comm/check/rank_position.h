#ifndef DDP_COMM_CHECK_RANK_POSITION_H_
#define DDP_COMM_CHECK_RANK_POSITION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "ddp/comm/check/collective_record.h"
#include "ddp/common/rpc_place.h"

namespace ddp::internal {

// The position of a rank: how many collectives of one incarnation it has launched, and some of them
// in detail. A value; peers read it as text from the store (see RollCall).
struct RankPosition {
  int64_t launched = 0;  // collectives so far
  RpcPlace rpc = {};
  std::vector<CollectiveRecord> newest =
      {};  // by sequence, without a gap; see CollectiveLog::Position()

  std::string Serialize() const;
  // Returns nullopt when `text` is not the result of Serialize().
  static std::optional<RankPosition> Parse(absl::string_view text);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_CHECK_RANK_POSITION_H_
