#include "ddp/optim/sharded_parameters.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/optim/optimizer.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/optim/peer_memory.h"
#include "ddp/process_group.h"

namespace ddp::internal {
namespace {

// Returns elements of a tensor without gaps as one row, in the order of its memory. As
// FlatView().narrow(), with one call of LibTorch less: models have thousands of parameters.
at::Tensor FlatPart(const at::Tensor& dense, const ShardPlan::Piece& piece) {
  return dense.detach().as_strided({piece.size()}, {1}, dense.storage_offset() + piece.begin);
}

}  // namespace

at::Tensor FlatView(const at::Tensor& dense) {
  return dense.detach().as_strided({dense.numel()}, {1});
}

ShardedParameters::ShardedParameters(ShardPlan::Options options, int rank)
    : options_(options), rank_(rank), plan_(options) {}

ShardedParameters::~ShardedParameters() {
  if (peers_ == nullptr || transfers_.empty()) return;
  try {
    FinishTransfer();
  } catch (const std::exception& error) {  // the group has ended, and peers have stopped
    LOG(WARNING) << "parameters of a ZeroRedundancyOptimizer have old and new values: "
                 << MessageOf(error);
  }
}

ShardedParameters::Form ShardedParameters::FormOf(const at::Tensor& tensor) {
  return {.type = tensor.scalar_type(),
          .device = tensor.device(),
          .sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec()};
}

ShardPlan::Tensor ShardedParameters::Property(const at::Tensor& tensor) {
  const std::string kind =
      absl::StrCat(toString(tensor.scalar_type()), tensor.device().str(), tensor.requires_grad());
  return {.elements = tensor.numel(),
          .element_bytes = static_cast<int64_t>(tensor.element_size()),
          .kind = kinds_.emplace(kind, static_cast<int>(kinds_.size())).first->second,
          .flat = tensor.is_non_overlapping_and_dense() && !tensor.is_complex()};
}

std::vector<size_t> ShardedParameters::Add(const std::vector<std::vector<at::Tensor>>& groups) {
  const size_t old_buckets = plan_.buckets().size();
  std::vector<std::vector<ShardPlan::Tensor>> properties;
  for (const std::vector<at::Tensor>& group : groups) {
    properties.emplace_back();
    for (const at::Tensor& tensor : group) {
      tensors_.push_back(tensor);
      groups_.push_back(group_count_);
      forms_.push_back(FormOf(tensor));
      properties.back().push_back(Property(tensor));
    }
    ++group_count_;
  }
  plan_.Add(properties);
  std::vector<Mine> added;
  for (size_t b = old_buckets; b < plan_.buckets().size(); ++b) {
    for (const ShardPlan::Piece& piece : plan_.Pieces(static_cast<int>(b), rank_)) {
      Mine mine{.bucket = static_cast<int>(b), .piece = piece, .group = groups_[piece.parameter]};
      mine.view = ViewOf(mine);
      added.push_back(std::move(mine));
    }
  }
  // The order of the parameters: an optimizer takes them in the order of its groups.
  std::stable_sort(added.begin(), added.end(), [](const Mine& a, const Mine& b) {
    return a.piece.parameter < b.piece.parameter;
  });
  std::vector<size_t> numbers;
  for (Mine& mine : added) {
    numbers.push_back(mine_.size());
    mine_.push_back(std::move(mine));
  }
  return numbers;
}

at::Tensor ShardedParameters::ViewOf(const Mine& mine) const {
  const at::Tensor& tensor = tensors_[mine.piece.parameter];
  if (plan_.buckets()[mine.bucket].owner >= 0) return tensor.detach();
  return FlatPart(tensor, mine.piece);
}

bool ShardedParameters::HasGroups(
    const std::vector<torch::optim::OptimizerParamGroup>& groups) const {
  if (static_cast<int>(groups.size()) != group_count_) return false;
  size_t number = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const at::Tensor& tensor : groups[g].params()) {
      if (number == tensors_.size() || groups_[number] != static_cast<int>(g) ||
          !tensors_[number].is_same(tensor)) {
        return false;
      }
      ++number;
    }
  }
  return number == tensors_.size();
}

bool ShardedParameters::Form::Fits(const at::Tensor& tensor) const {
  return tensor.scalar_type() == type && tensor.device() == device && tensor.sizes() == sizes &&
         tensor.strides() == strides;
}

int ShardedParameters::FindChanged() const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!forms_[i].Fits(tensors_[i])) return static_cast<int>(i);
  }
  return -1;
}

int ShardedParameters::FindUnusableGradient() const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& gradient = tensors_[i].grad();
    if (!gradient.defined()) continue;
    if (gradient.layout() != at::kStrided || gradient.sizes() != tensors_[i].sizes() ||
        gradient.scalar_type() != tensors_[i].scalar_type() ||
        gradient.device() != tensors_[i].device()) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

void ShardedParameters::FollowMemory() {
  for (Mine& mine : mine_) {
    const at::Tensor& tensor = tensors_[mine.piece.parameter];
    const auto* const memory = static_cast<const std::byte*>(tensor.const_data_ptr());
    const auto begin = mine.piece.begin * static_cast<int64_t>(tensor.element_size());
    if (memory + begin != mine.view.const_data_ptr()) mine.view.set_data(ViewOf(mine));
  }
}

at::Tensor ShardedParameters::GradientOf(int bucket, const ShardPlan::Piece& piece) const {
  const at::Tensor& tensor = tensors_[piece.parameter];
  const at::Tensor& gradient = tensor.grad();
  if (!gradient.defined()) return {};
  if (plan_.buckets()[bucket].owner >= 0) return gradient.detach();
  if (gradient.strides() == tensor.strides()) return FlatPart(gradient, piece);
  return FlatPart(at::empty_like(tensor).copy_(gradient), piece);  // in another memory order
}

std::vector<at::Tensor> ShardedParameters::GradientsOf(int bucket, int rank) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const ShardPlan::Piece& piece : plan_.Pieces(bucket, rank)) {
    gradients.push_back(GradientOf(bucket, piece));
  }
  return gradients;
}

void ShardedParameters::TakeGradients() {
  const at::NoGradGuard no_grad;
  for (Mine& mine : mine_) mine.view.mutable_grad() = GradientOf(mine.bucket, mine.piece);
}

void ShardedParameters::TakeGradients(const std::vector<at::Tensor>& instead) {
  for (size_t i = 0; i < mine_.size(); ++i) mine_[i].view.mutable_grad() = instead[i];
}

void ShardedParameters::DropGradients() {
  for (Mine& mine : mine_) mine.view.mutable_grad().reset();
}

std::vector<bool> ShardedParameters::BucketsWithGradients() const {
  std::vector<bool> with;
  for (const ShardPlan::Bucket& bucket : plan_.buckets()) {
    with.push_back(
        std::any_of(bucket.parameters.begin(), bucket.parameters.end(),
                    [this](int parameter) { return tensors_[parameter].grad().defined(); }));
  }
  return with;
}

void ShardedParameters::StartTransfer(ProcessGroup& group, const std::vector<bool>& sent) {
  if (options_.ranks == 1) return;
  const at::NoGradGuard no_grad;
  try {
    StartCollectives(group, sent);
    if (peers_ != nullptr) WriteToPeers(group, sent);
  } catch (...) {
    AbandonPeers();
    DropTransfers();  // those that have been started may complete: this is no complete step
    throw;
  }
}

void ShardedParameters::StartCollectives(ProcessGroup& group, const std::vector<bool>& sent) {
  for (size_t b = 0; b < plan_.buckets().size(); ++b) {
    const ShardPlan::Bucket& bucket = plan_.buckets()[b];
    if (!sent[b] || bucket.elements == 0 || ReachesPeers(bucket)) continue;
    const at::TensorOptions options = tensors_[bucket.parameters.front()].options();
    const bool even = bucket.owner < 0;
    Transfer transfer = TransferOf(b);
    transfer.values = at::empty({even ? options_.ranks * bucket.part : bucket.part},
                                options.requires_grad(false));
    const int64_t begin = even ? rank_ * bucket.part : 0;  // of this rank's part
    for (const Mine& mine : mine_) {
      if (mine.bucket != transfer.bucket) continue;
      at::Tensor to = transfer.values.narrow(0, begin + mine.piece.offset, mine.piece.size());
      to.view(mine.view.sizes()).copy_(mine.view);
    }
    transfer.works = Send(group, bucket, transfer.values);
    transfers_.push_back(std::move(transfer));
  }
}

ShardedParameters::Transfer ShardedParameters::TransferOf(size_t bucket) const {
  Transfer transfer{.bucket = static_cast<int>(bucket)};
  for (const int parameter : plan_.buckets()[bucket].parameters) {
    const at::Tensor& tensor = tensors_[parameter];
    transfer.memory.push_back({.storage = tensor.storage(), .data = tensor.const_data_ptr()});
  }
  return transfer;
}

std::vector<Work> ShardedParameters::Send(ProcessGroup& group, const ShardPlan::Bucket& bucket,
                                          const at::Tensor& values) const {
  if (bucket.owner >= 0) return {group.broadcast_async(values, bucket.owner)};
  std::vector<Work> works;
  if (group.backend() == "gloo" && options_.ranks == 2) {
    // LibTorch's Gloo copies all values once more in an all-gather, and none in a broadcast.
    for (int rank = 0; rank < options_.ranks; ++rank) {
      const at::Tensor part = values.narrow(0, rank * bucket.part, bucket.part);
      works.push_back(group.broadcast_async(part, rank));
    }
    return works;
  }
  const at::Tensor mine = values.narrow(0, rank_ * bucket.part, bucket.part);
  works.push_back(group.all_gather_async(values, mine));
  return works;
}

int ShardedParameters::FinishTransfer() {
  const at::NoGradGuard no_grad;
  std::vector<Transfer> transfers = std::move(transfers_);
  transfers_.clear();
  int changed = -1;
  for (Transfer& transfer : transfers) {
    try {
      for (Work& work : transfer.works) work.wait();
    } catch (...) {
      transfers_ = std::move(transfers);
      AbandonPeers();
      DropTransfers();
      throw;
    }
    const int parameter = Write(transfer);
    if (changed < 0) changed = parameter;
  }
  if (peers_ != nullptr) peers_->Complete();
  return changed;
}

int ShardedParameters::Write(const Transfer& transfer) {
  const ShardPlan::Bucket& bucket = plan_.buckets()[transfer.bucket];
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const int parameter = bucket.parameters[i];
    if (tensors_[parameter].const_data_ptr() != transfer.memory[i].data) return parameter;
    // As a write by LibTorch: autograd refuses to use older values that it has saved.
    if (!transfer.values.defined()) tensors_[parameter].unsafeGetTensorImpl()->bump_version();
  }
  if (!transfer.values.defined()) return -1;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (rank == rank_) continue;
    for (const ShardPlan::Piece& piece : plan_.Pieces(transfer.bucket, rank)) {
      const at::Tensor& tensor = tensors_[piece.parameter];
      if (bucket.owner >= 0) {
        const at::Tensor from = transfer.values.narrow(0, piece.offset, piece.size());
        tensor.detach().copy_(from.view(tensor.sizes()));
      } else {
        const int64_t start = rank * bucket.part + piece.offset;
        FlatView(tensor)
            .narrow(0, piece.begin, piece.size())
            .copy_(transfer.values.narrow(0, start, piece.size()));
      }
    }
  }
  return -1;
}

}  // namespace ddp::internal
