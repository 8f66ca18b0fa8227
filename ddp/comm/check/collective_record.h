#ifndef DDP_COMM_CHECK_COLLECTIVE_RECORD_H_
#define DDP_COMM_CHECK_COLLECTIVE_RECORD_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "ddp/common/rpc_place.h"

namespace ddp::internal {

// A collective of a rank, as the ranks compare it: the properties that must be equal on all ranks,
// the purpose (`what`) included. A plain value. Peers read it as text from the store.
struct CollectiveRecord {
  int64_t sequence = 0;        // counted from 0
  uint64_t fingerprint = 0;    // see CollectiveLog; 0 before the launch
  std::string operation = {};  // "all-reduce (sum)"
  std::string what = {};       // "the all-reduce of gradient bucket 3"
  std::string dtype = {};      // "Float"
  int64_t bytes = 0;
  // Known before the launch, where all ranks compare each collective (see CollectiveCheck).
  std::string shape = "[]";  // "[2, 3]"
  std::string layout = "Strided";
  std::string device = {};  // the type: "cpu"
  int64_t root = -1;        // rank, of a broadcast; -1 for other collectives

  friend bool operator==(const CollectiveRecord&, const CollectiveRecord&) = default;

  // One line.
  std::string Serialize() const;
  // Returns nullopt when `text` is not the result of Serialize().
  static std::optional<CollectiveRecord> Parse(absl::string_view text);

  // Returns "the all-reduce of gradient bucket 3 (all-reduce (sum), 4.0 MiB of Float)".
  std::string Describe() const;

  // Returns "all-reduce (sum) of a Float tensor of shape [2, 3] on cpu (the all-reduce of ...)".
  std::string DescribeTensor() const;
};

// The position of a rank: how many collectives of one incarnation it has launched, and some of them
// in detail. A value; peers read it as text from the store (see ReportLog).
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

#endif  // DDP_COMM_CHECK_COLLECTIVE_RECORD_H_
