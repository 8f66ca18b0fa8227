#include "ddp/optim/sharded_parameters.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/optim/optimizer.h>

#include "absl/strings/str_cat.h"

namespace ddp::internal {

at::Tensor FlatView(const at::Tensor& dense, int64_t begin, int64_t end) {
  return dense.detach().as_strided({end - begin}, {1}, dense.storage_offset() + begin);
}

at::Tensor PieceOf(const at::Tensor& tensor, const ShardPlan::Piece& piece) {
  return piece.whole ? tensor.detach() : FlatView(tensor, piece.begin, piece.end);
}

ShardedParameters::ShardedParameters(const ShardPlan::Options& options, int rank)
    : ranks_(options.ranks), rank_(rank), plan_(options) {}

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
      mine.view = PieceOf(tensors_[piece.parameter], piece);
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
    if (memory + begin != mine.view.const_data_ptr())
      mine.view.set_data(PieceOf(tensor, mine.piece));
  }
}

at::Tensor ShardedParameters::GradientOf(const ShardPlan::Piece& piece) const {
  const at::NoGradGuard no_grad;
  const at::Tensor& tensor = tensors_[piece.parameter];
  const at::Tensor& gradient = tensor.grad();
  if (!gradient.defined()) return {};
  if (piece.whole || gradient.strides() == tensor.strides()) return PieceOf(gradient, piece);
  return PieceOf(at::empty_like(tensor).copy_(gradient), piece);  // in another memory order
}

void ShardedParameters::TakeGradients() {
  for (Mine& mine : mine_) mine.view.mutable_grad() = GradientOf(mine.piece);
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

}  // namespace ddp::internal
