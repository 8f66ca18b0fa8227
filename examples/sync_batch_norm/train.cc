// A trainer whose model has batch norms: fits a curve, in batches of 24 samples over all ranks.
// With four ranks, each rank has six samples of a batch, too few for good statistics of its own. So
// the ranks take the statistics of the joint batch, and the result does not depend on their number.
//
//   bazel run //examples/sync_batch_norm:train.launch -- --nproc-per-node=4
#include <torch/torch.h>

#include <cstdio>

#include "ddp/ddp.h"
#include "ddp/nn/convert_sync_batchnorm.h"
#include "elastic/training/training.h"
#include "elastic/worker/run_worker.h"

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("first", first);
    register_module("norm", norm);
    register_module("rest", rest);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return rest->forward(torch::relu(norm->forward(first->forward(x))));
  }
  torch::nn::Linear first{1, 16};
  torch::nn::BatchNorm1d norm{16};
  torch::nn::Sequential rest{torch::nn::Linear(16, 16), torch::nn::BatchNorm1d(16),
                             torch::nn::ReLU(), torch::nn::Linear(16, 1)};
};
TORCH_MODULE(Net);

int Train() {
  const auto group = ddp::init_process_group();  // blocks until all ranks have joined
  const torch::Device device = group->device();  // the CPU, or this rank's GPU

  constexpr int64_t kSamples = 240;
  torch::manual_seed(1);
  const torch::Tensor inputs = torch::rand({kSamples, 1}, torch::kDouble).to(device);
  const torch::Tensor targets = torch::sin(6 * inputs);

  Net net;
  net->to(device, torch::kDouble);
  ddp::convert_sync_batchnorm(*net);  // before the DistributedDataParallel
  ddp::DistributedDataParallel model(net, group);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  ddp::elastic::Training training(
      model, optimizer, {.dataset_size = kSamples, .global_batch_size = 24, .epochs = 20});

  while (training.next_epoch()) {
    while (const auto batch = training.next_batch()) {
      const torch::Tensor mine = torch::tensor(batch->indices, torch::kLong).to(device);
      const torch::Tensor outputs = model->forward(inputs.index_select(0, mine));
      training.step(torch::mse_loss(outputs, targets.index_select(0, mine)));
    }
    if (!training.epoch_complete()) continue;  // this generation ends; the next one continues
    const double loss = training.mean_loss();
    if (group->rank() != 0) continue;
    std::printf("epoch %ld loss %.6f running mean %.6f\n", training.epoch(), loss,
                net->norm->running_mean.mean().item<double>());
    std::fflush(stdout);
  }
  return 0;
}

int main() { return ddp::elastic::run_worker(Train); }
