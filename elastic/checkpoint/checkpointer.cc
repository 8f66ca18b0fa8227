// Length: save and restore use the same group, writer and agreement between ranks. Their parts have
// files of their own.

#include "elastic/checkpoint/checkpointer.h"

#include <chrono>
#include <cmath>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/headeronly/version.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "ddp/comm/last_passes.h"
#include "ddp/common/logging.h"
#include "ddp/common/sharded_optimizer.h"
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
#include "elastic/checkpoint/save_load/checkpoint_lookup.h"
#include "elastic/checkpoint/save_load/load_checkpoint.h"
#include "elastic/checkpoint/save_load/save_backoff.h"
#include "elastic/checkpoint/save_load/save_checkpoint.h"
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

// In place of a rank's error, when the rank has not asked the store in the pause after a failure.
constexpr char kHeldBack[] = "held back after a failure";

// Returns null for a world of one rank.
std::unique_ptr<StoreGroup> MakeStoreGroup(const Checkpointer::Options& options) {
  const std::shared_ptr<WorkerSession> session = options.session;
  if (options.world_size == 1) return nullptr;
  return std::make_unique<StoreGroup>(StoreGroup::Options{
      .store = options.store,
      .rank = options.rank,
      .world_size = options.world_size,
      .prefix = absl::StrCat("checkpoint/", ContentHash::Of(options.folder).Hex(), "/",
                             options.generation, ".", options.generation_nonce),
      .timeout = absl::FromChrono(options.timeout),
      .on_progress = [session] {
        if (session != nullptr) session->progress();
      }});
}

absl::Duration PatienceOf(const Checkpointer::Options& options) {
  const bool infinite = options.stall_warning_after == std::chrono::milliseconds::max();
  return infinite ? absl::InfiniteDuration() : absl::FromChrono(options.stall_warning_after);
}

// ---- Random generators ----

// A random generator of the rank and its kind, from which RngName() makes the name of its state.
struct NamedGenerator {
  std::string kind;  // "cpu", or LibTorch's name of the accelerator, such as "cuda"
  at::Generator generator;
};

// Returns the generators of this process: the CPU's and, with an accelerator, its current
// device's.
std::vector<NamedGenerator> Generators() {
  std::vector<NamedGenerator> generators = {{"cpu", at::detail::getDefaultCPUGenerator()}};
  if (const auto type = at::getAccelerator()) {
    const c10::impl::VirtualGuardImpl guard(*type);
    generators.push_back({c10::DeviceTypeName(*type, /*lower_case=*/true),
                          at::globalContext().defaultGenerator(guard.getDevice())});
  }
  return generators;
}

std::string RngName(const std::string& kind, int rank) {
  return absl::StrCat("rng.", kind, ".", rank);
}

std::vector<NamedTensor> RngStates(int rank) {
  std::vector<NamedTensor> states;
  for (const NamedGenerator& named : Generators()) {
    at::Generator generator = named.generator;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    states.push_back({RngName(named.kind, rank), generator.get_state()});
  }
  return states;
}

// Returns a seed for a rank that the checkpoint does not know. The seed depends on rank 0's saved
// state and differs from rank to rank.
uint64_t DerivedSeed(const Manifest& manifest, const std::string& kind, int rank) {
  std::string material =
      absl::StrCat("ddp.elastic.checkpoint.rng ", kind, " ", rank, " ", manifest.id.step, " ");
  for (const TensorRecord& tensor : manifest.tensors) {
    if (tensor.name == RngName(kind, 0)) absl::StrAppend(&material, tensor.hash.Hex());
  }
  uint64_t seed = 0;
  CHECK(absl::SimpleHexAtoi(ContentHash::Of(material).Hex().substr(0, 16), &seed));
  return seed;
}

// Turns an exception of LibTorch into a status. A rank that threw instead, while the other ranks
// wait for it, would leave them without a reason.
absl::Status FromException(const std::exception& error) {
  const std::string text = error.what();
  return absl::InternalError(text.substr(0, text.find('\n')));
}

// Checks the generators' states and returns the function that sets them. The function cannot fail:
// a clone of each generator has accepted its state already.
absl::StatusOr<std::function<void()>> PrepareRng(const LoadedCheckpoint& checkpoint, int rank) {
  std::vector<std::pair<at::Generator, at::Tensor>> states;
  for (const NamedGenerator& named : Generators()) {
    at::Generator copy = [&named] {
      at::Generator generator = named.generator;
      const std::lock_guard<std::mutex> lock(generator.mutex());
      return generator.clone();
    }();
    const auto saved = checkpoint.extra.find(RngName(named.kind, rank));
    if (saved == checkpoint.extra.end()) {
      copy.set_current_seed(DerivedSeed(checkpoint.manifest, named.kind, rank));
      states.emplace_back(named.generator, copy.get_state());
      continue;
    }
    const at::Tensor state = TensorOver(saved->second).clone();
    try {
      copy.set_state(state);
    } catch (const c10::Error& error) {
      return absl::DataLossError(absl::StrCat(
          saved->first, " is no state of a generator: ", error.what_without_backtrace()));
    }
    states.emplace_back(named.generator, state);
  }
  return std::function<void()>([states = std::move(states)]() mutable {
    for (auto& [generator, state] : states) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
  });
}

// A training state whose optimizer is a plain one. For a ShardedOptimizer, `whole` stands for it.
struct PlainState {
  TrainingState state;
  ShardedOptimizer* sharded = nullptr;
  std::unique_ptr<torch::optim::Optimizer> whole = nullptr;

  // Collective over the ranks of a sharded optimizer.
  static PlainState WithForms(const TrainingState& state) {
    return Make(state, [](ShardedOptimizer& sharded) { return sharded.DescribeState(); });
  }
  static PlainState WithoutState(const TrainingState& state) {
    return Make(state, [](ShardedOptimizer& sharded) { return sharded.EmptyOptimizer(); });
  }

 private:
  template <typename MakeWhole>
  static PlainState Make(const TrainingState& state, const MakeWhole& make_whole) {
    PlainState plain{.state = state, .sharded = dynamic_cast<ShardedOptimizer*>(state.optimizer)};
    if (plain.sharded == nullptr) return plain;
    plain.whole = make_whole(*plain.sharded);
    plain.state.optimizer = plain.whole.get();
    return plain;
  }
};

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

class Checkpointer::Impl {
 public:
  explicit Impl(Options options)
      : options_(std::move(options)),
        rendezvous_(MakeRendezvousCheck(options_)),
        owner_{.run_id = options_.run_id,
               .generation = options_.generation,
               .nonce = OwnerNonce(options_.generation, options_.generation_nonce),
               .instance = rendezvous_ == nullptr ? 0 : rendezvous_->instance()},
        store_group_(MakeStoreGroup(options_)),
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
                  .max = absl::FromChrono(options_.retry_pause_max)}) {}

  absl::StatusOr<std::string> Save(const TrainingState& state, Urgency urgency);
  absl::StatusOr<std::optional<RestoredCheckpoint>> Restore(TrainingState& state);
  bool HasCheckpoint() const;
  std::string NewestRunId() const;
  bool HoldsOwnCheckpoints() const;
  const SaveStats& stats() const { return stats_; }

 private:
  absl::StatusOr<std::string> TrySave(const TrainingState& state, Urgency urgency);
  void Record(const absl::Status& saved, int64_t step);
  void OnProgress();
  absl::Time Now() const {
    return options_.clock == nullptr ? clock_.Now() : options_.clock->Now();
  }
  absl::Status AgreeOnStore(Urgency urgency);
  absl::StatusOr<CheckpointContents> Collect(const PlainState& plain,
                                             std::vector<at::Tensor>& keep) const;
  void FillShare(const PlainState& plain, std::vector<at::Tensor>& keep,
                 absl::StatusOr<CheckpointContents>& contents) const;
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
  // The group of the save or restore in progress.
  CheckpointGroup* group_ =
      store_group_ != nullptr ? static_cast<CheckpointGroup*>(&*store_group_) : &solo_group_;
  const MonotonicClock clock_;
  PosixFileSystem posix_;
  StallWatch stall_watch_;
  ProgressFileSystem file_system_;
  CheckpointStorage storage_;
  RetentionSweep retention_sweep_;  // of rank 0
  SaveBackoff backoff_;             // without Options::gather only rank 0's is used
  SaveStats stats_;
};

void Checkpointer::Impl::OnProgress() {
  group_->Progress();
  if (options_.session != nullptr) options_.session->progress();
}

absl::StatusOr<CheckpointContents> Checkpointer::Impl::Collect(
    const PlainState& plain, std::vector<at::Tensor>& keep) const {
  const TrainingState& state = plain.state;
  const ModelTensors model = TensorsOf(*state.model);
  CheckpointContents contents;
  Manifest& description = contents.description;
  description.id = {state.step, options_.generation};
  description.epoch = state.epoch;
  description.bucket_layout = state.bucket_layout;
  description.aliases = model.aliases;
  description.run_id = options_.run_id;
  description.generation_nonce = owner_.nonce;
  description.torch_version = TORCH_VERSION;
  description.saved_unix_seconds = absl::ToUnixSeconds(absl::Now());
  if (state.metric.has_value() && std::isfinite(*state.metric)) description.metric = state.metric;
  if (state.sampler != nullptr) description.sampler = state.sampler->state();
  DDP_ASSIGN_OR_RETURN(contents.parameters, ViewsOf(model.parameters, keep));
  DDP_ASSIGN_OR_RETURN(contents.buffers, ViewsOf(model.buffers, keep));
  DDP_ASSIGN_OR_RETURN(contents.extra, ViewsOf(RngStates(options_.rank), keep));
  if (state.optimizer != nullptr) {
    DDP_ASSIGN_OR_RETURN(OptimizerState optimizer, StateOf(*state.optimizer, model));
    description.optimizer = std::move(optimizer.record);
    if (plain.sharded == nullptr) {
      DDP_ASSIGN_OR_RETURN(contents.optimizer, ViewsOf(optimizer.tensors, keep));
    } else {
      DDP_ASSIGN_OR_RETURN(contents.optimizer, FormsOf(optimizer.tensors));
    }
  }
  return contents;
}

// Collects the values of those tensors of a ShardedOptimizer that this rank writes. Collective over
// its ranks.
void Checkpointer::Impl::FillShare(const PlainState& plain, std::vector<at::Tensor>& keep,
                                   absl::StatusOr<CheckpointContents>& contents) const {
  torch::optim::Optimizer& whole = *plain.whole;
  const ModelTensors model = TensorsOf(*plain.state.model);
  std::vector<bool> written;  // by tensor
  std::vector<bool> needed;   // by parameter
  for (const auto& group : whole.param_groups()) {
    needed.resize(needed.size() + group.params().size());
  }
  if (contents.ok()) {
    const absl::StatusOr<OptimizerState> forms = StateOf(whole, model);
    CHECK(forms.ok()) << forms.status();  // Collect() has done the same
    written = WrittenOptimizerTensors(*contents, options_.rank, options_.world_size);
    for (size_t i = 0; i < written.size(); ++i) {
      if (written[i]) needed[forms->parameters[i]] = true;
    }
  }
  plain.sharded->FillState(whole, needed);
  if (!contents.ok()) return;
  const absl::StatusOr<OptimizerState> optimizer = StateOf(whole, model);
  CHECK(optimizer.ok()) << optimizer.status();
  for (size_t i = 0; i < written.size(); ++i) {
    if (!written[i]) continue;
    absl::StatusOr<std::vector<TensorView>> view = ViewsOf({optimizer->tensors[i]}, keep);
    CHECK(view.ok()) << view.status();
    contents->optimizer[i] = std::move(view->front());
  }
}

// Returns OK on every rank when every rank reaches the store. kCancelled: a rank waits for the end
// of the pause after a failure. kUnavailable: the error of the lowest rank that does not reach it.
// Collective over Options::gather.
absl::Status Checkpointer::Impl::AgreeOnStore(Urgency urgency) {
  const bool may_ask = backoff_.MayTry(Now()) || (urgency == Urgency::kLast && !store_is_away_);
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

absl::StatusOr<std::string> Checkpointer::Impl::TrySave(const TrainingState& state,
                                                        Urgency urgency) {
  if (store_group_ != nullptr && options_.gather != nullptr) {
    const absl::Status reached = AgreeOnStore(urgency);
    if (!reached.ok() && urgency == Urgency::kRoutine) return reached;
    group_ = &gather_group_;
    if (reached.ok()) group_ = store_group_.get();
  }
  std::vector<at::Tensor> keep;
  const SaveOptions options = {
      .owner = owner_,
      .hold_back =
          [this, urgency] {
            if (urgency == Urgency::kLast || backoff_.MayTry(Now())) return absl::OkStatus();
            return absl::CancelledError(kHeldBack);
          },
      .folder_is_shared = stats_.saved > 0,
      .after_commit = [this](const CheckpointId& id) { retention_sweep_.AfterCommit(owner_, id); }};
  const PlainState plain = PlainState::WithForms(state);
  absl::StatusOr<CheckpointContents> contents = absl::InternalError("nothing collected");
  try {
    contents = Collect(plain, keep);
  } catch (const std::exception& error) {
    contents = absl::InvalidArgumentError(FromException(error).message());
  }
  if (plain.sharded != nullptr) FillShare(plain, keep, contents);
  if (!ddp::internal::LastPassesAreProven()) {
    contents = absl::AbortedError(
        absl::StrCat("rank ", options_.rank,
                     ": a failure has aborted a reduction of gradients after the backward had "
                     "returned, so the optimizer may have stepped on wrong gradients"));
  }
  return SaveCheckpoint(file_system_, storage_, *group_, options, contents);
}

absl::StatusOr<std::string> Checkpointer::Impl::Save(const TrainingState& state, Urgency urgency) {
  absl::StatusOr<std::string> saved = absl::InternalError("not tried");
  if (options_.session != nullptr) {
    const auto phase = options_.session->phase(Phase::kCheckpoint);
    saved = TrySave(state, urgency);
  } else {
    saved = TrySave(state, urgency);
  }
  Record(saved.status(), state.step);
  if (saved.ok() || absl::IsCancelled(saved.status())) return saved.ok() ? saved : std::string();
  if (options_.on_error == OnError::kThrow || !MayPass(saved.status())) return saved;
  return std::string();
}

// Counts the result of a save; on rank 0 also logs a failure.
void Checkpointer::Impl::Record(const absl::Status& saved, int64_t step) {
  if (saved.ok()) {
    if (options_.rank == 0 && stats_.failed_in_a_row > 0) {
      LOG(INFO) << "the checkpoint of step " << step << " was saved, after "
                << stats_.failed_in_a_row << " that were not";
    }
    if (options_.session != nullptr) options_.session->report_save("");
    ++stats_.saved;
    stats_.failed_in_a_row = 0;
    backoff_.Saved();
    return;
  }
  if (absl::IsCancelled(saved)) {
    ++stats_.held_back;
    return;
  }
  ++stats_.failed;
  ++stats_.failed_in_a_row;
  stats_.last_error = std::string(saved.message());
  const std::string line = absl::StrReplaceAll(saved.message(), {{"\n", " "}});
  if (options_.session != nullptr) {
    options_.session->report_save(line.empty() ? "the save failed without a reason" : line);
  }
  backoff_.Failed(Now());
  if (options_.rank != 0 || options_.on_error == OnError::kThrow || !MayPass(saved)) return;
  LOG(ERROR) << "the checkpoint of step " << step << " was not saved; training goes on, and a save "
             << "is tried again after " << absl::FormatDuration(backoff_.pause()) << " ("
             << stats_.failed_in_a_row << " failed in a row): " << line;
}

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
  if (options_.session == nullptr) return TryRestore(state);
  const auto phase = options_.session->phase(Phase::kCheckpoint);
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

bool Checkpointer::Impl::HasCheckpoint() const {
  return ValueOrThrow(ddp::elastic::HasCheckpoint(storage_));
}

std::string Checkpointer::Impl::NewestRunId() const {
  return ValueOrThrow(ddp::elastic::NewestRunId(storage_));
}

bool Checkpointer::Impl::HoldsOwnCheckpoints() const {
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
  const RetentionPolicy& keeps = options.retention;
  require(keeps.keep_last >= 1,
          "retention.keep_last must be at least 1; RetentionPolicy::kAll "
          "keeps every checkpoint");
  require(keeps.keep_every >= 0 && keeps.keep_best >= 0,
          "retention.keep_every and keep_best must not be negative");
  impl_ = std::make_unique<Impl>(std::move(options));
}

Checkpointer::~Checkpointer() = default;

std::string Checkpointer::save(const TrainingState& state, Urgency urgency) {
  CHECK(state.model != nullptr) << "a checkpoint without a model";
  CHECK_GE(state.step, 0) << "a checkpoint of a negative step";
  absl::StatusOr<std::string> folder = impl_->Save(state, urgency);
  if (folder.ok()) return *std::move(folder);
  throw CheckpointError(absl::StrCat("the checkpoint of step ", state.step,
                                     " was not saved: ", folder.status().message()));
}

const SaveStats& Checkpointer::stats() const { return impl_->stats(); }

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
