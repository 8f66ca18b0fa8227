#ifndef DDP_ELASTIC_DATA_ELASTIC_SAMPLER_H_
#define DDP_ELASTIC_DATA_ELASTIC_SAMPLER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "elastic/data/index_permutation.h"

namespace ddp::elastic {

// Where a job stands in its data. The same on every rank and independent of their number; every
// checkpoint carries it.
struct SamplerState {
  uint64_t seed = 0;
  uint32_t epoch = 0;
  int64_t dataset_size = 0;       // samples, N
  int64_t global_batch_size = 0;  // samples of one step over all ranks, G
  int64_t cursor = 0;             // samples of this epoch that an optimizer step has consumed
  bool drop_last = false;
  uint32_t order_version = 0;  // which function (seed, epoch) -> order: see ElasticSampler

  friend bool operator==(const SamplerState&, const SamplerState&) = default;
};

// Deals the samples of a dataset to the ranks of a job whose size may change at any step: in every
// epoch each sample is used exactly once, whatever world sizes the job goes through and wherever it
// is killed. (With drop_last the last incomplete batch of an epoch is left out.)
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
// One global cursor runs over one order of the dataset; a step takes the next n = min(G, N -
// cursor) samples and rank r of W gets those from floor(r n / W) to floor((r + 1) n / W). So the
// ranks' shares differ by at most one and there is no padding. At the end of an epoch a rank may
// get no sample at all: then `indices` is empty and the rank still takes part in the step. A model
// that cannot do that, as with a BatchNorm, sets min_samples_per_rank. Because the shares differ, a
// rank's loss is scaled by world / global_size and not by its own count.
//
// The order of an epoch is a keyed permutation of (seed, epoch), computed per index in O(1) time
// and memory, equal on every machine and compiler; with shuffle off it is the dataset's own.
//
// Batches may be drawn ahead of their commits. What was drawn and not committed is drawn again
// after a restore; nothing is lost and nothing counts twice.
//
// Pure: no I/O, no clock, no LibTorch. Thread-compatible; a value that may be copied.
class ElasticSampler {
 public:
  struct Options {
    int64_t dataset_size = 0;       // samples, >= 1
    int64_t global_batch_size = 0;  // samples of one step over all ranks, >= 1
    uint64_t seed = 0;
    bool drop_last = false;  // leave out a last batch of fewer than global_batch_size samples
    bool shuffle = true;

    // The least samples of a batch that every rank gets; with a BatchNorm in the model, 2. When the
    // last batch of an epoch would be too small for that, the last two batches share their samples
    // evenly, or are one batch where they are too small for two. Each sample is still used exactly
    // once. That one batch may exceed global_batch_size by fewer than this many samples per rank.
    // 0: the last batch is what is left. Not part of the state: a restart may change it. A job that
    // grows between the last two batches of an epoch may find too few samples left for it.
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

  // This rank's part of the next batch; empty at the end of the epoch.
  std::optional<Batch> next_batch();

  // Marks the oldest batch that was drawn and not yet committed as consumed. Call it on every rank
  // when optimizer.step() has succeeded. Calling it with no batch drawn is a mistake of the
  // program and ends it.
  void commit();

  // Goes to the start of `epoch`. Within the current epoch it keeps the cursor, so that a loop over
  // epochs goes on in the middle of one after a restore; batches drawn ahead are taken back.
  void set_epoch(uint32_t epoch);

  uint32_t epoch() const { return state_.epoch; }
  // Whether every batch of the epoch is committed.
  bool epoch_complete() const { return BatchSizeAt(state_.cursor) == 0; }
  int64_t steps_per_epoch() const;

  // What to save: the committed position.
  const SamplerState& state() const { return state_; }

  // Whether `state` belongs to this sampler's job: "" when it does; else what differs, for a
  // person: "global_batch_size is 64 in the checkpoint and 32 here; ...". Everything but epoch and
  // cursor must be equal, since a change within an epoch would repeat or lose samples.
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
  int64_t least_batch_ = 0;  // samples; from min_samples_per_rank
  SamplerState state_;
  int64_t drawn_ = 0;  // position up to which batches were handed out; >= state_.cursor
  std::optional<IndexPermutation> permutation_;  // of the current epoch; none: dataset order
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_DATA_ELASTIC_SAMPLER_H_
