#ifndef DDP_ELASTIC_CHECKPOINT_CHECKPOINTER_H_
#define DDP_ELASTIC_CHECKPOINT_CHECKPOINTER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/time/time.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace ddp::elastic {

class ElasticSampler;
class WorkerSession;

// A checkpoint could not be saved or restored. what() is one clear text that names the folder, the
// file or the rank; the same on every rank where the fault concerns them all.
class CheckpointError : public c10::Error {
 public:
  explicit CheckpointError(std::string message);
};

// What a checkpoint holds. The pointers are the trainer's own objects; none is kept after a call.
struct TrainingState {
  // Parameters and buffers, by their names in the module. Required. For a model inside
  // DistributedDataParallel, the model itself.
  torch::nn::Module* model = nullptr;

  // torch::optim::SGD, Adam or AdamW over parameters of `model`, with options, parameter groups
  // and state. Null: none.
  torch::optim::Optimizer* optimizer = nullptr;

  // The position in the data. Null: none.
  ElasticSampler* sampler = nullptr;

  int64_t step = 0;   // optimizer steps done, over all epochs
  int64_t epoch = 0;  // the epoch that `step` belongs to

  // Which parameters share a gradient bucket, by name. Sums over more than two ranks depend on it
  // to the bit, so a run that continues should reduce in the same buckets. Empty: not saved.
  std::vector<std::vector<std::string>> bucket_layout;
};

// What restore() loaded.
struct RestoredCheckpoint {
  std::string folder;  // the checkpoint's own, inside Options::folder
  int64_t step = 0;
  uint64_t generation = 0;               // that wrote it
  int world_size = 0;                    // that wrote it
  std::vector<std::string> passed_over;  // newer ones that are not whole: which, and why
};

// Saves the state of a training job to disk and brings it back.
//
//   Checkpointer checkpointer(Checkpointer::options_for(session, group.store(), "checkpoints"));
//   TrainingState state{.model = net.get(), .optimizer = &optimizer, .sampler = &sampler};
//   checkpointer.restore(state);              // goes on from the newest, if there is one
//   ...
//   state.step = step;
//   checkpointer.save(state);
//
// Every rank calls save() and restore(), in the same order and between the same steps: they are
// collectives, run through the store. All ranks need the folder (one host, or a shared file
// system).
//
// On disk: one folder per checkpoint, `step-000000001200.g0007/` (step, generation), with
//   model-*.safetensors, optimizer-*.safetensors   each tensor once; dealt to the ranks by size
//   extra-<rank>.safetensors                       the rank's random generators
//   MANIFEST.json                                  all else, and an XXH3-128 of each part
// Equal state gives equal .safetensors files, byte for byte. Any safetensors reader opens them.
//
// save() is synchronous and durable: when it returns, the checkpoint survives a power cut; when it
// throws, or the process dies in it, there is no checkpoint and the ones before are as they were.
// It writes to a hidden folder, syncs, and renames; it never replaces a checkpoint. The last
// generation that saved into a folder owns it: a late writer of an earlier one is refused.
//
// restore() takes the checkpoint of the highest (step, generation) that is whole on every rank; it
// checks every byte before it touches the model, and either loads all or changes nothing. Tensors
// are copied into the existing ones, whose storage stays where it is. A job of another world size
// loads too: a rank that the checkpoint does not know seeds its generators from rank 0's state and
// its own number.
//
// Threads: one at a time. Options' store must live as long; so must nothing else.
class Checkpointer {
 public:
  struct Options {
    std::string folder;  // of all checkpoints of the job; made by the first save

    int rank = 0;
    int world_size = 1;
    uint64_t generation = 0;
    std::string generation_nonce;
    std::string run_id;                     // for the manifest: see newest_run_id()
    c10::intrusive_ptr<c10d::Store> store;  // may be null when world_size is 1

    // How long a rank waits for the others in one save or restore before it gives up, naming them.
    absl::Duration timeout = absl::Minutes(10);
  };

  // Options for this worker. `store`: of its generation, as ddp::ProcessGroup has it.
  static Options options_for(const WorkerSession& session, c10::intrusive_ptr<c10d::Store> store,
                             std::string folder);

  // Does no I/O. Throws CheckpointError when the options are not usable.
  explicit Checkpointer(Options options);
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Saves and returns the new checkpoint's folder. Throws CheckpointError on every rank when it
  // failed on any: disk full, folder not writable, a rank that did not come, a tensor type that
  // the format lacks. Training may go on after that; the next save starts anew.
  std::string save(const TrainingState& state);

  // Loads the newest checkpoint into `state`. Empty, with nothing changed, when the folder holds
  // none. Throws CheckpointError with nothing changed when there are some and none can be read, or
  // when the one to load is of another model, optimizer or dataset (every difference is listed).
  std::optional<RestoredCheckpoint> restore(TrainingState& state);

  // Whether the folder holds a checkpoint, whole or not, as this rank sees it. Not a collective.
  // Throws CheckpointError when the folder is there and cannot be read.
  bool has_checkpoint() const;

  // The run id of the job that wrote the newest checkpoint whose manifest can be read, as this rank
  // sees it; empty when there is none. Tells a restarted job's own checkpoints from what an earlier
  // job left in the folder. Not a collective.
  std::string newest_run_id() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_CHECKPOINTER_H_
