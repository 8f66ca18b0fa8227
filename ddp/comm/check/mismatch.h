#ifndef DDP_COMM_CHECK_MISMATCH_H_
#define DDP_COMM_CHECK_MISMATCH_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ddp/comm/check/collective_record.h"

namespace ddp::internal {

// Starts the part of a purpose in which ranks may differ: see model_agreement.cc.
inline constexpr char kChangeOfParameter[] = " after a change of parameter";

// Compares the positions of the ranks. Rank `asker` waits for collective `awaited`.
// First looks for a collective that two ranks launched differently. If there is none, looks for
// a rank that waits for `asker` in Workers::barrier() or shutdown() of ddp/rpc, when `asker` is one
// of these workers, and so cannot launch `awaited`. Returns an empty text when both searches fail.
// Otherwise returns the error text for all ranks, with the collective of each rank and the remedy.
std::string DescribeMismatch(const std::map<int, RankPosition>& positions, int asker,
                             int64_t awaited);

// Compares what the ranks, by rank, are about to launch as collective `sequence`. Returns an empty
// text when they agree, and otherwise the error that every rank throws. The error shows the version
// of most ranks (in a tie, of the lowest rank). It then shows every other version, with its ranks
// and the properties that differ.
std::string DescribeDifference(int64_t sequence, const std::vector<CollectiveRecord>& records);

}  // namespace ddp::internal

#endif  // DDP_COMM_CHECK_MISMATCH_H_
