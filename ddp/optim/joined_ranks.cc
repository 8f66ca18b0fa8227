// What the ranks of a ZeroCore do for those that have joined: ranks without inputs.
#include <algorithm>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "ddp/optim/shard_plan.h"
#include "ddp/optim/zero_core.h"
#include "ddp/process_group.h"

namespace ddp::internal {

bool ZeroCore::HasJoined(const JoinRound& round, int rank) {
  const std::vector<int>& active = round.active_ranks;
  return std::find(active.begin(), active.end(), rank) == active.end();
}

// Gives the ranks without inputs the options and gradients of the round's source.
void ZeroCore::ServeJoinedRanks(Groups& groups, const JoinRound& round) {
  const int source = round.source();
  const int rank = group_->rank();
  const bool joined = HasJoined(round, rank);
  std::string options;
  if (rank == source) options = OptionBytes(groups);
  BroadcastText(*group_, source, options);
  if (joined) SetOptions(options, groups);

  const auto count = static_cast<int64_t>(parameters_.tensors().size());
  at::Tensor with_gradient = at::zeros({count}, at::kByte);
  for (int64_t i = 0; i < count; ++i) {
    with_gradient.mutable_data_ptr<uint8_t>()[i] = parameters_.tensors()[i].grad().defined();
  }
  at::Tensor sent = with_gradient.to(group_->device());
  group_->broadcast(sent, source);
  with_gradient = group_->to_host(sent);

  std::vector<at::Tensor> gradients(parameters_.mine().size());
  for (int other = 0; other < group_->size(); ++other) {
    if (HasJoined(round, other)) ServePart(other, source, with_gradient, gradients);
  }
  if (joined) parameters_.TakeGradients(gradients);
}

// Sends `rank`'s part of the gradients from `source`. Only `rank` uses it.
void ZeroCore::ServePart(int rank, int source, const at::Tensor& with_gradient,
                         std::vector<at::Tensor>& gradients) {
  const ShardPlan& plan = parameters_.plan();
  for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
    const std::vector<ShardPlan::Piece> pieces = plan.Pieces(b, rank);
    if (pieces.empty()) continue;
    const int64_t elements = pieces.back().offset + pieces.back().size();
    const at::Tensor& like = parameters_.tensors()[pieces.front().parameter];
    const at::Tensor part = at::zeros({elements}, like.options());
    if (group_->rank() == source) {
      const std::vector<at::Tensor> mine = parameters_.GradientsOf(b, rank);
      for (size_t i = 0; i < pieces.size(); ++i) {
        if (!mine[i].defined()) continue;
        part.narrow(0, pieces[i].offset, pieces[i].size()).view(mine[i].sizes()).copy_(mine[i]);
      }
    }
    group_->broadcast(part, source);
    if (group_->rank() != rank) continue;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const ShardedParameters::Mine& mine = parameters_.mine()[i];
      const ShardPlan::Piece& piece = mine.piece;
      if (mine.bucket != b || with_gradient.const_data_ptr<uint8_t>()[piece.parameter] == 0) {
        continue;
      }
      gradients[i] = part.narrow(0, piece.offset, piece.size()).view(mine.view.sizes());
    }
  }
}

void ZeroCore::FinishJoin(Groups& groups, bool is_last_joiner, int last_joiner) {
  Wait();
  std::string options;
  if (is_last_joiner) options = OptionBytes(groups);
  BroadcastText(*group_, last_joiner, options);
  if (!is_last_joiner) SetOptions(options, groups);
}

}  // namespace ddp::internal
