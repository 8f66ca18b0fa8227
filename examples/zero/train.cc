// A trainer whose optimizer state is divided among the ranks: each rank keeps 1/N of AdamW's
// moments. Fits a small net to a wave. A checkpoint holds the state as a whole, as of a plain
// AdamW: the job may be killed at any moment, and a new job may continue on another number of
// ranks.
//
//   bazel run //examples/zero:train.launch -- --nproc-per-node=2 --max-restarts=3 -- /tmp/wave
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "ddp/ddp.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "elastic/training/training.h"
#include "elastic/worker/run_worker.h"

// Returns the bytes of optimizer state on this rank.
size_t StateBytes(const torch::optim::Optimizer& optimizer) {
  size_t bytes = 0;
  for (const auto& [parameter, state] : optimizer.state()) {
    const auto& moments = static_cast<const torch::optim::AdamWParamState&>(*state);
    bytes += moments.exp_avg().nbytes() + moments.exp_avg_sq().nbytes();
  }
  return bytes;
}

int Train(const std::string& checkpoint_folder, int64_t epochs) {
  const auto group = ddp::init_process_group();
  const torch::Device device = group->device();
  constexpr int64_t kSamples = 512;
  const torch::Tensor inputs = torch::linspace(-3, 3, kSamples).view({kSamples, 1}).to(device);
  const torch::Tensor targets = torch::sin(2 * inputs);

  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(1, 64), torch::nn::Tanh(), torch::nn::Linear(64, 64),
                            torch::nn::Tanh(), torch::nn::Linear(64, 1));
  net->to(device);
  ddp::DistributedDataParallel model(net, group);
  // In place of torch::optim::AdamW optimizer(model->parameters(), 0.003).
  ddp::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(model,
                                                              torch::optim::AdamWOptions(0.003));
  ddp::elastic::Training training(model, optimizer,
                                  {.dataset_size = kSamples,
                                   .global_batch_size = 64,
                                   .epochs = epochs,
                                   .checkpoint_folder = checkpoint_folder,
                                   .checkpoint_every = 20,
                                   .resume = ddp::elastic::Training::Resume::kAny});

  while (training.next_epoch()) {
    while (const auto batch = training.next_batch()) {
      const torch::Tensor mine = torch::tensor(batch->indices, torch::kLong).to(device);
      const torch::Tensor outputs = model->forward(inputs.index_select(0, mine));
      training.step(torch::mse_loss(outputs, targets.index_select(0, mine)));
    }
    if (!training.epoch_complete()) continue;  // this generation ends; the next one continues
    const double loss = training.mean_loss();
    if (group->rank() != 0) continue;
    std::printf("epoch %ld loss %.9f\n", training.epoch(), loss);
    std::fflush(stdout);
  }
  std::fprintf(stderr, "rank %d of %d: %zu bytes of optimizer state\n", group->rank(),
               group->size(), StateBytes(optimizer.local_optimizer()));
  return 0;
}

int main(int argc, char** argv) {
  const std::string checkpoint_folder = argc > 1 ? argv[1] : "";
  const int64_t epochs = argc > 2 ? std::atoll(argv[2]) : 100;
  return ddp::elastic::run_worker([&] { return Train(checkpoint_folder, epochs); });
}
