// A trainer for tests of whole jobs. It fits a small net with a dropout, survives restarts, and can
// log the samples of each step.
#include <torch/torch.h>

#include <gflags/gflags.h>

#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>

#include "ddp/ddp.h"
#include "elastic/training/training.h"
#include "elastic/worker/run_worker.h"

DEFINE_int32(epochs, 1, "passes over the samples");
DEFINE_int32(samples, 1437, "samples of an epoch");
DEFINE_int32(batch_size, 32, "samples of one step, over all ranks together");
DEFINE_string(checkpoint_dir, "", "where checkpoints go; empty: nowhere");
DEFINE_int32(checkpoint_every, 50, "steps between checkpoints; 0: only one, at the end");
DEFINE_bool(keep_all_checkpoints, false, "no checkpoint is removed; else the last 3 stay");
DEFINE_string(resume, "same_run_id",
              "whose checkpoints a new job continues: never, same_run_id, any");
DEFINE_string(commit_log, "",
              "existing folder for a file of each generation and rank: one line for each step, of "
              "its number, its epoch and the samples that this rank used; empty: none");

namespace {

using ddp::elastic::Training;

Training::Resume ResumeFlag() {
  if (FLAGS_resume == "never") return Training::Resume::kNever;
  if (FLAGS_resume == "any") return Training::Resume::kAny;
  if (FLAGS_resume == "same_run_id") return Training::Resume::kSameRunId;
  throw std::invalid_argument("--resume=" + FLAGS_resume);
}

std::ofstream OpenCommitLog(const ddp::elastic::WorkerSession& session) {
  std::ofstream log;
  if (FLAGS_commit_log.empty()) return log;
  const std::string path =
      FLAGS_commit_log + "/generation-" + std::to_string(session.generation()) + "-rank-" +
      std::to_string(session.rank()) + "-of-" + std::to_string(session.world_size()) + ".txt";
  log.open(path, std::ios::app);
  if (!log) throw std::invalid_argument("cannot write " + path + ": is --commit_log a folder?");
  return log;
}

void Log(std::ofstream& log, int64_t step, const ddp::elastic::ElasticSampler::Batch& batch) {
  log << step << ' ' << batch.epoch;
  for (const int64_t index : batch.indices) log << ' ' << index;
  log << '\n' << std::flush;
}

ddp::elastic::RetentionPolicy RetentionFlag() {
  if (FLAGS_keep_all_checkpoints) return {.keep_last = ddp::elastic::RetentionPolicy::kAll};
  return {};
}

int Train() {
  const auto group = ddp::init_process_group();
  torch::manual_seed(1);
  const torch::Tensor inputs = torch::rand({FLAGS_samples, 64});
  const torch::Tensor targets = inputs.mean(1, /*keepdim=*/true);
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::Tanh(), torch::nn::Dropout(0.1),
                            torch::nn::Linear(256, 256), torch::nn::Tanh(),
                            torch::nn::Linear(256, 1));
  ddp::DistributedDataParallel model(net, group);
  torch::manual_seed(2 + group->rank());  // the dropout must differ between the ranks
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  Training training(model, optimizer,
                    {.dataset_size = FLAGS_samples,
                     .global_batch_size = FLAGS_batch_size,
                     .epochs = FLAGS_epochs,
                     .checkpoint_folder = FLAGS_checkpoint_dir,
                     .checkpoint_every = FLAGS_checkpoint_every,
                     .retention = RetentionFlag(),
                     .resume = ResumeFlag()});
  if (training.restored() && group->rank() == 0) {
    std::fprintf(stderr, "continues from %s\n", training.restored()->folder.c_str());
  }
  std::ofstream log = OpenCommitLog(training.session());

  while (training.next_epoch()) {
    while (const auto batch = training.next_batch()) {
      const torch::Tensor mine = torch::tensor(batch->indices, torch::kLong);
      const torch::Tensor outputs = model->forward(inputs.index_select(0, mine));
      training.step(torch::mse_loss(outputs, targets.index_select(0, mine)));
      if (log.is_open()) Log(log, training.steps(), *batch);
    }
    if (!training.epoch_complete()) continue;
    const double loss = training.mean_loss();
    if (group->rank() != 0) continue;
    std::printf("epoch %ld loss %.6f\n", training.epoch(), loss);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  return ddp::elastic::run_worker(Train);
}
