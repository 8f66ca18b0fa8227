#include "ddp/optim/shard_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include <glog/logging.h>

namespace ddp::internal {

ShardPlan::ShardPlan(const Options& options) : options_(options), load_(options.ranks) {
  CHECK_GE(options_.ranks, 1) << "a plan without ranks";
  CHECK_GE(options_.bucket_bytes, 1) << "a plan without room in its buckets";
}

void ShardPlan::Add(const std::vector<std::vector<Tensor>>& groups) {
  std::vector<int> even;
  for (const std::vector<Tensor>& group : groups) {
    std::vector<int> whole;
    for (const Tensor& tensor : group) {
      const int number = parameters();
      tensors_.push_back(tensor);
      const bool cut = options_.mode == Mode::kEven && tensor.flat;
      (cut ? even : whole).push_back(number);
    }
    AddWhole(std::move(whole));
  }
  AddEven(even);
}

void ShardPlan::AddWhole(std::vector<int> parameters) {
  std::stable_sort(parameters.begin(), parameters.end(),
                   [this](int a, int b) { return tensors_[a].elements > tensors_[b].elements; });
  std::map<std::pair<int, int>, Bucket> open;  // by rank and kind
  const auto is_full = [this](const Bucket& bucket) {
    return bucket.elements * tensors_[bucket.parameters.front()].element_bytes >=
           options_.bucket_bytes;
  };
  for (const int parameter : parameters) {
    const Tensor& tensor = tensors_[parameter];
    const auto least = std::min_element(load_.begin(), load_.end());
    const int rank = static_cast<int>(least - load_.begin());
    *least += tensor.elements;
    Bucket& bucket = open[{rank, tensor.kind}];
    bucket.owner = rank;
    bucket.parameters.push_back(parameter);
    bucket.elements += tensor.elements;
    if (!is_full(bucket)) continue;
    Close(std::move(bucket));
    open.erase({rank, tensor.kind});
  }
  for (auto& [key, bucket] : open) Close(std::move(bucket));
}

void ShardPlan::AddEven(const std::vector<int>& parameters) {
  std::map<int, Bucket> open;  // by kind
  const auto close = [this](Bucket& bucket) {
    const int64_t ranks = options_.ranks;
    bucket.part = (bucket.elements + ranks - 1) / ranks;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      load_[rank] += std::clamp<int64_t>(bucket.elements - rank * bucket.part, 0, bucket.part);
    }
    Close(std::move(bucket));
  };
  for (auto parameter = parameters.rbegin(); parameter != parameters.rend(); ++parameter) {
    const Tensor& tensor = tensors_[*parameter];
    Bucket& bucket = open[tensor.kind];
    bucket.parameters.push_back(*parameter);
    bucket.elements += tensor.elements;
    if (bucket.elements * tensor.element_bytes < options_.bucket_bytes) continue;
    close(bucket);
    open.erase(tensor.kind);
  }
  for (auto& [kind, bucket] : open) close(bucket);
}

void ShardPlan::Close(Bucket bucket) {
  if (bucket.owner >= 0) bucket.part = bucket.elements;
  buckets_.push_back(std::move(bucket));
}

std::vector<ShardPlan::Piece> ShardPlan::Pieces(int bucket_number, int rank) const {
  const Bucket& bucket = buckets_[bucket_number];
  if (bucket.owner >= 0 && bucket.owner != rank) return {};
  const int64_t first = bucket.owner >= 0 ? 0 : std::min(rank * bucket.part, bucket.elements);
  const int64_t last = std::min(first + bucket.part, bucket.elements);
  std::vector<Piece> pieces;
  int64_t start = 0;  // of the parameter, in the bucket
  for (const int parameter : bucket.parameters) {
    const int64_t end = start + tensors_[parameter].elements;
    const int64_t from = std::max(start, first);
    const int64_t to = std::min(end, last);
    if (from < to) {
      pieces.push_back({.parameter = parameter,
                        .begin = from - start,
                        .end = to - start,
                        .offset = from,
                        .whole = bucket.owner >= 0});
    }
    start = end;
  }
  return pieces;
}

}  // namespace ddp::internal
