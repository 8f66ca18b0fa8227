// Trains a small net on points of two spirals: train.py in C++, in the same order.
// docs/from-python.md compares the two line by line.
//
//   bazel run //examples/from_python:train.launch -- --nproc-per-node=2 -- /tmp/spirals
#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "ddp/ddp.h"
#include "elastic/training/training.h"
#include "elastic/worker/run_worker.h"

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width) {
    hidden = register_module("hidden", torch::nn::Linear(2, width));
    out = register_module("out", torch::nn::Linear(width, 2));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    return out->forward(torch::relu(hidden->forward(x)));
  }

  torch::nn::Linear hidden{nullptr}, out{nullptr};
};
TORCH_MODULE(Net);

std::pair<torch::Tensor, torch::Tensor> MakePoints(int64_t samples) {
  const torch::Tensor labels = torch::arange(samples) % 2;
  const torch::Tensor radius = torch::rand(samples);
  const torch::Tensor angle = 3 * radius + 3.1416 * labels;
  return {torch::stack({radius * angle.cos(), radius * angle.sin()}, 1), labels};
}

int Train(const std::string& checkpoints, int64_t epochs) {
  const auto group = ddp::init_process_group({.backend = "gloo"});
  const int rank = group->rank(), world = group->size();
  torch::manual_seed(1);
  const auto [points, labels] = MakePoints(2000);

  ddp::DistributedDataParallel model(Net(64), group);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  torch::nn::CrossEntropyLoss loss_fn;

  ddp::elastic::Training training(model, optimizer,
                                  {.dataset_size = points.size(0),
                                   .global_batch_size = 50,
                                   .epochs = epochs,
                                   .seed = 7,
                                   .checkpoint_folder = checkpoints,
                                   .resume = ddp::elastic::Training::Resume::kAny});

  while (training.next_epoch()) {
    while (const auto batch = training.next_batch()) {
      const torch::Tensor mine = torch::tensor(batch->indices, torch::kLong);
      const torch::Tensor x = points.index_select(0, mine), y = labels.index_select(0, mine);
      optimizer.zero_grad();
      const torch::Tensor loss = loss_fn(model->forward(x), y);
      training.scaled(loss).backward();
      torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
      training.commit();
    }
    if (!training.epoch_complete()) continue;  // this generation ends; the next one continues

    torch::NoGradGuard no_grad;
    const auto every = torch::indexing::Slice(rank, torch::indexing::None, world);
    torch::Tensor right =
        model.module()->forward(points.index({every})).argmax(1).eq(labels.index({every})).sum();
    group->all_reduce(right);
    if (rank != 0) continue;
    const double accuracy = right.item<double>() / static_cast<double>(points.size(0));
    std::printf("epoch %ld accuracy %.3f\n", training.epoch(), accuracy);
    std::fflush(stdout);
  }
  return 0;
}

int main(int argc, char** argv) {
  return ddp::elastic::run_worker([&] { return Train(argc > 1 ? argv[1] : "", 10); });
}
