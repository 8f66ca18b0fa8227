#include "elastic/checkpoint/checkpointer.h"

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "ddp/comm/last_passes.h"
#include "ddp/common/logging.h"
#include "elastic/checkpoint/checkpointer_impl.h"
#include "elastic/checkpoint/file_system/posix_file_system.h"
#include "elastic/checkpoint/file_system/progress_file_system.h"
#include "elastic/checkpoint/file_system/stall_watch.h"
#include "elastic/checkpoint/folder/checkpoint_owner.h"
#include "elastic/checkpoint/folder/checkpoint_storage.h"
#include "elastic/checkpoint/folder/rendezvous_check.h"
#include "elastic/checkpoint/folder/retention_sweep.h"
#include "elastic/checkpoint/folder/work_folder.h"
#include "elastic/checkpoint/format/content_hash.h"
#include "elastic/checkpoint/group/agree_on.h"
#include "elastic/checkpoint/group/checkpoint_group.h"
#include "elastic/checkpoint/group/gather_group.h"
#include "elastic/checkpoint/group/store_group.h"
#include "elastic/checkpoint/plain_state.h"
#include "elastic/checkpoint/random_generators.h"
#include "elastic/checkpoint/save_load/checkpoint_lookup.h"
#include "elastic/checkpoint/save_load/load_checkpoint.h"
#include "elastic/checkpoint/tensors/optimizer_state.h"
#include "elastic/checkpoint/tensors/torch_tensors.h"
#include "elastic/data/elastic_sampler.h"
#include "elastic/worker/worker_session.h"

namespace ddp::elastic {
namespace {

// Bounds the wait of a save for a rendezvous that does not answer.
constexpr absl::Duration kRendezvousTimeout = absl::Seconds(3);

// Returns null when the job has no rendezvous that could be asked.
std::shared_ptr<RendezvousCheck> MakeRendezvousCheck(const Checkpointer::Options& options) {
  if (options.store_url.empty()) return nullptr;
  absl::StatusOr<std::unique_ptr<RendezvousCheck>> check =
      RendezvousCheck::Of(options.store_url, kRendezvousTimeout);
  return check.ok() ? *std::move(check) : nullptr;
}

// Returns a function that asks, unless `*store_is_away`: the rendezvous is on the store's server.
AskRendezvous Asking(const std::shared_ptr<RendezvousCheck>& check, const bool* store_is_away) {
  if (check == nullptr) return nullptr;
  return [check, store_is_away]() -> absl::StatusOr<std::string> {
    if (*store_is_away) return absl::UnavailableError("the store is away");
    return check->Ask();
  };
}

// Returns null for a world of one rank.
std::unique_ptr<StoreGroup> MakeStoreGroup(const Checkpointer::Options& options,
                                           std::function<void()> on_progress) {
  if (options.world_size == 1) return nullptr;
  return std::make_unique<StoreGroup>(StoreGroup::Options{
      .store = options.store,
      .rank = options.rank,
      .world_size = options.world_size,
      .prefix = absl::StrCat("checkpoint/", ContentHash::Of(options.folder).Hex(), "/",
                             options.generation, ".", options.generation_nonce),
      .timeout = absl::FromChrono(options.timeout),
      .on_progress = std::move(on_progress)});
}

absl::Duration PatienceOf(const Checkpointer::Options& options) {
  const bool infinite = options.stall_warning_after == std::chrono::milliseconds::max();
  return infinite ? absl::InfiniteDuration() : absl::FromChrono(options.stall_warning_after);
}

// Turns an exception of LibTorch into a status. A rank that threw instead, while the other ranks
// wait for it, would leave them without a reason.
absl::Status FromException(const std::exception& error) {
  const std::string text = error.what();
  return absl::InternalError(text.substr(0, text.find('\n')));
}

// Returns the value of a lookup.
template <typename T>
T ValueOrThrow(absl::StatusOr<T> value) {
  if (!value.ok()) throw CheckpointError(std::string(value.status().message()));
  return *std::move(value);
}

std::string Lines(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) absl::StrAppend(&text, "\n  ", line);
  return text;
}

}  // namespace

CheckpointError::CheckpointError(std::string message)
    : c10::Error(std::move(message), /*backtrace=*/nullptr) {}

Checkpointer::Impl::Impl(Options options)
    : options_(std::move(options)),
      rendezvous_(MakeRendezvousCheck(options_)),
      owner_{.run_id = options_.run_id,
             .generation = options_.generation,
             .nonce = OwnerNonce(options_.generation, options_.generation_nonce),
             .instance = rendezvous_ == nullptr ? 0 : rendezvous_->instance()},
      store_group_(MakeStoreGroup(options_, [this] { TellProgress(); })),
      gather_group_(options_.rank, options_.world_size, options_.gather),
      posix_(options_.folder),
      stall_watch_(PatienceOf(options_),
                   [rank = options_.rank](const std::string& line) {
                     LOG(WARNING) << "rank " << rank << ", checkpoints: " << line;
                   }),
      file_system_(
          &posix_, [this] { OnProgress(); }, &stall_watch_),
      storage_(&file_system_, options_.folder, Asking(rendezvous_, &store_is_away_)),
      retention_sweep_(&storage_, options_.retention),
      backoff_({.first = absl::FromChrono(options_.retry_pause),
                .max = absl::FromChrono(options_.retry_pause_max)}),
      stager_({.rank = options_.rank,
               .world_size = options_.world_size,
               .generation = options_.generation,
               .generation_nonce = owner_.nonce,
               .run_id = options_.run_id}),
      buffers_(options_.staging_buffers) {}

std::vector<std::string> Checkpointer::Impl::Mismatches(const TrainingState& state,
                                                        const ModelTensors& model,
                                                        const Manifest& manifest) const {
  std::vector<std::string> mismatches = ModelMismatches(model, manifest);
  if (state.optimizer != nullptr) {
    for (std::string& line : OptimizerMismatches(*state.optimizer, model, manifest)) {
      mismatches.push_back(std::move(line));
    }
  }
  if (state.sampler != nullptr) {
    const std::string difference = manifest.sampler.has_value()
                                       ? state.sampler->difference(*manifest.sampler)
                                       : "the checkpoint has no position";
    if (!difference.empty()) mismatches.push_back(absl::StrCat("data: ", difference));
  }
  return mismatches;
}

// Compares the options of the optimizer with those in the checkpoint's record, logs the
// differences, and puts the program's into the record where they win.
absl::Status Checkpointer::Impl::ChooseOptions(const torch::optim::Optimizer& optimizer,
                                               const ModelTensors& model,
                                               OptimizerRecord& record) const {
  DDP_ASSIGN_OR_RETURN(const OptimizerState here, StateOf(optimizer, model));
  const std::vector<std::string> lines = DifferentOptions(here.record, record);
  const bool keeps_own = options_.optimizer_options == OptimizerOptions::kFromProgram;
  LOG_IF(WARNING, options_.rank == 0 && !lines.empty())
      << "options of the optimizer differ, and those of the "
      << (keeps_own ? "program" : "checkpoint")
      << " are used (Options::optimizer_options): " << absl::StrJoin(lines, "; ");
  for (size_t i = 0; keeps_own && i < record.groups.size(); ++i) {
    record.groups[i].options = here.record.groups[i].options;
  }
  return absl::OkStatus();
}

// Builds the new state of everything but the model's tensors, and returns the function that puts
// it in place. Changes nothing before that.
absl::StatusOr<std::function<void()>> Checkpointer::Impl::Prepare(
    const PlainState& plain, const ModelTensors& model, const LoadedCheckpoint& loaded) const {
  const TrainingState& state = plain.state;
  try {
    DDP_RETURN_IF_ERROR(CheckLoadable(model, loaded.manifest.aliases, loaded.model));
    DDP_ASSIGN_OR_RETURN(const std::function<void()> put_rng, PrepareRng(loaded, options_.rank));
    if (state.optimizer == nullptr) return put_rng;
    const bool sharded = plain.sharded != nullptr;  // then `state.optimizer` is a copy
    OptimizerRecord record = *loaded.manifest.optimizer;
    DDP_RETURN_IF_ERROR(ChooseOptions(*state.optimizer, model, record));
    std::function<void()> put_optimizer =
        PrepareOptimizer(*state.optimizer, model, record, loaded.optimizer, sharded);
    if (sharded) {
      put_optimizer();
      put_optimizer = plain.sharded->PrepareState(*state.optimizer);
    }
    return std::function<void()>([put_rng, put_optimizer] {
      put_optimizer();
      put_rng();
    });
  } catch (const std::exception& error) {
    return FromException(error);
  }
}

absl::StatusOr<std::optional<RestoredCheckpoint>> Checkpointer::Impl::Restore(
    TrainingState& state) {
  const Scope scope(options_.session.get());
  AwaitSaves();
  ReportSaves();
  return TryRestore(state);
}

// Claims the folder for this generation on rank 0. Collective. A folder that cannot be written is
// no error: a program may only read it.
absl::Status Checkpointer::Impl::ClaimFolder() {
  group_->StartAttempt(CheckpointGroup::Patience::kLong);
  absl::Status claimed;
  if (options_.rank == 0) claimed = storage_.ClaimRoot(owner_);
  if (!claimed.ok() && !absl::IsFailedPrecondition(claimed)) {
    LOG(WARNING) << "the checkpoint folder is not claimed, so that a late rank of an earlier "
                 << "generation may still save into it: " << claimed.message();
    claimed = absl::OkStatus();
  }
  return AgreeOn(*group_, claimed);
}

absl::StatusOr<std::optional<RestoredCheckpoint>> Checkpointer::Impl::TryRestore(
    TrainingState& state) {
  if (store_group_ != nullptr) group_ = store_group_.get();
  if (options_.claim_in_restore || options_.generation > 1) DDP_RETURN_IF_ERROR(ClaimFolder());
  const ModelTensors model = TensorsOf(*state.model);
  const PlainState plain = PlainState::WithoutState(state);
  DDP_ASSIGN_OR_RETURN(std::optional<LoadedCheckpoint> loaded,
                       LoadNewestCheckpoint(storage_, *group_, [&](const Manifest& manifest) {
                         return Mismatches(plain.state, model, manifest);
                       }));
  if (!loaded.has_value()) return std::optional<RestoredCheckpoint>();

  // Every step that may fail comes first, and all ranks agree that none failed.
  const Manifest& manifest = loaded->manifest;
  const absl::StatusOr<std::function<void()>> put = Prepare(plain, model, *loaded);
  DDP_RETURN_IF_ERROR(AgreeOn(*group_, put.status()));

  LoadModel(model, manifest.aliases, loaded->model);
  (*put)();
  ddp::internal::ForgetLastPasses();
  if (state.sampler != nullptr) state.sampler->restore(*manifest.sampler);
  state.step = manifest.id.step;
  state.epoch = manifest.epoch;
  state.bucket_layout = manifest.bucket_layout;
  return std::optional<RestoredCheckpoint>(
      RestoredCheckpoint{.folder = storage_.Folder(manifest.id),
                         .step = manifest.id.step,
                         .generation = manifest.id.generation,
                         .world_size = manifest.world_size,
                         .passed_over = std::move(loaded->passed_over)});
}

bool Checkpointer::Impl::HasCheckpoint() {
  AwaitSaves();
  return ValueOrThrow(ddp::elastic::HasCheckpoint(storage_));
}

std::string Checkpointer::Impl::NewestRunId() {
  AwaitSaves();
  return ValueOrThrow(ddp::elastic::NewestRunId(storage_));
}

bool Checkpointer::Impl::HoldsOwnCheckpoints() {
  AwaitSaves();
  return ValueOrThrow(
      ddp::elastic::HoldsOwnCheckpoints(storage_, owner_, Asking(rendezvous_, &store_is_away_)));
}

Checkpointer::Options Checkpointer::options_for(const WorkerSession& session,
                                                c10::intrusive_ptr<c10d::Store> store,
                                                std::string folder) {
  Options options;
  options.folder = std::move(folder);
  options.rank = session.rank();
  options.world_size = session.world_size();
  options.generation = session.generation();
  options.generation_nonce = session.generation_nonce();
  if (options.generation_nonce.empty() && session.world_size() > 1) {
    // The launcher has no generations, but may restart the job with the same store.
    options.generation_nonce = absl::StrCat("restart-", session.restart_count());
  }
  options.run_id = session.run_id();
  options.store = std::move(store);
  options.session = std::make_shared<WorkerSession>(session);
  options.store_url = session.store_url();
  return options;
}

Checkpointer::Checkpointer(Options options) {
  const auto require = [](bool ok, const std::string& message) {
    if (!ok) throw CheckpointError(absl::StrCat("Checkpointer: ", message));
  };
  require(!options.folder.empty(), "the folder has no name");
  require(options.world_size >= 1 && options.rank >= 0 && options.rank < options.world_size,
          absl::StrCat("rank ", options.rank, " is not in a world of ", options.world_size));
  require(options.store != nullptr || options.world_size == 1,
          absl::StrCat(options.world_size, " ranks need a store"));
  require(options.generation_nonce.empty() || IsPlainNonce(options.generation_nonce),
          "the generation's nonce has other characters than letters, digits and \"-\"");
  require(options.timeout.count() > 0, "the timeout must be positive");
  require(options.stall_warning_after.count() > 0,
          "the time before a warning of a stall must be positive");
  require(options.retry_pause.count() >= 0 && options.retry_pause_max >= options.retry_pause,
          "the pauses between tries must not be negative, nor the longest below the first");
  require(options.staging_buffers >= 1, "staging_buffers must be at least 1");
  const RetentionPolicy& keeps = options.retention;
  require(keeps.keep_last >= 1,
          "retention.keep_last must be at least 1; RetentionPolicy::kAll "
          "keeps every checkpoint");
  require(keeps.keep_every >= 0 && keeps.keep_best >= 0,
          "retention.keep_every and keep_best must not be negative");
  impl_ = std::make_unique<Impl>(std::move(options));
}

Checkpointer::~Checkpointer() = default;

std::optional<RestoredCheckpoint> Checkpointer::restore(TrainingState& state) {
  CHECK(state.model != nullptr) << "a checkpoint without a model";
  absl::StatusOr<std::optional<RestoredCheckpoint>> restored = impl_->Restore(state);
  if (!restored.ok()) {
    throw CheckpointError(
        absl::StrCat("no checkpoint was restored: ", restored.status().message()));
  }
  if (restored->has_value() && !(*restored)->passed_over.empty()) {
    LOG(WARNING) << "restored " << (*restored)->folder
                 << "; newer ones were passed over:" << Lines((*restored)->passed_over);
  }
  return *std::move(restored);
}

bool Checkpointer::has_checkpoint() const { return impl_->HasCheckpoint(); }

std::string Checkpointer::newest_run_id() const { return impl_->NewestRunId(); }

bool Checkpointer::holds_own_checkpoints() const { return impl_->HoldsOwnCheckpoints(); }

}  // namespace ddp::elastic
