// What the ranks of a ZeroRedundancyOptimizer do under a Join for those without inputs.
#ifndef DDP_OPTIM_JOINED_RANKS_H_
#define DDP_OPTIM_JOINED_RANKS_H_

#include <vector>

#include <torch/optim/optimizer.h>

#include "ddp/join.h"
#include "ddp/optim/sharded_parameters.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

// Returns true when `rank` has no inputs in this round.
bool HasJoined(const JoinRound& round, int rank);

// Replaces the options of `groups` by those of rank `root`, on ranks that `take` them. Collective.
void SendOptions(ProcessGroup& group, int root, bool take,
                 std::vector<torch::optim::OptimizerParamGroup>& groups);

// Gives the options and gradients of the round's source to the ranks without inputs: each gets its
// part of the gradients. Collective.
void ServeJoinedRanks(ProcessGroup& group, const JoinRound& round, ShardedParameters& parameters,
                      std::vector<torch::optim::OptimizerParamGroup>& groups);

}  // namespace ddp::internal

#endif  // DDP_OPTIM_JOINED_RANKS_H_
