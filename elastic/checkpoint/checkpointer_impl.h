#ifndef DDP_ELASTIC_CHECKPOINT_CHECKPOINTER_IMPL_H_
#define DDP_ELASTIC_CHECKPOINT_CHECKPOINTER_IMPL_H_

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "elastic/checkpoint/checkpointer.h"
#include "elastic/checkpoint/file_system/posix_file_system.h"
#include "elastic/checkpoint/file_system/progress_file_system.h"
#include "elastic/checkpoint/file_system/stall_watch.h"
#include "elastic/checkpoint/folder/checkpoint_owner.h"
#include "elastic/checkpoint/folder/checkpoint_storage.h"
#include "elastic/checkpoint/folder/rendezvous_check.h"
#include "elastic/checkpoint/folder/retention_sweep.h"
#include "elastic/checkpoint/group/checkpoint_group.h"
#include "elastic/checkpoint/group/gather_group.h"
#include "elastic/checkpoint/group/store_group.h"
#include "elastic/checkpoint/plain_state.h"
#include "elastic/checkpoint/save_load/load_checkpoint.h"
#include "elastic/checkpoint/save_load/save_backoff.h"
#include "elastic/checkpoint/save_load/save_writer.h"
#include "elastic/checkpoint/save_load/staging_buffers.h"
#include "elastic/checkpoint/state_stager.h"
#include "elastic/checkpoint/tensors/torch_tensors.h"
#include "elastic/worker/worker_session.h"

namespace ddp::elastic {

// What saves and restores have in common: the group, the storage and the writer thread. While no
// save is under way (AwaitSaves), every member belongs to the thread that trains. While one is, the
// storage and the groups belong to the writer's thread.
//
// A save has four steps: plan and stage (StateStager) on the thread that trains, write and commit
// (SaveCheckpoint) on the writer's. checkpointer_save.cc has the saves, checkpointer.cc the rest.
class Checkpointer::Impl {
 public:
  explicit Impl(Options options);
  ~Impl();

  PendingSave Save(const TrainingState& state, Urgency urgency);
  PendingSave SaveAsync(const TrainingState& state);
  absl::StatusOr<std::optional<RestoredCheckpoint>> Restore(TrainingState& state);
  bool HasCheckpoint();
  std::string NewestRunId();
  bool HoldsOwnCheckpoints();
  SaveStats Stats();

 private:
  // Of a save or restore on the thread that trains: enters Phase::kCheckpoint.
  class Scope {
   public:
    explicit Scope(WorkerSession* session) {
      if (session != nullptr) lasting_.reset(new Lasting{session->phase(Phase::kCheckpoint)});
    }

   private:
    struct Lasting {
      WorkerSession::PhaseScope scope;
    };
    std::unique_ptr<Lasting> lasting_;
  };

  void AwaitSaves();
  SaveWriter::Work WriteLater(CheckpointGroup& group, StagedState staged, Urgency urgency,
                              int64_t step);
  absl::StatusOr<std::string> Write(CheckpointGroup& group, const StagedState& staged,
                                    Urgency urgency, int64_t step);
  PendingSave HandleOf(std::shared_ptr<const SaveWriter::Task> task, int64_t step) const;
  void Record(const absl::Status& saved, int64_t step) ABSL_LOCKS_EXCLUDED(mutex_);
  void ReportSaves() ABSL_LOCKS_EXCLUDED(mutex_);
  void OnProgress();
  void TellProgress();
  absl::Time Now() const {
    return options_.clock == nullptr ? clock_.Now() : options_.clock->Now();
  }
  absl::Status AgreeOnStore(Urgency urgency);
  absl::Status AgreeToTry(absl::Status mine);
  std::vector<std::string> Mismatches(const TrainingState& state, const ModelTensors& model,
                                      const Manifest& manifest) const;
  absl::Status ChooseOptions(const torch::optim::Optimizer& optimizer, const ModelTensors& model,
                             OptimizerRecord& record) const;
  absl::StatusOr<std::function<void()>> Prepare(const PlainState& plain, const ModelTensors& model,
                                                const LoadedCheckpoint& loaded) const;
  absl::Status ClaimFolder();
  absl::StatusOr<std::optional<RestoredCheckpoint>> TryRestore(TrainingState& state);

  const Options options_;
  const std::shared_ptr<RendezvousCheck> rendezvous_;  // may be null
  bool store_is_away_ = false;                         // of some rank, when the ranks agreed last
  const CheckpointOwner owner_;
  const std::unique_ptr<StoreGroup> store_group_;  // null for a world of one rank
  GatherGroup gather_group_;                       // used only with Options::gather
  SoloGroup solo_group_;
  // The group of the save or restore in progress. Belongs to the thread that runs it.
  CheckpointGroup* group_ =
      store_group_ != nullptr ? static_cast<CheckpointGroup*>(&*store_group_) : &solo_group_;
  const MonotonicClock clock_;
  PosixFileSystem posix_;
  StallWatch stall_watch_;
  ProgressFileSystem file_system_;
  CheckpointStorage storage_;
  RetentionSweep retention_sweep_;  // of rank 0

  Mutex mutex_;
  // Without Options::gather only rank 0's is used.
  SaveBackoff backoff_ ABSL_GUARDED_BY(mutex_);
  SaveStats stats_ ABSL_GUARDED_BY(mutex_);
  // Results of saves, for WorkerSession::report_save() on the thread that trains.
  std::vector<std::string> unreported_ ABSL_GUARDED_BY(mutex_);

  const StateStager stager_;
  StagingBuffers buffers_;
  const int exceptions_ = std::uncaught_exceptions();  // when this object was made
  SaveWriter writer_;  // last, because its thread uses all other members
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_CHECKPOINTER_IMPL_H_
