#ifndef DDP_ELASTIC_DATA_ELASTIC_SAMPLER_H_
#define DDP_ELASTIC_DATA_ELASTIC_SAMPLER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "elastic/data/index_permutation.h"

namespace ddp::elastic {

// The position of a job in its data. Equal on every rank and independent of the world size.
// Checkpoints of a job with a sampler hold it.
struct SamplerState {
  uint64_t seed = 0;
  uint32_t epoch = 0;
  int64_t dataset_size = 0;       // samples, N
  int64_t global_batch_size = 0;  // samples of one step over all ranks, G
  int64_t cursor = 0;             // samples of this epoch that an optimizer step has consumed
  bool drop_last = false;
  uint32_t order_version = 0;  // 0: dataset order; else the version of IndexPermutation

  friend bool operator==(const SamplerState&, const SamplerState&) = default;
};

// Assigns the samples of a dataset to the ranks of a job whose world size may change at any step.
// In every epoch each sample is used exactly once, for any sequence of world sizes and restarts.
// (With drop_last, the last incomplete batch of an epoch is left out.)
//
//   ElasticSampler sampler({.dataset_size = n, .global_batch_size = 256, .seed = 7}, rank, world);
//   for (uint32_t epoch = sampler.epoch(); epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     while (std::optional<ElasticSampler::Batch> batch = sampler.next_batch()) {
//       loss_sum = loss of the samples batch->indices, summed
//       (loss_sum * world / batch->global_size).backward();  // the ranks' mean = the batch's mean
//       optimizer.step();
//       sampler.commit();
//     }
//   }
//
// A global cursor runs over the epoch's order of the dataset. A step takes the next n = min(G, N -
// cursor) samples. Rank r of W gets the samples from floor(r n / W) to floor((r + 1) n / W). The
// ranks' shares differ by at most one sample, so scale a rank's loss by world / global_size and not
// by the rank's own count. There is no padding.
//
// At the end of an epoch a rank may get no sample. `indices` is then empty, and the rank still
// takes part in the step. Set min_samples_per_rank for a model that cannot do that, such as a model
// with a BatchNorm.
//
// The order of an epoch is a permutation with the key (seed, epoch): see IndexPermutation. The
// order is equal on every machine and compiler. With `shuffle` off it is the dataset's own.
//
// Batches may be drawn ahead of their commits. After a restore, batches that were drawn and not
// committed are drawn again: no sample is lost or used twice.
//
// Pure: no I/O, no clock, no LibTorch. Thread-compatible. A sampler is a value and may be copied.
class ElasticSampler {
 public:
  struct Options {
    int64_t dataset_size = 0;       // samples, >= 1
    int64_t global_batch_size = 0;  // samples of one step over all ranks, >= 1
    uint64_t seed = 0;
    bool drop_last = false;  // leave out a last batch of fewer than global_batch_size samples
    bool shuffle = true;

    // Minimum samples that every rank gets of every batch; 2 for a model with a BatchNorm. When the
    // last batch of an epoch would be too small, the last two batches share their samples evenly.
    // When two would be too small, they become one batch. That batch may exceed global_batch_size
    // by fewer than this many samples per rank. Each sample is still used exactly once.
    // 0: the last batch is the rest of the epoch. Not part of the state: a restart may change it.
    // A job that grows between the last two batches of an epoch may have too few samples left.
    int64_t min_samples_per_rank = 0;
  };

  struct Batch {
    std::vector<int64_t> indices;  // this rank's samples, in [0, dataset_size)
    int64_t global_size = 0;       // samples of the batch over all ranks, >= 1
    uint32_t epoch = 0;
    int64_t position = 0;  // of the batch's first sample in the epoch's order
  };

  // Throws std::invalid_argument, naming the value, when an option or the rank is out of range.
  ElasticSampler(const Options& options, int rank, int world_size);

  // Returns this rank's part of the next batch; nullopt at the end of the epoch.
  std::optional<Batch> next_batch();

  // Marks the oldest batch that was drawn and not yet committed as consumed. Call it on every rank
  // when optimizer.step() has succeeded. A call without a drawn batch is a programmer's error and
  // fails a CHECK.
  void commit();

  // Moves to the start of `epoch`. When `epoch` is the current epoch, keeps the cursor, so that a
  // loop over epochs continues in the middle of an epoch after a restore. Uncommitted batches of
  // that epoch will be drawn again.
  void set_epoch(uint32_t epoch);

  uint32_t epoch() const { return state_.epoch; }
  // Returns true when every batch of the epoch is committed.
  bool epoch_complete() const { return BatchSizeAt(state_.cursor) == 0; }
  int64_t steps_per_epoch() const;

  // Returns the committed position, to be saved in a checkpoint.
  const SamplerState& state() const { return state_; }

  // Returns "" when `state` belongs to this sampler's job; else all differences, as a text for
  // people: "global_batch_size is 64 in the checkpoint and 32 here; ...". Every field but epoch and
  // cursor must be equal: a change within an epoch would repeat or lose samples. The cursor must
  // lie within the dataset.
  std::string difference(const SamplerState& state) const;

  // Continues at `state`, with this sampler's rank and world size. Throws std::invalid_argument
  // with difference(state) when that is not empty.
  void restore(const SamplerState& state);

 private:
  int64_t BatchSizeAt(int64_t position) const;
  int64_t IndexAt(int64_t position) const;
  void StartOrder();

  int rank_;
  int world_size_;
  int64_t least_batch_ = 0;  // samples: min_samples_per_rank times the world size
  SamplerState state_;
  int64_t drawn_ = 0;  // position after the last drawn batch; >= state_.cursor
  std::optional<IndexPermutation> permutation_;  // of the current epoch; none: dataset order
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_DATA_ELASTIC_SAMPLER_H_
