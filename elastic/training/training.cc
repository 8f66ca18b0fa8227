#include "elastic/training/training.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ddp/common/logging.h"
#include "ddp/process_group.h"

namespace ddp::elastic {

namespace {

// BatchNorm in training needs two samples on every rank.
bool HasBatchNorm(const torch::nn::Module& module) {
  for (const auto& part : module.modules()) {
    if (std::dynamic_pointer_cast<torch::nn::BatchNorm1dImpl>(part) ||
        std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(part) ||
        std::dynamic_pointer_cast<torch::nn::BatchNorm3dImpl>(part)) {
      return true;
    }
  }
  return false;
}

ElasticSampler::Options SamplerOptions(const Training::Options& options,
                                       const torch::nn::Module& module) {
  return {
      .dataset_size = options.dataset_size,
      .global_batch_size = options.global_batch_size,
      .seed = options.seed,
      .drop_last = options.drop_last,
      .shuffle = options.shuffle,
      .min_samples_per_rank = options.min_samples_per_rank.value_or(HasBatchNorm(module) ? 2 : 0)};
}

void CheckOptions(const Training::Options& options) {
  if (options.epochs < 1) {
    throw std::invalid_argument(absl::StrCat("epochs is ", options.epochs, ": it must be above 0"));
  }
  if (options.checkpoint_every < 0) {
    throw std::invalid_argument(absl::StrCat("checkpoint_every is ", options.checkpoint_every,
                                             ": it must not be negative"));
  }
  if (options.resume == Training::Resume::kAny && options.checkpoint_folder.empty()) {
    throw std::invalid_argument("resume is kAny without a checkpoint_folder to resume from");
  }
}

std::string AbsolutePath(const std::string& path) {
  std::error_code error;  // for instance when the current folder was removed
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  return error ? path : absolute.string();
}

}  // namespace

class Training::Impl {
 public:
  Impl(internal::DataParallelHandle model, torch::optim::Optimizer& optimizer, Options options)
      : options_(std::move(options)),
        session_(WorkerSession::from_environment()),
        model_(std::move(model)),
        group_(model_.process_group()),
        optimizer_(optimizer),
        sampler_(SamplerOptions(options_, model_.base_module()), group_->rank(), group_->size()) {
    CheckOptions(options_);
    const ElasticSampler::Options data = SamplerOptions(options_, model_.base_module());
    if (data.min_samples_per_rank > 0) {
      session_.set_max_world_size(std::min(data.global_batch_size, data.dataset_size) /
                                  data.min_samples_per_rank);
    }
    state_ = {.model = &model_.base_module(), .optimizer = &optimizer_, .sampler = &sampler_};
    Restore();
  }

  bool NextEpoch() {
    phase_.reset();
    SaveIfDue();
    batch_.reset();
    // A restored checkpoint may be from the last step of an epoch: that epoch is complete.
    const bool complete = sampler_.epoch_complete();
    const bool leave_epoch = epoch_begun_ ? !stop_ : complete;
    const uint32_t next = sampler_.epoch() + (leave_epoch ? 1 : 0);
    const bool last = stop_ || next >= options_.epochs;
    // A complete epoch is saved before the sampler leaves it, as by SaveIfDue(): a save that is
    // repeated must hold the same state. An epoch that the trainer left early is saved as left.
    if (last && complete) SaveLast();
    if (leave_epoch) sampler_.set_epoch(next);
    if (last && !complete) SaveLast();
    if (last) return false;
    epoch_begun_ = true;
    epoch_complete_ = false;
    loss_sum_ = at::Tensor();
    samples_ = 0;
    state_.epoch = sampler_.epoch();
    return true;
  }

  std::optional<ElasticSampler::Batch> NextBatch() {
    phase_.reset();
    if (batch_) {
      throw std::logic_error("the batch before was not trained: call step() or commit() for it");
    }
    if (!epoch_begun_) throw std::logic_error("next_batch() without an epoch: call next_epoch()");
    if (!stop_ && !sampler_.epoch_complete()) {
      NoteEndedSaves();
      // The checkpoint at the end of an epoch is saved by next_epoch(), after the trainer's report
      // of the epoch.
      SaveIfDue();
      Enter(Phase::kData);
      batch_ = sampler_.next_batch();
      Enter(Phase::kForward);
      return batch_;
    }
    epoch_complete_ = sampler_.epoch_complete();
    if (!epoch_complete_) SaveLast();  // this generation ends
    Enter(Phase::kEvaluation);
    return std::nullopt;
  }

  void Step(const at::Tensor& loss) {
    RequireBatch("step()");
    if (LeavesOut(loss)) return Commit();
    Enter(Phase::kBackward);
    optimizer_.zero_grad();
    Scaled(loss, std::nullopt).backward();
    if (model_.require_manual_backward_finalization()) model_.finalize_backward();
    Enter(Phase::kOptimizer);
    optimizer_.step();
    Commit();
  }

  // The mean over no sample is NaN, and says nothing.
  bool LeavesOut(const at::Tensor& loss) const {
    if (!options_.skip_step_if) return false;
    const bool skips = !batch_->indices.empty() && options_.skip_step_if(loss);
    return !all_agree(group_, !skips);
  }

  at::Tensor Scaled(const at::Tensor& loss, std::optional<int64_t> samples) {
    RequireBatch("scaled()");
    const int64_t covered = samples.value_or(static_cast<int64_t>(batch_->indices.size()));
    const int64_t weight = options_.loss == LossReduction::kSum ? 1 : covered;
    // The mean over no sample is NaN, so it is not counted. Its gradient is zero all the same.
    if (covered > 0) Count(loss.detach(), weight);
    return loss * (static_cast<double>(weight) * group_->size() /
                   static_cast<double>(batch_->global_size));
  }

  void Commit() {
    RequireBatch("commit()");
    sampler_.commit();
    samples_ += static_cast<int64_t>(batch_->indices.size());
    batch_.reset();
    session_.commit(++state_.step);
    save_due_ = options_.checkpoint_every > 0 && state_.step % options_.checkpoint_every == 0;
    stop_ = session_.should_stop();  // every rank gets the same answer after the same step
    phase_.reset();
  }

  double MeanLoss() {
    at::Tensor totals = at::zeros({2}, at::kDouble).to(group_->device());
    if (loss_sum_.defined()) totals[0] = loss_sum_;
    totals[1] = samples_;
    group_->all_reduce(totals);
    totals = group_->to_host(totals);
    return (totals[0] / totals[1]).item<double>();
  }

  // Returns the texts of all ranks. Collective.
  std::vector<std::string> Gather(const std::string& mine) {
    const at::Device device = group_->device();
    at::Tensor sizes = at::zeros({group_->size()}, at::kLong).to(device);
    group_->all_gather(sizes, at::full({1}, static_cast<int64_t>(mine.size()), sizes.options()));
    sizes = group_->to_host(sizes);
    const int64_t longest = sizes.max().item<int64_t>();
    std::vector<std::string> texts(static_cast<size_t>(group_->size()));
    if (longest == 0) return texts;
    at::Tensor padded = at::zeros({longest}, at::kByte);
    std::copy(mine.begin(), mine.end(), padded.data_ptr<uint8_t>());
    at::Tensor bytes = at::zeros({group_->size(), longest}, at::kByte).to(device);
    group_->all_gather(bytes, padded.to(device));
    bytes = group_->to_host(bytes);
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      const uint8_t* begin = bytes.data_ptr<uint8_t>() + static_cast<int64_t>(rank) * longest;
      texts[rank].assign(begin, begin + sizes.data_ptr<int64_t>()[rank]);
    }
    return texts;
  }

  // Returns the sum of the ranks' counts. Collective.
  int64_t SumOverRanks(int64_t mine) {
    at::Tensor sum = at::full({1}, mine, at::kDouble).to(group_->device());
    group_->all_reduce(sum);
    sum = group_->to_host(sum);
    return static_cast<int64_t>(sum.item<double>());
  }

  void SetCheckpointMetric(std::optional<double> metric) { state_.metric = metric; }
  bool epoch_complete() const { return epoch_complete_; }
  int64_t steps() const { return state_.step; }
  int64_t epoch() const { return sampler_.epoch(); }
  const ElasticSampler& sampler() const { return sampler_; }
  const std::optional<RestoredCheckpoint>& restored() const { return restored_; }
  WorkerSession& session() { return session_; }

 private:
  // Holds a phase open over several calls of the trainer.
  struct Lasting {
    WorkerSession::PhaseScope scope;
  };

  void Enter(Phase phase) {
    phase_.reset();  // end the open phase first: phases nest
    phase_.reset(new Lasting{session_.phase(phase)});
  }

  void RequireBatch(const char* call) const {
    if (!batch_) throw std::logic_error(absl::StrCat(call, " without a batch: call next_batch()"));
  }

  void Count(const at::Tensor& loss, int64_t weight) {
    const at::NoGradGuard no_grad;
    const at::Tensor sum = loss.to(at::kDouble) * weight;
    loss_sum_ = loss_sum_.defined() ? loss_sum_ + sum : sum;
  }

  void Restore() {
    if (options_.checkpoint_folder.empty()) return;
    Checkpointer::Options checkpoints =
        Checkpointer::options_for(session_, group_->store(), options_.checkpoint_folder);
    checkpoints.on_error = options_.on_checkpoint_error;
    checkpoints.optimizer_options = options_.optimizer_options;
    checkpoints.retention = options_.retention;
    checkpoints.claim_in_restore = true;
    checkpoints.gather = [this](const std::string& mine) { return Gather(mine); };
    // Under torchrun each agent counts restarts by itself, so the ranks' counts may differ. Their
    // sum is the same on all ranks, and differs from that before the restart.
    const int64_t restarts = SumOverRanks(session_.restart_count());
    const bool is_restart = session_.is_restart() || restarts > 0;
    if (session_.generation_nonce().empty() && session_.world_size() > 1) {
      checkpoints.generation_nonce = absl::StrCat("restart-", restarts);
    }
    checkpointer_.emplace(std::move(checkpoints));
    if (!MayLoad(is_restart) && checkpointer_->has_checkpoint()) {
      throw std::invalid_argument(absl::StrCat(
          options_.checkpoint_folder,
          " holds checkpoints already: resume from them, or name another checkpoint folder"));
    }
    restored_ = checkpointer_->restore(state_);
    if (!restored_) {
      if (is_restart && group_->rank() == 0) {
        LOG(ERROR) << "the job has restarted, and " << AbsolutePath(options_.checkpoint_folder)
                   << " holds no checkpoint: the training begins at step 0. If the job has saved "
                   << "checkpoints, the folder was moved or removed, or is not mounted here";
      }
      return;
    }
    saved_step_ = state_.step;
    if (!state_.bucket_layout.empty()) model_.set_bucket_layout(state_.bucket_layout);
  }

  // Returns true when the checkpoints in the folder may be loaded. A restarted job finds its own.
  bool MayLoad(bool is_restart) {
    if (options_.resume == Resume::kAny) return true;
    // torchrun gives "none" to every job without an ID.
    const std::string& run_id = session_.run_id();
    const bool named = !run_id.empty() && run_id != "none";
    if (options_.resume == Resume::kSameRunId && named &&
        checkpointer_->newest_run_id() == run_id) {
      return true;
    }
    return is_restart && checkpointer_->holds_own_checkpoints();
  }

  void SaveIfDue() {
    if (save_due_ && !stop_) {
      if (options_.checkpoint_in_background) {
        BeginSave();
      } else {
        Save(Checkpointer::Urgency::kRoutine);
      }
    }
    save_due_ = false;
  }

  void BeginSave() {
    if (!checkpointer_) return;
    NoteEndedSaves();
    ThrowFailedSave();
    state_.bucket_layout = model_.bucket_layout();
    begun_saves_.push_back(checkpointer_->save_async(state_));
  }

  // Takes the results of the saves in the background that have ended. Never blocks.
  void NoteEndedSaves() {
    bool ended = false;
    while (!begun_saves_.empty() &&
           begun_saves_.front().status().state != SaveStatus::State::kWriting) {
      NoteSave(begun_saves_.front());
      begun_saves_.pop_front();
      ended = true;
    }
    if (ended) checkpointer_->stats();  // reports to the agent
  }

  // Blocks until the save has ended.
  void NoteSave(const PendingSave& save) {
    try {
      if (!save.durable().empty()) saved_step_ = save.step();
    } catch (const CheckpointError& error) {
      if (!failed_save_) failed_save_ = error.what_without_backtrace();
    }
  }

  // Throws on every rank when a save in the background has failed for good on a rank: a rank may
  // know it earlier than another one. Collective.
  void ThrowFailedSave() {
    if (SumOverRanks(failed_save_ ? 1 : 0) == 0) return;
    AwaitSaves();
    throw CheckpointError(failed_save_.value_or("a save has failed on another rank"));
  }

  void AwaitSaves() {
    for (const PendingSave& save : begun_saves_) NoteSave(save);
    begun_saves_.clear();
  }

  // Saves at the end of this generation, unless every rank knows that the last step is saved. A
  // rank that lost the store at the end of the last save does not know. The save is then repeated,
  // because all ranks must take part in it.
  void SaveLast() {
    if (!checkpointer_) return;
    if (options_.checkpoint_in_background) {
      AwaitSaves();
      ThrowFailedSave();
    }
    if (SumOverRanks(saved_step_ == state_.step ? 0 : 1) == 0) return;
    const bool saved = Save(Checkpointer::Urgency::kLast);
    if (SumOverRanks(saved ? 1 : 0) > 0) return;
    const SaveStats& stats = checkpointer_->stats();
    const std::string lost = absl::StrCat(
        stats.saved == 0
            ? absl::StrCat("no checkpoint was saved, and ", stats.failed, " saves were tried")
            : "the last checkpoint was not saved",
        ": the steps after ", std::max<int64_t>(saved_step_, 0), " are lost: ", stats.last_error);
    if (options_.require_last_checkpoint) throw CheckpointError(lost);
    if (group_->rank() == 0) LOG(ERROR) << lost;
  }

  // Returns true when the state is saved. The checkpointer logs the reason of a failure.
  bool Save(Checkpointer::Urgency urgency) {
    if (!checkpointer_) return false;
    state_.bucket_layout = model_.bucket_layout();
    if (checkpointer_->save(state_, urgency).empty()) return false;
    saved_step_ = state_.step;
    return true;
  }

  const Options options_;
  WorkerSession session_;
  internal::DataParallelHandle model_;
  const std::shared_ptr<ProcessGroup> group_;
  torch::optim::Optimizer& optimizer_;
  ElasticSampler sampler_;
  TrainingState state_;
  std::optional<Checkpointer> checkpointer_;  // none without a checkpoint folder
  std::optional<RestoredCheckpoint> restored_;
  std::deque<PendingSave> begun_saves_;     // in the background, the oldest first
  std::optional<std::string> failed_save_;  // why one of them has failed for good
  std::unique_ptr<Lasting> phase_;

  std::optional<ElasticSampler::Batch> batch_;  // returned by next_batch() and not yet committed
  at::Tensor loss_sum_;                         // of this rank's samples in this epoch
  int64_t samples_ = 0;                         // committed by this rank in this epoch
  int64_t saved_step_ = -1;
  bool epoch_begun_ = false;
  bool epoch_complete_ = false;
  bool save_due_ = false;
  bool stop_ = false;
};

Training::Training(internal::DataParallelHandle model, torch::optim::Optimizer& optimizer,
                   Options options)
    : impl_(std::make_unique<Impl>(std::move(model), optimizer, std::move(options))) {}
Training::~Training() = default;

bool Training::next_epoch() { return impl_->NextEpoch(); }
std::optional<ElasticSampler::Batch> Training::next_batch() { return impl_->NextBatch(); }
const ElasticSampler& Training::sampler() const { return impl_->sampler(); }
void Training::step(const at::Tensor& loss) { impl_->Step(loss); }
at::Tensor Training::scaled(const at::Tensor& loss, std::optional<int64_t> samples) {
  return impl_->Scaled(loss, samples);
}
void Training::commit() { impl_->Commit(); }
void Training::set_checkpoint_metric(std::optional<double> metric) {
  impl_->SetCheckpointMetric(metric);
}
bool Training::epoch_complete() const { return impl_->epoch_complete(); }
double Training::mean_loss() { return impl_->MeanLoss(); }
int64_t Training::steps() const { return impl_->steps(); }
int64_t Training::epoch() const { return impl_->epoch(); }
const std::optional<RestoredCheckpoint>& Training::restored() const { return impl_->restored(); }
WorkerSession& Training::session() { return impl_->session(); }

}  // namespace ddp::elastic
