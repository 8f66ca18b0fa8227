#include "elastic/data/elastic_sampler.h"

#include <algorithm>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "glog/logging.h"

namespace ddp::elastic {
namespace {

constexpr uint32_t kDatasetOrder = 0;  // order_version of a sampler that does not shuffle

// Returns floor(part * n / parts) without overflow, for 0 <= part <= parts.
int64_t ShareBegin(int64_t part, int64_t parts, int64_t n) {
  return static_cast<int64_t>(static_cast<__int128>(part) * n / parts);
}

void Require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

template <typename T>
void AddDifference(const char* name, T theirs, T ours, std::vector<std::string>& differences) {
  if (theirs == ours) return;
  differences.push_back(
      absl::StrCat(name, " is ", theirs, " in the checkpoint and ", ours, " here"));
}

}  // namespace

ElasticSampler::ElasticSampler(const Options& options, int rank, int world_size)
    : rank_(rank), world_size_(world_size) {
  Require(
      options.dataset_size >= 1,
      absl::StrCat("ElasticSampler: dataset_size must be at least 1, not ", options.dataset_size));
  Require(options.global_batch_size >= 1,
          absl::StrCat("ElasticSampler: global_batch_size must be at least 1, not ",
                       options.global_batch_size));
  Require(world_size >= 1,
          absl::StrCat("ElasticSampler: world_size must be at least 1, not ", world_size));
  Require(rank >= 0 && rank < world_size,
          absl::StrCat("ElasticSampler: rank ", rank, " is not in a world of ", world_size));
  Require(!options.drop_last || options.global_batch_size <= options.dataset_size,
          absl::StrCat("ElasticSampler: with drop_last, a global_batch_size of ",
                       options.global_batch_size, " leaves nothing of ", options.dataset_size,
                       " samples"));
  const int64_t least = options.min_samples_per_rank;
  Require(least >= 0,
          absl::StrCat("ElasticSampler: min_samples_per_rank must not be below 0, as ", least));
  const int64_t available = std::min(options.global_batch_size, options.dataset_size);
  Require(least <= available / world_size,
          absl::StrCat("ElasticSampler: min_samples_per_rank=", least, " on ", world_size,
                       " ranks needs more samples than global_batch_size=",
                       options.global_batch_size, " and dataset_size=", options.dataset_size,
                       " give: enlarge the batch, or train on fewer ranks"));
  least_batch_ = least * world_size;
  state_.seed = options.seed;
  state_.dataset_size = options.dataset_size;
  state_.global_batch_size = options.global_batch_size;
  state_.drop_last = options.drop_last;
  state_.order_version = options.shuffle ? IndexPermutation::kVersion : kDatasetOrder;
  StartOrder();
}

std::optional<ElasticSampler::Batch> ElasticSampler::next_batch() {
  const int64_t size = BatchSizeAt(drawn_);
  if (size == 0) return std::nullopt;
  Batch batch;
  batch.global_size = size;
  batch.epoch = state_.epoch;
  batch.position = drawn_;
  const int64_t begin = ShareBegin(rank_, world_size_, size);
  const int64_t end = ShareBegin(rank_ + int64_t{1}, world_size_, size);
  batch.indices.reserve(static_cast<size_t>(end - begin));
  for (int64_t i = begin; i < end; ++i) {
    batch.indices.push_back(IndexAt(drawn_ + i));
  }
  drawn_ += size;
  return batch;
}

void ElasticSampler::commit() {
  CHECK_LT(state_.cursor, drawn_) << "ElasticSampler::commit() without a batch from next_batch()";
  state_.cursor += BatchSizeAt(state_.cursor);
}

void ElasticSampler::set_epoch(uint32_t epoch) {
  if (epoch != state_.epoch) {
    state_.epoch = epoch;
    state_.cursor = 0;
  }
  StartOrder();
}

int64_t ElasticSampler::steps_per_epoch() const {
  const int64_t full = state_.dataset_size / state_.global_batch_size;
  const int64_t rest = state_.dataset_size % state_.global_batch_size;
  if (rest == 0 || state_.drop_last) return full;
  const bool merged =
      full > 0 && rest < least_batch_ && state_.global_batch_size + rest < 2 * least_batch_;
  return full + (merged ? 0 : 1);
}

std::string ElasticSampler::difference(const SamplerState& state) const {
  std::vector<std::string> differences;
  AddDifference("dataset_size", state.dataset_size, state_.dataset_size, differences);
  AddDifference("global_batch_size", state.global_batch_size, state_.global_batch_size,
                differences);
  AddDifference("seed", state.seed, state_.seed, differences);
  AddDifference("drop_last", state.drop_last, state_.drop_last, differences);
  AddDifference("order_version", state.order_version, state_.order_version, differences);
  if (state.cursor < 0 || state.cursor > state.dataset_size) {
    differences.push_back(absl::StrCat("cursor is ", state.cursor,
                                       " in the checkpoint, outside of ", "its ",
                                       state.dataset_size, " samples"));
  }
  return absl::StrJoin(differences, "; ");
}

void ElasticSampler::restore(const SamplerState& state) {
  const std::string difference_text = difference(state);
  Require(difference_text.empty(), absl::StrCat("ElasticSampler: ", difference_text));
  state_ = state;
  StartOrder();
}

int64_t ElasticSampler::BatchSizeAt(int64_t position) const {
  const int64_t full = state_.global_batch_size;
  const int64_t left = state_.dataset_size - position;
  if (state_.drop_last) return left < full ? 0 : full;
  if (left <= full) return left;
  if (left - full >= least_batch_) return full;
  // A full batch would leave too few samples: take two even batches, or all samples in one.
  return left >= 2 * least_batch_ ? left - left / 2 : left;
}

int64_t ElasticSampler::IndexAt(int64_t position) const {
  return permutation_.has_value() ? (*permutation_)(position) : position;
}

void ElasticSampler::StartOrder() {
  drawn_ = state_.cursor;
  permutation_.reset();
  if (state_.order_version == kDatasetOrder) return;
  permutation_.emplace(state_.dataset_size,
                       IndexPermutation::Key{.seed = state_.seed, .epoch = state_.epoch});
}

}  // namespace ddp::elastic
