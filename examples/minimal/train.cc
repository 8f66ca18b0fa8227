// The smallest complete trainer: fits a line through noisy points on any number of ranks. A rank, a
// node or all ranks may be killed at any moment: ddprun restarts them, and training continues from
// the newest checkpoint.
//
//   bazel run //examples/minimal:train.launch -- --nproc-per-node=2 --max-restarts=3 -- /tmp/line
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "ddp/ddp.h"
#include "elastic/training/training.h"
#include "elastic/worker/run_worker.h"

int Train(const std::string& checkpoint_folder, int64_t epochs) {
  const auto group = ddp::init_process_group();  // blocks until all ranks have joined
  const torch::Device device = group->device();  // the CPU, or this rank's GPU

  // Every rank holds all data here; a batch lists the samples of this rank.
  constexpr int64_t kSamples = 1000;
  torch::manual_seed(1);
  const torch::Tensor inputs = torch::rand({kSamples, 1}).to(device);
  const torch::Tensor noise = torch::randn({kSamples, 1}).to(device);
  const torch::Tensor targets = 3 * inputs + 1 + 0.01 * noise;

  torch::nn::Linear net(1, 1);
  net->to(device);
  ddp::DistributedDataParallel model(net, group);  // copies rank 0's weights to all ranks
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  ddp::elastic::Training training(model, optimizer,
                                  {.dataset_size = kSamples,
                                   .global_batch_size = 50,
                                   .epochs = epochs,
                                   .checkpoint_folder = checkpoint_folder,
                                   .checkpoint_every = 100});

  while (training.next_epoch()) {
    while (const auto batch = training.next_batch()) {
      const torch::Tensor mine = torch::tensor(batch->indices, torch::kLong).to(device);
      const torch::Tensor outputs = model->forward(inputs.index_select(0, mine));
      training.step(torch::mse_loss(outputs, targets.index_select(0, mine)));
    }
    if (!training.epoch_complete()) continue;  // this generation ends; the next one continues
    const double loss = training.mean_loss();
    if (group->rank() != 0) continue;
    std::printf("epoch %ld loss %.6f weight %.3f bias %.3f\n", training.epoch(), loss,
                net->weight.item<double>(), net->bias.item<double>());
    std::fflush(stdout);
  }
  return 0;
}

int main(int argc, char** argv) {
  if (argc > 3 || (argc > 1 && argv[1][0] == '-')) {
    std::fprintf(stderr, "usage: train [FOLDER_FOR_CHECKPOINTS [EPOCHS]]\n");
    return 2;
  }
  const std::string checkpoint_folder = argc > 1 ? argv[1] : "";
  const int64_t epochs = argc > 2 ? std::atoll(argv[2]) : 5;
  return ddp::elastic::run_worker([&] { return Train(checkpoint_folder, epochs); });
}
