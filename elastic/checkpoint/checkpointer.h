#ifndef DDP_ELASTIC_CHECKPOINT_CHECKPOINTER_H_
#define DDP_ELASTIC_CHECKPOINT_CHECKPOINTER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "elastic/checkpoint/retention/retention_policy.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace ddp {
class Clock;
}  // namespace ddp

namespace ddp::elastic {

class ElasticSampler;
class WorkerSession;

// The error that a Checkpointer throws. what() gives the reason, with the folder, the file or the
// rank at fault. The text is the same on every rank when the fault concerns all of them.
class CheckpointError : public c10::Error {
 public:
  explicit CheckpointError(std::string message);
};

// Counts of the saves of one Checkpointer, as this rank knows them.
struct SaveStats {
  int64_t saved = 0;
  int64_t failed = 0;
  int64_t failed_in_a_row = 0;  // since the last successful save
  int64_t held_back = 0;        // skipped in the pause after a failure
  int64_t no_buffer = 0;   // skipped because a rank had no free staging buffer: WhenBusy::kSkip
  std::string last_error;  // of the last failed save; empty: none has failed
};

// The training state that a checkpoint holds. The trainer owns the objects behind the pointers. A
// Checkpointer keeps no pointer after a call.
struct TrainingState {
  // The model whose parameters and buffers are saved, by their names in the module. Required. For a
  // model inside DistributedDataParallel: the inner model.
  torch::nn::Module* model = nullptr;

  // A torch::optim::SGD, Adam or AdamW over parameters of `model`. Saved with its options,
  // parameter groups and state. Null: not saved. Also a ShardedOptimizer over one of these, such as
  // ddp::ZeroRedundancyOptimizer: the files are those of the plain optimizer, at any world size.
  torch::optim::Optimizer* optimizer = nullptr;

  // The position in the data. Null: not saved.
  ElasticSampler* sampler = nullptr;

  int64_t step = 0;   // optimizer steps done, over all epochs
  int64_t epoch = 0;  // the epoch that `step` belongs to

  // The value by which RetentionPolicy::keep_best compares checkpoints, such as the loss on the
  // validation data. Unset, or not a finite number: the checkpoint is not among the best. Rank 0's
  // value counts.
  std::optional<double> metric = std::nullopt;

  // Names of the parameters of each gradient bucket. The rounding of sums over more than two ranks
  // depends on the buckets, so a run that continues should use the same ones. Empty: not saved.
  std::vector<std::vector<std::string>> bucket_layout;
};

// The checkpoint that restore() loaded.
struct RestoredCheckpoint {
  std::string folder;  // of this checkpoint, inside Options::folder
  int64_t step = 0;
  uint64_t generation = 0;               // of the writer
  int world_size = 0;                    // of the writer
  std::vector<std::string> passed_over;  // one line for each newer checkpoint: its name and why
};

// The progress of a save that save_async() has begun.
struct SaveStatus {
  // kWriting: the copy waits for the writer thread, or is being hashed, written and committed.
  // kSaved: durable; `folder` survives a power cut. kSkipped: not tried, in the pause after a
  // failure or for want of a staging buffer. kFailed: `error` has the reason.
  enum class State { kWriting, kSaved, kSkipped, kFailed };
  State state = State::kWriting;
  std::string folder;  // of kSaved
  std::string error;   // of kSkipped and kFailed
};

// A save that save_async() has begun. A value: copies are handles of the same save. May outlive the
// Checkpointer.
class PendingSave {
 public:
  // Returns once what the program changes from then on is not in the checkpoint. That is at once:
  // save_async() returns after the copy. Any thread.
  void staged() const {}

  // Blocks until the save has ended. Returns and throws what Checkpointer::save() does. Reports the
  // writer's progress to the agent, in Phase::kCheckpoint. Thread: the one that trains. Does not
  // report the result to the agent: the next call of the Checkpointer does.
  std::string durable() const;

  // Never blocks. Any thread. A rank may know the result before another rank does: let the ranks
  // agree before they act on it.
  SaveStatus status() const;

  int64_t step() const;  // of the state

 private:
  friend class Checkpointer;
  struct Save;
  explicit PendingSave(std::shared_ptr<const Save> save) : save_(std::move(save)) {}

  std::shared_ptr<const Save> save_;
};

// Saves the state of a training job to disk and restores it.
//
//   Checkpointer checkpointer(Checkpointer::options_for(session, group.store(), "checkpoints"));
//   TrainingState state{.model = net.get(), .optimizer = &optimizer, .sampler = &sampler};
//   checkpointer.restore(state);              // loads the newest checkpoint, if there is one
//   ...
//   state.step = step;
//   checkpointer.save(state);
//
// On a device with streams, an optimizer may have stepped on gradients of a reduction that a
// failure has aborted, and the host may not know it yet. save() waits until the device has ended
// the last reduction of this process. When that was aborted on a rank, no rank saves, until
// restore() has replaced the state or a further backward has shown that it is sound; the next
// forward throws the failure.
//
// save() and restore() are collectives over the store: every rank calls them, in the same order and
// between the same steps. All ranks need the folder (one host, or a shared file system).
//
// Threads: one at a time; under ddprun the thread that commits. A thread of the Checkpointer,
// "ddp-checkpoint", writes the checkpoints, through a clone of the store. The Checkpointer shares
// ownership of the store and the session in its options.
//
// On disk: one folder per checkpoint, `step-000000001200.g0007/` (step, generation), with
//   model-*.safetensors, optimizer-*.safetensors   each tensor once; spread over the ranks by size
//   extra-<rank>.safetensors                       the rank's random generators
//   MANIFEST.json                                  all else, and an XXH3-128 of each part
// Equal state gives equal .safetensors files, byte for byte. Any safetensors reader opens them.
//
// Saving. save() is synchronous and durable: when it returns a folder, the checkpoint survives a
// power cut. When save() fails, or the process dies in it, the earlier checkpoints are unchanged,
// and the new checkpoint is absent or complete. save() writes into a hidden folder, syncs it and
// renames it. It replaces a checkpoint of the same step and generation only when that checkpoint is
// damaged or incomplete.
//
// save() writes the tensors where they lie. save_async() copies this rank's share first, into one
// of Options::staging_buffers, and returns: training goes on while the writer thread hashes the
// copy, writes, syncs and commits it. Saves end in the order in which they began. Every other call,
// and the destructor, waits for those under way. During an exception the destructor gives up when
// the other ranks make no progress for 5 s.
//
// Faults of the environment (a full disk, an I/O error, an unreachable store) fail one save and not
// the job. A save that cannot reach the store is skipped after some seconds. Rank 0 logs one line;
// stats() and the agent (`ddprun status`, metrics) count the failure; training continues. Later
// saves are tried after a pause, which doubles with each failure. With OnError::kThrow a failed
// save throws instead, and rank 0 logs no line.
//
// Ownership. The last generation that claimed a folder owns it. A late writer of an earlier
// generation is refused by its number, and by the job's rendezvous if there is one. Two jobs that
// write into one folder never share an unfinished checkpoint: the later claim wins, and the other
// job's save throws. A save removes only entries that a save has made: links and other files stay.
// A save follows no link below the folder; the folder itself may be a link.
//
// Retention. After each commit rank 0 removes older checkpoints of the same run, by default all but
// the last 3 (Options::retention). The first removal logs one line with the option. Never removed:
// the checkpoint that was just saved, one of a higher step or of another run, one that restore()
// of any process reads at that moment, and one that holds foreign entries. A removed checkpoint
// loses its name first, durably, so a process that dies in between leaves no half of one; the next
// save removes the rest. A program that reads the files without restore() needs a copy, or a
// policy under which they stay.
//
// Restoring. restore() loads the checkpoint of the highest (step, generation).
// - A generation that follows another one first claims the folder (Options::claim_in_restore).
// - A checkpoint that is damaged for a rank, or lacks a file for every rank, is passed over and
//   listed in `passed_over`.
// - Other obstacles (no descriptors, no permission, a file that one rank does not see, a newer
//   format) are retried for a few seconds. Then restore() throws and names the rank and the file.
// - The ranks together check every byte before any of them changes its model. A rank loads
//   everything or nothing.
// - Values are copied into the existing tensors, whose storage stays in place.
// - The world size may differ. A rank that the checkpoint does not know seeds its generators from
//   rank 0's saved state and its own number.
//
// Under ddprun save() and restore() run in Phase::kCheckpoint. They report progress to the agent
// and the other ranks after every block of bytes. A save of any length is not called hung while it
// makes progress.
//
// A stalled mount blocks every call, also the first call of a starting trainer. After 10 s
// (Options::stall_warning_after) the rank logs one line with the path. There is no deadline: a call
// inside the kernel cannot be interrupted. Under ddprun the hang detector stops the rank once the
// job has made some steps. Before that the rank waits.
class Checkpointer {
 public:
  // Behaviour of save() after a fault of the environment: return an empty text, or throw.
  enum class OnError { kContinue, kThrow };

  // kRoutine: the save is skipped in the pause after a failure. kLast: the save is tried all the
  // same, for the save before the process ends.
  enum class Urgency { kRoutine, kLast };

  // Behaviour of save_async() when earlier saves use every staging buffer. kSkip: all ranks leave
  // this save out, and stats() counts it. kWait: save_async() waits for the oldest save.
  enum class WhenBusy { kSkip, kWait };

  // The source of the optimizer's options after restore(), where they differ: the checkpoint, or
  // the program, as it has set them before restore(). Rank 0 logs one line with the differences.
  enum class OptimizerOptions { kFromCheckpoint, kFromProgram };

  struct Options {
    std::string folder;  // of all checkpoints of the job; created by the first save

    int rank = 0;
    int world_size = 1;
    uint64_t generation = 0;
    std::string generation_nonce;
    std::string run_id;                     // for the manifest: see newest_run_id()
    c10::intrusive_ptr<c10d::Store> store;  // may be null when world_size is 1

    // The time that a rank waits for other ranks in one save or restore before it fails and names
    // them. The time starts anew whenever one of them makes progress.
    std::chrono::milliseconds timeout = std::chrono::minutes(10);

    OnError on_error = OnError::kContinue;

    // Copies of this rank's share of the state that save_async() may hold at a time, >= 1. Each is
    // allocated when it is first needed, and kept.
    int staging_buffers = 2;
    WhenBusy when_busy = WhenBusy::kSkip;

    // The pause after the first failure. It doubles with each further one.
    std::chrono::milliseconds retry_pause = std::chrono::seconds(1);
    std::chrono::milliseconds retry_pause_max = std::chrono::minutes(5);

    // The checkpoints of this run that stay. Rank 0's counts.
    RetentionPolicy retention = {};

    OptimizerOptions optimizer_options = OptimizerOptions::kFromCheckpoint;

    // restore() claims the folder, and so makes it, before it reads. A rank of an earlier
    // generation that was cut off can then no longer commit a checkpoint of a higher step. For a
    // program that will save. A generation above 1 claims always: it has predecessors. The claim of
    // another job ends the saves of the folder's owner.
    bool claim_in_restore = false;

    // A call to the folder's file system that lasts longer is logged with its path, and once more
    // when it returns: a stalled mount gives no error. milliseconds::max(): no such lines.
    std::chrono::milliseconds stall_warning_after = std::chrono::seconds(10);

    // Returns the texts of all ranks, by rank. Collective, without the store. With it, the ranks
    // agree before each save that all of them reach the store: otherwise they skip the save within
    // seconds, together, or, for Urgency::kLast, save through this function. Training sets it.
    // Null: each rank skips such a save by itself.
    std::function<std::vector<std::string>(const std::string& mine)> gather = nullptr;

    // The session that reports phase and progress to the agent. Null: no reports.
    std::shared_ptr<WorkerSession> session;

    // The address of the generation's store, as in DDP_STORE. A save asks the job's rendezvous, on
    // the same server, whether the generation is still the newest. Empty: no such question.
    std::string store_url;

    const Clock* clock = nullptr;  // of the pauses; must outlive the Checkpointer; null: monotonic
  };

  // Returns the options for this worker. `store`: the store of its generation, from
  // ddp::ProcessGroup. Without a generation's nonce, the nonce is made of the restart count. Under
  // torchrun with several agents the ranks' counts may differ: then set `generation_nonce` to a
  // text that is equal on all ranks and new in every restart. Training does.
  static Options options_for(const WorkerSession& session, c10::intrusive_ptr<c10d::Store> store,
                             std::string folder);

  // Does no I/O. Throws CheckpointError when the options are not usable.
  explicit Checkpointer(Options options);
  // Blocks until the saves under way have ended; see above.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Saves a checkpoint and returns its folder. Collective. Blocks until the checkpoint is durable.
  //
  // Returns an empty text when no checkpoint was saved: after a fault of the environment, or in the
  // pause after an earlier failure. The result is the same on every rank, with one exception: a
  // rank that loses the store at the very end returns an empty text, although the checkpoint is
  // saved. So do not decide on one rank whether to save again: let the ranks agree. A repeated save
  // of the same state returns the folder of the first.
  //
  // With a ShardedOptimizer, each rank first collects the parts of the state that it writes in host
  // memory, and throws what DescribeState() and FillState() throw. Throws CheckpointError after a
  // fault of the environment when Options::on_error is kThrow. Throws CheckpointError always when a
  // retry cannot help:
  // - the format lacks a tensor type or the optimizer;
  // - the ranks have different states, or a rank did not call save() in time;
  // - the folder is a file, belongs to a later generation, or was claimed by another job since this
  //   one claimed it;
  // - the folder holds a complete checkpoint of this step and generation with another state.
  std::string save(const TrainingState& state, Urgency urgency = Urgency::kRoutine);

  // Begins a save and returns when this rank's share of the state is copied. Then the program may
  // change the state. Collective, as save(): the ranks' saves meet on their writer threads.
  //
  // Blocks for the copy alone: from the CPU at the speed of memory; from a device until the device
  // has copied. Also, with a ShardedOptimizer, for its collectives; with WhenBusy::kWait for a
  // buffer. With Options::gather the ranks first agree that each has a buffer and none is in the
  // pause after a failure: else they skip the save together. Without it their writers agree, and
  // save_async() blocks while 16 saves wait for them. Never waits for the disk or the store
  // otherwise: while the store is away, the writers' saves fail.
  //
  // A fault of this save, of whatever kind, is the result of its handle: durable() throws it or
  // returns an empty text, as save() does. Throws only what a ShardedOptimizer throws.
  PendingSave save_async(const TrainingState& state);

  // Returns the counts. Also reports the results of ended saves to the agent.
  SaveStats stats();

  // Loads the newest checkpoint into `state`. Collective.
  // Returns nullopt and changes nothing when the folder holds no checkpoint.
  // Throws CheckpointError and changes nothing when:
  // - the folder holds checkpoints and all of them are damaged;
  // - the newest checkpoint cannot be read for another reason than damage;
  // - the checkpoint to load is of another model, optimizer or dataset; the text lists every
  //   difference.
  // - the folder belongs to a later generation of the job.
  std::optional<RestoredCheckpoint> restore(TrainingState& state);

  // The next three look at the folder on this rank alone: they are no collectives. After an
  // obstacle that may pass (no descriptors, a file server that restarts) they try again, as
  // restore() does, for a few seconds.

  // Returns true when this rank sees a checkpoint in the folder, complete or not. Throws
  // CheckpointError when the folder exists and cannot be read.
  bool has_checkpoint() const;

  // Returns the run ID of the job that wrote the newest checkpoint with an undamaged manifest, as
  // this rank sees it. Empty when there is none. Throws CheckpointError when a manifest cannot be
  // read for another reason than damage or absence.
  std::string newest_run_id() const;

  // Returns true when the newest checkpoint that this rank sees is of this job. Compares the run
  // ID, the folder's owner and, under ddprun, the job's token in its rendezvous. Under another
  // launcher another job of the same run ID counts as this job. So does, under ddprun, a job with
  // the same number whose rendezvous was out of reach when it claimed the folder.
  // Blocks for up to half a minute when the rendezvous does not answer.
  // Throws CheckpointError as newest_run_id() does, and when:
  // - the owner cannot be read;
  // - the owner has a token, and the rendezvous does not answer whether it is this job's;
  // - the rendezvous answers that this generation is over.
  bool holds_own_checkpoints() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_CHECKPOINTER_H_
