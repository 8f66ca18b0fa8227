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

// What became of the saves of one Checkpointer, as this rank knows it.
struct SaveStats {
  int64_t saved = 0;
  int64_t failed = 0;
  int64_t failed_in_a_row = 0;  // since the last one that was saved
  int64_t held_back = 0;        // not tried, in the pause after a failure
  std::string last_error;       // empty: none has failed
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
  std::vector<std::string> passed_over;  // every newer one: which, and why
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
// save() is synchronous and durable: when it returns a folder, the checkpoint survives a power cut.
// When it fails, or the process dies in it, there is no checkpoint and the ones before are as they
// were. It writes to a hidden folder, syncs, and renames; it never replaces a checkpoint.
//
// A fault of the environment (a full disk, an I/O error, a store that is away) fails one save and
// not the job: rank 0 logs one line, stats() and the agent (`ddprun status`, metrics) count it, and
// training goes on. The next saves are
// tried again, with a pause that doubles from failure to failure. OnError::kThrow changes that.
//
// The last generation that claimed a folder owns it. Late writers of earlier ones are refused by
// their numbers, and by the job's rendezvous where there is one. Two jobs that write into one
// folder never share an unfinished checkpoint: the later claim counts, the other job's save throws.
// Nothing is removed from the folder but what a save has made: links and other files stay. No link
// below the folder is followed in writing; the folder itself may be one.
//
// restore() takes the checkpoint of the highest (step, generation). It passes over one that is
// damaged for a rank, or that has a file missing to every rank, and says so in `passed_over`. Other
// obstacles (no descriptors, no permission, a file that one rank does not see, a newer format) are
// looked at again for a few seconds; then restore() throws and names the rank and the file. It
// checks every byte before it touches the model, and either loads all or changes nothing. Tensors
// are copied into the existing ones, whose storage stays where it is. A job of another world size
// loads too: a rank that the checkpoint does not know seeds its generators from rank 0's state and
// its own number.
//
// Under ddprun save() and restore() are in Phase::kCheckpoint, and tell the agent and the other
// ranks of every block of bytes that they move. A save of any length is not called hung while it
// makes progress.
//
// A mount that has stalled holds up every call, also the first one of a trainer that starts. After
// 10 s (Options::stall_warning_after) the rank logs one line with the path. There is no deadline
// here: a call inside the kernel cannot be ended. Under ddprun the hang detector stops the rank
// once the job has made some steps; before that the rank waits.
//
// Threads: one at a time; under ddprun the one that commits. Options' store must live as long; so
// must nothing else.
class Checkpointer {
 public:
  // What save() does when the environment has failed it.
  enum class OnError { kContinue, kThrow };

  // Whether a save waits for the end of the pause after a failure. kLast does not: for the save
  // before the process ends.
  enum class Urgency { kRoutine, kLast };

  struct Options {
    std::string folder;  // of all checkpoints of the job; made by the first save

    int rank = 0;
    int world_size = 1;
    uint64_t generation = 0;
    std::string generation_nonce;
    std::string run_id;                     // for the manifest: see newest_run_id()
    c10::intrusive_ptr<c10d::Store> store;  // may be null when world_size is 1

    // How long a rank waits for the others in one save or restore before it gives up, naming them.
    // It begins anew whenever one of them makes progress.
    absl::Duration timeout = absl::Minutes(10);

    OnError on_error = OnError::kContinue;
    absl::Duration retry_pause = absl::Seconds(1);  // after the first failure; then it doubles
    absl::Duration retry_pause_max = absl::Minutes(5);

    // A call to the folder's file system that lasts longer gives a warning with the folder, and
    // another line when it returns: a mount that has stalled gives no error. Infinite: none.
    absl::Duration stall_warning_after = absl::Seconds(10);

    // The agent sees its phase and progress. Null: no agent does.
    std::shared_ptr<WorkerSession> session;

    // The address of the generation's store, as DDP_STORE has it: the job's rendezvous, which lies
    // beside it, is asked whether the generation is still the newest. Empty: nobody is asked.
    std::string store_url;
  };

  // Options for this worker. `store`: of its generation, as ddp::ProcessGroup has it.
  static Options options_for(const WorkerSession& session, c10::intrusive_ptr<c10d::Store> store,
                             std::string folder);

  // Does no I/O. Throws CheckpointError when the options are not usable.
  explicit Checkpointer(Options options);
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Saves and returns the new checkpoint's folder. Returns an empty text when it was not saved: the
  // environment has failed it, or it was held back in the pause after a failure; the same on every
  // rank, but for a rank that has lost the store.
  //
  // Throws CheckpointError with OnError::kThrow when the environment has failed it. Throws always
  // when trying again is no help: a tensor type or an optimizer that the format lacks, ranks with
  // different states, a rank that did not come, a folder that is a file or belongs to another job
  // or a later generation.
  std::string save(const TrainingState& state, Urgency urgency = Urgency::kRoutine);

  const SaveStats& stats() const;

  // Loads the newest checkpoint into `state`. Empty, with nothing changed, when the folder holds
  // none. Throws CheckpointError with nothing changed when there are some and none can be read,
  // when the newest cannot be read for another reason than damage, or when the one to load is of
  // another model, optimizer or dataset (every difference is listed).
  std::optional<RestoredCheckpoint> restore(TrainingState& state);

  // Whether the folder holds a checkpoint, whole or not, as this rank sees it. Not a collective.
  // Throws CheckpointError when the folder is there and cannot be read.
  bool has_checkpoint() const;

  // The run id of the job that wrote the newest checkpoint whose manifest is not damaged, as this
  // rank sees it; empty when there is none. Not a collective. Throws CheckpointError when the
  // manifest cannot be read for another reason.
  std::string newest_run_id() const;

  // Whether the newest checkpoint is this job's own, as this rank sees it: tells the checkpoints of
  // a restarted job from those that another job left in the folder, also one of the same run id.
  // Compares the run id, the folder's owner and, under ddprun, the token that the job has in its
  // rendezvous. Not a collective. Waits up to 3 s for a rendezvous that does not answer. Throws
  // CheckpointError as newest_run_id() does.
  bool holds_own_checkpoints() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_CHECKPOINTER_H_
