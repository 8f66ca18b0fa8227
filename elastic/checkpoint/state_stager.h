#ifndef DDP_ELASTIC_CHECKPOINT_STATE_STAGER_H_
#define DDP_ELASTIC_CHECKPOINT_STATE_STAGER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "elastic/checkpoint/checkpointer.h"
#include "elastic/checkpoint/plain_state.h"
#include "elastic/checkpoint/save_load/save_checkpoint.h"
#include "elastic/checkpoint/save_load/staging_buffers.h"
#include "elastic/checkpoint/tensors/torch_tensors.h"

namespace ddp::elastic {

// What one rank passes to SaveCheckpoint(), and the memory of its views. Move-only.
struct StagedState {
  absl::StatusOr<CheckpointContents> contents;
  std::vector<at::Tensor> keep;                 // tensors that the views look into
  std::optional<StagingBuffers::Lease> buffer;  // memory that the views look into
};

// The first two steps of a save, on the thread that trains:
// - plan: describes the state, and finds the tensors that this rank writes (PlanShards).
// - stage: makes their values readable for the writer.
//
// Thread-compatible. Keeps nothing of a state.
class StateStager {
 public:
  struct Options {
    int rank = 0;
    int world_size = 1;
    uint64_t generation = 0;
    std::string generation_nonce;
    std::string run_id;
  };

  explicit StateStager(Options options) : options_(std::move(options)) {}

  // Stages this rank's share of `state`, and all of its description.
  //
  // `buffers` null: the views look into the tensors of `state`, where these are on the CPU and row
  // by row, and into copies elsewhere. The caller must keep `state` unchanged while they are used.
  // Otherwise: every value is copied into one of the `buffers`, and `state` may change. Requires
  // HasFree(). From a device the copy blocks until it is done.
  //
  // `refused`: not OK when this rank cannot take part in the save. It is then the error of
  // `contents`, and nothing is copied.
  //
  // Collective over the ranks of a ShardedOptimizer, also with an error. Throws what its
  // DescribeState() and FillState() throw. Blocks until the device has ended the last reduction of
  // gradients: kAborted in `contents` when that was aborted, so that the state may be wrong. Every
  // other error is one of `contents` too.
  StagedState Stage(const TrainingState& state, StagingBuffers* buffers,
                    const absl::Status& refused) const;

 private:
  // The state's tensors, in the order of the views in `contents`.
  struct Tensors {
    std::vector<NamedTensor> parameters;
    std::vector<NamedTensor> buffers;
    std::vector<NamedTensor> optimizer;
  };

  absl::StatusOr<CheckpointContents> Plan(const PlainState& plain, Tensors& tensors) const;
  void FillOptimizer(const PlainState& plain, const absl::StatusOr<CheckpointContents>& contents,
                     Tensors& tensors) const;
  absl::Status CopyShare(const Tensors& tensors, StagingBuffers* buffers,
                         StagedState& staged) const;

  const Options options_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_STATE_STAGER_H_
