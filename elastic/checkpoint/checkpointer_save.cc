// The saves of a Checkpointer.

#include "elastic/checkpoint/checkpointer_impl.h"

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "ddp/common/logging.h"
#include "elastic/checkpoint/save_load/save_checkpoint.h"

namespace ddp::elastic {
namespace {

// In place of a rank's error, when the rank has not asked the store in the pause after a failure.
constexpr char kHeldBack[] = "held back after a failure";

// The error of a rank without a free staging buffer, in WhenBusy::kSkip.
constexpr char kNoBuffer[] = "no staging buffer was free: earlier saves are still being written";

void CheckState(const TrainingState& state) {
  CHECK(state.model != nullptr) << "a checkpoint without a model";
  CHECK_GE(state.step, 0) << "a checkpoint of a negative step";
}

}  // namespace

struct PendingSave::Save {
  std::shared_ptr<const SaveWriter::Task> task;
  int64_t step = 0;
  bool throws_always = false;  // also after a fault that may pass
  std::shared_ptr<WorkerSession> session;
};

std::string PendingSave::durable() const {
  const absl::StatusOr<std::string>* saved = save_->task->Result();
  if (saved == nullptr && save_->session != nullptr) {
    const auto phase = save_->session->phase(Phase::kCheckpoint);
    saved = &save_->task->Await([this] { save_->session->progress(); });
  } else if (saved == nullptr) {
    saved = &save_->task->Await(nullptr);
  }
  if (saved->ok()) return **saved;
  const absl::Status& error = saved->status();
  if (absl::IsCancelled(error)) return "";
  if (!save_->throws_always && MayPass(error)) return "";
  throw CheckpointError(
      absl::StrCat("the checkpoint of step ", save_->step, " was not saved: ", error.message()));
}

SaveStatus PendingSave::status() const {
  const absl::StatusOr<std::string>* const saved = save_->task->Result();
  if (saved == nullptr) return {.state = SaveStatus::State::kWriting};
  if (saved->ok()) return {.state = SaveStatus::State::kSaved, .folder = **saved};
  return {.state = absl::IsCancelled(saved->status()) ? SaveStatus::State::kSkipped
                                                      : SaveStatus::State::kFailed,
          .error = std::string(saved->status().message())};
}

int64_t PendingSave::step() const { return save_->step; }

Checkpointer::Impl::~Impl() {
  // The ranks do not end their saves together when this one ends in an exception.
  if (std::uncaught_exceptions() > exceptions_ && store_group_ != nullptr) store_group_->Hurry();
  if (!writer_.IsIdle()) {
    const Scope scope(options_.session.get());
    AwaitSaves();
  }
  ReportSaves();
}

// Blocks until no save is under way. The other members then belong to this thread.
void Checkpointer::Impl::AwaitSaves() {
  writer_.Drain([this] { TellProgress(); });
}

// Called on the thread that reads or writes.
void Checkpointer::Impl::OnProgress() {
  group_->Progress();
  TellProgress();
}

// The session belongs to the thread that trains. While that thread waits for the writer, it passes
// on the writer's progress.
void Checkpointer::Impl::TellProgress() {
  if (writer_.IsWriterThread()) {
    writer_.Progressed();
  } else if (options_.session != nullptr) {
    options_.session->progress();
  }
}

// Returns OK on every rank when every rank reaches the store. kCancelled: a rank waits for the end
// of the pause after a failure. kUnavailable: the error of the lowest rank that does not reach it.
// Collective over Options::gather.
absl::Status Checkpointer::Impl::AgreeOnStore(Urgency urgency) {
  bool may_ask = urgency == Urgency::kLast && !store_is_away_;
  {
    MutexLock lock(mutex_);
    may_ask = may_ask || backoff_.MayTry(Now());
  }
  const std::string mine = may_ask ? std::string(store_group_->Probe().message()) : kHeldBack;
  absl::Status agreed;
  for (const std::string& text : options_.gather(mine)) {
    if (text == kHeldBack) {
      agreed = absl::CancelledError(kHeldBack);
    } else if (!text.empty()) {
      store_is_away_ = true;
      return absl::UnavailableError(text);
    }
  }
  if (agreed.ok()) store_is_away_ = false;
  return agreed;
}

// Returns OK on every rank when no rank has a reason not to try a save: `mine`, or the pause after
// a failure. Collective over Options::gather. Does not ask the store: the writers find out.
absl::Status Checkpointer::Impl::AgreeToTry(absl::Status mine) {
  if (mine.ok()) {
    MutexLock lock(mutex_);
    if (!backoff_.MayTry(Now())) mine = absl::CancelledError(kHeldBack);
  }
  const std::vector<std::string> reasons = options_.gather(std::string(mine.message()));
  for (size_t rank = 0; rank < reasons.size(); ++rank) {
    if (reasons[rank].empty()) continue;
    return absl::CancelledError(absl::StrCat("rank ", rank, ": ", reasons[rank]));
  }
  return absl::OkStatus();
}

// Returns the last two steps of a save, write and commit, as a function that owns what it needs.
SaveWriter::Work Checkpointer::Impl::WriteLater(CheckpointGroup& group, StagedState staged,
                                                Urgency urgency, int64_t step) {
  return [this, &group, urgency, step,
          staged = std::make_shared<const StagedState>(std::move(staged))] {
    return Write(group, *staged, urgency, step);
  };
}

absl::StatusOr<std::string> Checkpointer::Impl::Write(CheckpointGroup& group,
                                                      const StagedState& staged, Urgency urgency,
                                                      int64_t step) {
  group_ = &group;
  if (&group != &gather_group_) store_is_away_ = false;
  SaveOptions options = {.owner = owner_};
  options.hold_back = [this, urgency] {
    MutexLock lock(mutex_);
    if (urgency == Urgency::kLast || backoff_.MayTry(Now())) return absl::OkStatus();
    return absl::CancelledError(kHeldBack);
  };
  {
    MutexLock lock(mutex_);
    options.folder_is_shared = stats_.saved > 0;
  }
  options.after_commit = [this](const CheckpointId& id) {
    retention_sweep_.AfterCommit(owner_, id);
  };
  absl::StatusOr<std::string> saved =
      SaveCheckpoint(file_system_, storage_, group, options, staged.contents);
  Record(saved.status(), step);
  return saved;
}

PendingSave Checkpointer::Impl::HandleOf(std::shared_ptr<const SaveWriter::Task> task,
                                         int64_t step) const {
  return PendingSave(std::make_shared<const PendingSave::Save>(
      PendingSave::Save{.task = std::move(task),
                        .step = step,
                        .throws_always = options_.on_error == OnError::kThrow,
                        .session = options_.session}));
}

// The ranks agree on a group that reaches all of them. The state stays where it is, because this
// thread waits.
PendingSave Checkpointer::Impl::Save(const TrainingState& state, Urgency urgency) {
  const Scope scope(options_.session.get());
  const auto tell = [this] { TellProgress(); };
  AwaitSaves();
  CheckpointGroup* group = &solo_group_;
  if (store_group_ != nullptr) group = store_group_.get();
  if (store_group_ != nullptr && options_.gather != nullptr) {
    const absl::Status reached = AgreeOnStore(urgency);
    if (!reached.ok() && urgency == Urgency::kRoutine) {
      Record(reached, state.step);
      ReportSaves();
      return HandleOf(SaveWriter::Ended(reached), state.step);
    }
    if (!reached.ok()) group = &gather_group_;
  }
  SaveWriter::Work work =
      WriteLater(*group, stager_.Stage(state, nullptr, absl::OkStatus()), urgency, state.step);
  // A collective of the process group belongs to the thread that trains.
  std::shared_ptr<const SaveWriter::Task> task = group == &gather_group_
                                                     ? writer_.RunHere(std::move(work), tell)
                                                     : writer_.Add(std::move(work), tell);
  (void)task->Await(tell);
  ReportSaves();
  return HandleOf(std::move(task), state.step);
}

PendingSave Checkpointer::Impl::SaveAsync(const TrainingState& state) {
  const Scope scope(options_.session.get());
  const auto tell = [this] { TellProgress(); };
  ReportSaves();
  while (options_.when_busy == WhenBusy::kWait && !buffers_.HasFree()) writer_.AwaitOldest(tell);
  absl::Status refused;
  if (!buffers_.HasFree()) refused = absl::CancelledError(kNoBuffer);
  if (store_group_ != nullptr && options_.gather != nullptr) {
    const absl::Status agreed = AgreeToTry(refused);
    if (!agreed.ok()) {
      Record(agreed, state.step);
      return HandleOf(SaveWriter::Ended(agreed), state.step);
    }
  }
  // Else this rank's writer tells the others that the save is refused, in the place of the save.
  CheckpointGroup* group = &solo_group_;
  if (store_group_ != nullptr) group = store_group_.get();
  SaveWriter::Work work =
      WriteLater(*group, stager_.Stage(state, &buffers_, refused), Urgency::kRoutine, state.step);
  return HandleOf(writer_.Add(std::move(work), tell), state.step);
}

// Counts the result of a save; on rank 0 also logs a failure.
void Checkpointer::Impl::Record(const absl::Status& saved, int64_t step) {
  MutexLock lock(mutex_);
  if (saved.ok()) {
    if (options_.rank == 0 && stats_.failed_in_a_row > 0) {
      LOG(INFO) << "the checkpoint of step " << step << " was saved, after "
                << stats_.failed_in_a_row << " that were not";
    }
    unreported_.emplace_back();
    ++stats_.saved;
    stats_.failed_in_a_row = 0;
    backoff_.Saved();
    return;
  }
  if (absl::IsCancelled(saved)) {
    ++(absl::StrContains(saved.message(), kNoBuffer) ? stats_.no_buffer : stats_.held_back);
    return;
  }
  ++stats_.failed;
  ++stats_.failed_in_a_row;
  stats_.last_error = std::string(saved.message());
  const std::string line = absl::StrReplaceAll(saved.message(), {{"\n", " "}});
  unreported_.push_back(line.empty() ? "the save failed without a reason" : line);
  backoff_.Failed(Now());
  if (options_.rank != 0 || options_.on_error == OnError::kThrow || !MayPass(saved)) return;
  LOG(ERROR) << "the checkpoint of step " << step << " was not saved; training goes on, and a save "
             << "is tried again after " << absl::FormatDuration(backoff_.pause()) << " ("
             << stats_.failed_in_a_row << " failed in a row): " << line;
}

// Passes the results of ended saves on to the agent.
void Checkpointer::Impl::ReportSaves() {
  std::vector<std::string> results;
  {
    MutexLock lock(mutex_);
    results.swap(unreported_);
  }
  if (options_.session == nullptr) return;
  for (const std::string& result : results) options_.session->report_save(result);
}

SaveStats Checkpointer::Impl::Stats() {
  ReportSaves();
  MutexLock lock(mutex_);
  return stats_;
}

std::string Checkpointer::save(const TrainingState& state, Urgency urgency) {
  CheckState(state);
  return impl_->Save(state, urgency).durable();
}

PendingSave Checkpointer::save_async(const TrainingState& state) {
  CheckState(state);
  return impl_->SaveAsync(state);
}

SaveStats Checkpointer::stats() { return impl_->Stats(); }

}  // namespace ddp::elastic
