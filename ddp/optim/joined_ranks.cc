#include "ddp/optim/joined_ranks.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "ddp/optim/shard_plan.h"
#include "ddp/optim/shard_state.h"
#include "ddp/process_group.h"

namespace ddp::internal {
namespace {

// Tells all ranks which parameters have a gradient on rank `source`: a byte for each.
at::Tensor SendDefined(ProcessGroup& group, int source, const ShardedParameters& parameters) {
  const auto count = static_cast<int64_t>(parameters.tensors().size());
  at::Tensor defined = at::zeros({count}, at::kByte);
  for (int64_t i = 0; i < count; ++i) {
    defined.mutable_data_ptr<uint8_t>()[i] = parameters.tensors()[i].grad().defined();
  }
  defined = defined.to(group.device());
  group.broadcast(defined, source);
  return group.to_host(defined);
}

// Sends `rank`'s part of a bucket's gradients from `source`. On `rank`, puts the gradients into
// `received`, by ShardedParameters::mine().
void ServePart(ProcessGroup& group, int source, int rank, int bucket,
               const ShardedParameters& parameters, std::vector<at::Tensor>& received) {
  const std::vector<ShardPlan::Piece> pieces = parameters.plan().Pieces(bucket, rank);
  if (pieces.empty()) return;
  const int64_t begin = pieces.front().offset;
  const int64_t elements = pieces.back().offset + pieces.back().size() - begin;
  const at::Tensor& like = parameters.tensors()[pieces.front().parameter];
  const at::Tensor part = at::zeros({elements}, like.options());
  const auto in_part = [&](const ShardPlan::Piece& piece, at::IntArrayRef sizes) {
    return part.narrow(0, piece.offset - begin, piece.size()).view(sizes);
  };
  if (group.rank() == source) {
    for (const ShardPlan::Piece& piece : pieces) {
      const at::Tensor gradient = parameters.GradientOf(piece);
      if (gradient.defined()) in_part(piece, gradient.sizes()).copy_(gradient);
    }
  }
  group.broadcast(part, source);
  if (group.rank() != rank) return;
  for (size_t i = 0; i < received.size(); ++i) {
    const ShardedParameters::Mine& mine = parameters.mine()[i];
    if (mine.bucket == bucket) received[i] = in_part(mine.piece, mine.view.sizes());
  }
}

}  // namespace

bool HasJoined(const JoinRound& round, int rank) {
  const std::vector<int>& active = round.active_ranks;
  return std::find(active.begin(), active.end(), rank) == active.end();
}

void SendOptions(ProcessGroup& group, int root, bool take,
                 std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::string options;
  if (group.rank() == root) options = OptionBytes(groups);
  BroadcastText(group, root, options);
  if (take) SetOptions(options, groups);
}

void ServeJoinedRanks(ProcessGroup& group, const JoinRound& round, ShardedParameters& parameters,
                      std::vector<torch::optim::OptimizerParamGroup>& groups) {
  const int source = round.source();
  const bool joined = HasJoined(round, group.rank());
  SendOptions(group, source, /*take=*/joined, groups);
  const at::Tensor defined = SendDefined(group, source, parameters);
  std::vector<at::Tensor> gradients(parameters.mine().size());
  const auto buckets = static_cast<int>(parameters.plan().buckets().size());
  for (int rank = 0; rank < group.size(); ++rank) {
    for (int bucket = 0; HasJoined(round, rank) && bucket < buckets; ++bucket) {
      ServePart(group, source, rank, bucket, parameters, gradients);
    }
  }
  if (!joined) return;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const int parameter = parameters.mine()[i].piece.parameter;
    if (defined.const_data_ptr<uint8_t>()[parameter] == 0) gradients[i].reset();
  }
  parameters.TakeGradients(gradients);
}

}  // namespace ddp::internal
