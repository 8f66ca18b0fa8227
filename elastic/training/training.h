#ifndef DDP_ELASTIC_TRAINING_TRAINING_H_
#define DDP_ELASTIC_TRAINING_TRAINING_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "ddp/distributed_data_parallel.h"
#include "elastic/checkpoint/checkpointer.h"
#include "elastic/data/elastic_sampler.h"
#include "elastic/worker/worker_session.h"

namespace ddp::elastic {

// The loop of a trainer that loses nothing when a rank, a node or the whole job is restarted.
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
// Training does what every trainer would repeat:
// - The constructor restores the newest checkpoint of this job, and refuses the folder of another
//   job.
// - next_epoch() and next_batch() deal each sample to exactly one rank, once in each epoch, for any
//   sequence of world sizes.
// - step() scales the loss by this rank's share of the batch, runs backward and optimizer, and
//   commits the step to the agent.
// - next_batch() and next_epoch() save a checkpoint when one is due, after the last step, and when
//   the agent asks this generation to end. Both loops then end, the trainer returns 0, and the next
//   generation continues at the same step.
// - The agent sees the phase of each part of the loop: forward from next_batch() to step(), then
//   backward, optimizer and checkpoint, and evaluation from the end of an epoch to next_epoch().
//   session().phase(...) names another phase in between.
//
// Its parts work alone as well: WorkerSession, ElasticSampler and Checkpointer.
//
// Every rank makes the same calls in the same order. Under a launcher other than ddprun nothing
// asks a generation to end: SIGTERM ends the process.
//
// Threads: one, the main thread. The optimizer must outlive the Training; the model is
// kept by it.
class Training {
 public:
  // How the trainer's loss combines the losses of one rank's samples; LibTorch's reduction option.
  enum class LossReduction { kMean, kSum };

  struct Options {
    // ---- Data; see ElasticSampler::Options ----
    int64_t dataset_size = 0;       // samples, >= 1
    int64_t global_batch_size = 0;  // samples of one step over all ranks, >= 1
    int64_t epochs = 1;             // >= 1
    uint64_t seed = 0;              // of the order of samples
    bool drop_last = false;
    bool shuffle = true;
    // Unset: 2 for a model with a BatchNorm, else 0.
    std::optional<int64_t> min_samples_per_rank;

    // ---- Loss ----
    LossReduction loss = LossReduction::kMean;

    // ---- Checkpoints ----
    // The folder of all checkpoints of this job, on a file system that all ranks share. Empty: no
    // checkpoints, so a restart begins at the first step.
    std::string checkpoint_folder;
    // Steps between two checkpoints. 0: one checkpoint only, after the last step.
    int64_t checkpoint_every = 100;
    // A new job continues from the checkpoints that another job left in the folder. Without it such
    // a folder is an error, so that no job continues from a stranger's weights unseen.
    bool resume = false;
    // What happens when the disk or the store fails a checkpoint: training continues, and a later
    // checkpoint is tried; or every rank throws.
    Checkpointer::OnError on_checkpoint_error = Checkpointer::OnError::kContinue;
  };

  // Restores the newest checkpoint, if there is one. Collective.
  //
  // Throws std::invalid_argument (an option is out of range, or the folder holds another job's
  // checkpoints and `resume` is not set), CheckpointError (see Checkpointer::restore) and
  // std::runtime_error (see WorkerSession::from_environment).
  Training(internal::DataParallelHandle model, torch::optim::Optimizer& optimizer, Options options);
  ~Training();
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  // Begins the next epoch, or continues a restored one where it stopped. A batch that was dealt and
  // not trained is dropped, and so is the rest of an epoch whose loop ended early. Saves a
  // checkpoint that is due. Returns false when all epochs are complete or the agent asks this
  // generation to end: the trainer then returns 0. Collective.
  bool next_epoch();

  // This rank's share of the next batch, which may hold no sample. Empty: the epoch is complete, or
  // the agent asks this generation to end. Saves a checkpoint that is due. Collective.
  //
  // Throws std::logic_error when the batch before was not trained.
  std::optional<ElasticSampler::Batch> next_batch();

  // Trains the batch: clears the gradients, runs backward of the scaled loss, the optimizer's step,
  // and commit(). `loss`: a scalar over this rank's samples, combined as Options::loss says.
  // Collective.
  //
  // Throws std::logic_error without a batch, and what backward and the optimizer throw.
  void step(const at::Tensor& loss);

  // The parts of step(), for a trainer that clips gradients or runs several backwards:
  //   optimizer.zero_grad();
  //   training.scaled(loss).backward();
  //   torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
  //   optimizer.step();
  //   training.commit();

  // The loss times this rank's weight, so that the ranks' average gradient is the gradient of the
  // whole batch's mean. `samples`: the loss's own samples, where it covers a part of the share;
  // unset: the whole share. Throws std::logic_error without a batch.
  at::Tensor scaled(const at::Tensor& loss, std::optional<int64_t> samples = std::nullopt);

  // States that the optimizer's step on the batch is done. Throws std::logic_error without a batch.
  void commit();

  // Whether every batch of the current epoch is trained; false where the generation ends early.
  bool epoch_complete() const;

  // The mean loss over the samples that this generation trained in the current epoch, over all
  // ranks. Not a number where there were none. Collective.
  double mean_loss();

  // Steps done since the start of the job, over all epochs and generations.
  int64_t steps() const;
  int64_t epoch() const;  // from 0

  // The checkpoint from which this generation continues; empty for a fresh start.
  const std::optional<RestoredCheckpoint>& restored() const;

  WorkerSession& session();

 private:
  class Impl;

  const std::unique_ptr<Impl> impl_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_TRAINING_TRAINING_H_
