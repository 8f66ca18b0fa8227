#ifndef DDP_ELASTIC_TRAINING_TRAINING_H_
#define DDP_ELASTIC_TRAINING_TRAINING_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "ddp/distributed_data_parallel.h"
#include "elastic/checkpoint/checkpointer.h"
#include "elastic/data/elastic_sampler.h"
#include "elastic/worker/worker_session.h"

namespace ddp::elastic {

// Runs the training loop of one rank. After a restart of a rank, a node or the job, training
// continues at the newest checkpoint.
//
//   ddp::DistributedDataParallel model(net, group);
//   torch::optim::SGD optimizer(model->parameters(), 0.1);
//   ddp::elastic::Training training(model, optimizer,
//                                   {.dataset_size = n, .global_batch_size = 256, .epochs = 10,
//                                    .checkpoint_folder = "checkpoints"});
//   while (training.next_epoch()) {
//     while (const auto batch = training.next_batch()) {
//       const auto outputs = model->forward(images_of(batch->indices));
//       training.step(torch::nn::functional::cross_entropy(outputs, labels_of(batch->indices)));
//     }
//     if (training.epoch_complete()) report(training.mean_loss());
//   }
//   return 0;
//
// Training combines a WorkerSession, an ElasticSampler and a Checkpointer; each works alone too.
// - The constructor restores the newest checkpoint of this job. A folder with checkpoints of
//   another job is an error, unless Options::resume permits them.
// - next_epoch() and next_batch() assign each sample to exactly one rank, once in each epoch, for
//   any sequence of world sizes.
// - step() scales the loss by this rank's share of the batch, runs backward and optimizer, and
//   commits the step to the agent.
// - next_batch() and next_epoch() save a checkpoint when one is due, after the last step, and when
//   the agent asks this generation to end. Both loops then end and the trainer returns 0. The next
//   generation continues at the same step.
// - One deadline covers all of an end on request: the steps up to the common last step, the save,
//   and the end of the process. The deadline is ddprun's --shutdown-timeout, 30 s by default, or
//   twice the longest step. Each step and each block of the save gives that time anew, up to ten
//   times --shutdown-timeout. When it passes, the agent kills the process. The unfinished
//   checkpoint is then lost, and the next generation continues from the newest complete one.
// - The agent sees the phase of the loop: data in next_batch(), forward from there to step(),
//   backward, optimizer and checkpoint. From the end of an epoch to next_epoch() the phase is
//   evaluation. session().phase(...) sets another phase in between.
//
// Every rank makes the same calls in the same order. A restart that finds no checkpoint begins at
// step 0, and rank 0 logs an error with the absolute path of the folder. A launcher other than
// ddprun never asks a generation to end: under such a launcher SIGTERM ends the process.
//
// Thread: the main thread only. The caller keeps the optimizer alive longer than the Training. The
// Training shares ownership of the model.
class Training {
 public:
  // The way in which the trainer's loss combines the losses of this rank's samples: LibTorch's
  // option `reduction`.
  enum class LossReduction { kMean, kSum };

  // kNever: from none. kSameRunId: from those of a job of the same run ID, which the user gave
  // (--rdzv-id): the same command continues after a requeue or a power cut. An ID that the launcher
  // chose is new in every job. kAny: from anybody's.
  enum class Resume { kNever, kSameRunId, kAny };

  struct Options {
    // ---- Data; see ElasticSampler::Options ----
    int64_t dataset_size = 0;       // samples, >= 1
    int64_t global_batch_size = 0;  // samples of one step over all ranks, >= 1
    int64_t epochs = 1;             // >= 1
    uint64_t seed = 0;              // of the order of samples
    bool drop_last = false;
    bool shuffle = true;
    // Default when unset: 2 for a model with a BatchNorm, else 0.
    std::optional<int64_t> min_samples_per_rank;

    // ---- Loss ----
    LossReduction loss = LossReduction::kMean;
    // Decides, from this rank's loss, that the step is to be left out: a loss that is not finite,
    // for example. step() asks all ranks, at the cost of one small reduction. When it is true on
    // any rank, no rank runs the backward or the optimizer; the batch counts as trained, and its
    // loss is not in mean_loss(). Not asked on a rank without samples. Empty: no step is left out.
    std::function<bool(const at::Tensor& loss)> skip_step_if;

    // ---- Checkpoints ----
    // The folder of all checkpoints of this job, on a file system that all ranks share. Empty: no
    // checkpoints, so a restart begins at the first step.
    std::string checkpoint_folder;
    // Steps between two checkpoints, >= 0. 0: a checkpoint only after the last step and when the
    // agent asks the generation to end.
    int64_t checkpoint_every = 100;
    // False: training waits for every checkpoint until it is durable. True: training waits only for
    // the copy of a checkpoint in memory, and a thread writes it (Checkpointer::save_async). A
    // checkpoint that is due while two others are being written is left out. Training always waits
    // for the one before the end of the process.
    bool checkpoint_in_background = false;
    // The checkpoints of this run that stay on disk: by default the last 3. Rank 0 logs one line
    // when the first one is removed.
    RetentionPolicy retention = {};
    // The checkpoints in the folder from which a new job continues. All others are an error, so
    // that a job never loads another job's weights unnoticed. A restart within a job always
    // continues from the job's own.
    Resume resume = Resume::kSameRunId;
    // The source of the optimizer's options (the learning rate ...) where the program and the
    // checkpoint differ. Rank 0 logs one line with the differences.
    Checkpointer::OptimizerOptions optimizer_options =
        Checkpointer::OptimizerOptions::kFromCheckpoint;
    // Behaviour when the disk or the store fails a save. kContinue: training continues, and a later
    // save is tried. kThrow: every rank throws.
    Checkpointer::OnError on_checkpoint_error = Checkpointer::OnError::kContinue;
    // True: when the save before the end of the process fails, every rank throws CheckpointError,
    // so that the process does not end with 0. False: rank 0 logs an error.
    bool require_last_checkpoint = false;
  };

  // Restores the newest checkpoint, if there is one. Collective.
  //
  // Throws std::invalid_argument when an option is out of range, or when the folder holds another
  // job's checkpoints and `resume` does not permit them.
  // Throws CheckpointError as Checkpointer::restore() does.
  // Throws std::runtime_error as WorkerSession::from_environment() does.
  Training(internal::DataParallelHandle model, torch::optim::Optimizer& optimizer, Options options);
  ~Training();
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  // Begins the next epoch, or continues a restored epoch where it stopped. Collective.
  // Drops a batch that was returned and not trained. When the trainer left the loop of an epoch
  // early, also drops the rest of that epoch.
  // Saves a checkpoint when one is due. Throws CheckpointError as Checkpointer::save() does; for a
  // checkpoint in the background, when a later one is due.
  // Returns false when all epochs are complete, or when the agent asks this generation to end. The
  // trainer then returns 0.
  bool next_epoch();

  // Returns this rank's share of the next batch. The share may hold no sample. Collective.
  // Returns nullopt when the epoch is complete, or when the agent asks this generation to end.
  // Saves a checkpoint when one is due. Throws CheckpointError as Checkpointer::save() does.
  // Throws std::logic_error when the last batch was not trained, or before the first next_epoch().
  std::optional<ElasticSampler::Batch> next_batch();

  // Returns the sampler that next_batch() draws from, for an ElasticDataLoader.
  const ElasticSampler& sampler() const;

  // Trains the batch: clears the gradients, runs backward of the scaled loss, the optimizer's step,
  // and commit(). `loss`: a scalar over this rank's samples, combined as Options::loss states.
  // Collective. Leaves the step out on all ranks where Options::skip_step_if says so on one.
  //
  // Throws std::logic_error when there is no batch. Passes on exceptions of backward, of the
  // optimizer and of skip_step_if.
  void step(const at::Tensor& loss);

  // The parts of step(), for a trainer that clips gradients or runs several backwards. Clip with
  // its own clip_grad_norm() where the optimizer is a ZeroRedundancyOptimizer.
  //   optimizer.zero_grad();
  //   training.scaled(loss).backward();
  //   torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
  //   optimizer.step();
  //   training.commit();

  // Returns the loss times this rank's weight: with it, the ranks' average gradient is the gradient
  // of the whole batch's mean. `samples`: the number of samples in `loss`; unset: the whole share.
  // Throws std::logic_error when there is no batch.
  at::Tensor scaled(const at::Tensor& loss, std::optional<int64_t> samples = std::nullopt);

  // Records that the optimizer's step on the batch is done, here and with the agent. Throws
  // std::logic_error when there is no batch.
  void commit();

  // Sets the value of the checkpoints that are saved from now on, by which
  // RetentionPolicy::keep_best compares them: the validation loss, for example. Rank 0's counts.
  // nullopt: they have none, as before the first call.
  void set_checkpoint_metric(std::optional<double> metric);

  // Returns true after next_batch() has returned nullopt because every batch of the epoch is
  // trained, until next_epoch() begins another. Returns false when the generation ends inside the
  // epoch.
  bool epoch_complete() const;

  // Returns the mean loss over the samples that this generation trained in the current epoch, over
  // all ranks. NaN when there were none. Collective.
  double mean_loss();

  // Returns the optimizer steps since the start of the job, over all epochs and generations.
  int64_t steps() const;
  int64_t epoch() const;  // from 0

  // Returns the checkpoint from which this generation continues; nullopt after a fresh start.
  const std::optional<RestoredCheckpoint>& restored() const;

  WorkerSession& session();

 private:
  class Impl;

  const std::unique_ptr<Impl> impl_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_TRAINING_TRAINING_H_
