#include "ddp/optim/value_transfer.h"

#include <cstddef>
#include <exception>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/process_group.h"

namespace ddp::internal {
namespace {

// Returns a piece's elements in `values`, the bucket in one row, in the shape of PieceOf(tensor).
at::Tensor InBucket(const at::Tensor& values, const ShardPlan::Piece& piece,
                    const at::Tensor& tensor) {
  const at::Tensor row = values.narrow(0, piece.offset, piece.size());
  return piece.whole ? row.view(tensor.sizes()) : row;
}

}  // namespace

ValueTransfer::~ValueTransfer() {
  if (!peers_.published() || !pending()) return;
  try {
    Finish();
  } catch (const std::exception& error) {  // the group has ended, and peers have stopped
    LOG(WARNING) << "parameters of a ZeroRedundancyOptimizer have old and new values: "
                 << MessageOf(error);
  }
}

void ValueTransfer::Start(const std::vector<bool>& sent) {
  if (parameters_.ranks() == 1) return;
  const at::NoGradGuard no_grad;
  try {
    std::vector<int> reached;
    const std::vector<ShardPlan::Bucket>& buckets = parameters_.plan().buckets();
    for (int b = 0; b < static_cast<int>(buckets.size()); ++b) {
      if (!sent[b] || buckets[b].elements == 0) continue;
      if (peers_.Reaches(buckets[b])) {
        reached.push_back(b);
        continue;
      }
      buckets_.push_back(SentBucket(b));
      StartCollectives(buckets[b], buckets_.back());
    }
    if (reached.empty()) return;
    const size_t first = buckets_.size();
    for (const int b : reached) buckets_.push_back(SentBucket(b));
    buckets_[first].works.push_back(peers_.Write(reached));
  } catch (...) {
    AbandonPeers();
    Drop();  // those that have been started may complete: this is no complete step
    throw;
  }
}

ValueTransfer::Sent ValueTransfer::SentBucket(int bucket) const {
  Sent sent{.bucket = bucket};
  for (const int parameter : parameters_.plan().buckets()[bucket].parameters) {
    const at::Tensor& tensor = parameters_.tensors()[parameter];
    sent.memory.push_back({.storage = tensor.storage(), .data = tensor.const_data_ptr()});
  }
  return sent;
}

// A bucket with an owner is a broadcast; each rank sends its part of any other.
void ValueTransfer::StartCollectives(const ShardPlan::Bucket& bucket, Sent& sent) {
  const int ranks = parameters_.ranks();
  const at::TensorOptions options = parameters_.tensors()[bucket.parameters.front()].options();
  const int64_t elements = bucket.owner < 0 ? ranks * bucket.part : bucket.part;
  const at::Tensor values = at::empty({elements}, options.requires_grad(false));
  for (const ShardedParameters::Mine& mine : parameters_.mine()) {
    if (mine.bucket == sent.bucket) InBucket(values, mine.piece, mine.view).copy_(mine.view);
  }
  sent.values = values;
  const auto part = [&](int rank) { return values.narrow(0, rank * bucket.part, bucket.part); };
  if (bucket.owner >= 0) {
    sent.works.push_back(group_.broadcast_async(values, bucket.owner));
  } else if (group_.backend() == "gloo" && ranks == 2) {
    // LibTorch's Gloo copies all values once more in an all-gather, and none in a broadcast.
    for (int rank = 0; rank < ranks; ++rank) {
      sent.works.push_back(group_.broadcast_async(part(rank), rank));
    }
  } else {
    sent.works.push_back(group_.all_gather_async(values, part(parameters_.rank())));
  }
}

int ValueTransfer::Finish() {
  const at::NoGradGuard no_grad;
  int changed = -1;
  try {
    for (Sent& sent : buckets_) {
      for (Work& work : sent.works) work.wait();
      const int parameter = Write(sent);
      if (changed < 0) changed = parameter;
    }
  } catch (...) {
    AbandonPeers();
    Drop();
    throw;
  }
  Drop();
  peers_.Complete();
  return changed;
}

int ValueTransfer::Write(const Sent& sent) {
  const ShardPlan& plan = parameters_.plan();
  const std::vector<int>& parameters = plan.buckets()[sent.bucket].parameters;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters_.tensors()[parameters[i]];
    if (tensor.const_data_ptr() != sent.memory[i].data) return parameters[i];
    // As a write by LibTorch: autograd refuses to use older values that it has saved.
    if (!sent.values.defined()) tensor.unsafeGetTensorImpl()->bump_version();
  }
  if (!sent.values.defined()) return -1;
  for (int rank = 0; rank < parameters_.ranks(); ++rank) {
    if (rank == parameters_.rank()) continue;
    for (const ShardPlan::Piece& piece : plan.Pieces(sent.bucket, rank)) {
      const at::Tensor& tensor = parameters_.tensors()[piece.parameter];
      PieceOf(tensor, piece).copy_(InBucket(sent.values, piece, tensor));
    }
  }
  return -1;
}

void ValueTransfer::AbandonPeers() {
  std::vector<c10::Storage> in_use;
  for (const Sent& sent : buckets_) {
    for (const Memory& memory : sent.memory) in_use.push_back(memory.storage);
  }
  peers_.Abandon(in_use);
}

}  // namespace ddp::internal
