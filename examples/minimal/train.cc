// The smallest trainer worth copying: fits a line through noisy points on any number of ranks.
//
//   bazel run //examples/minimal:train.launch -- --nproc-per-node=2
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>

#include "ddp/ddp.h"
#include "elastic/data/elastic_sampler.h"
#include "elastic/worker/error_file.h"
#include "elastic/worker/worker_session.h"

namespace {

constexpr int64_t kSamples = 1000;

int Train() {
  ddp::elastic::WorkerSession session = ddp::elastic::WorkerSession::from_environment();
  const auto group = ddp::init_process_group();

  // Every rank has all the data here; the sampler says which samples are this rank's.
  torch::manual_seed(1);
  const torch::Device device = group->device();  // the CPU, or this rank's GPU
  const torch::Tensor inputs = torch::rand({kSamples, 1}).to(device);
  const torch::Tensor noise = torch::randn({kSamples, 1}).to(device);
  const torch::Tensor targets = 3 * inputs + 1 + 0.01 * noise;
  ddp::elastic::ElasticSampler sampler(
      {.dataset_size = kSamples, .global_batch_size = 50, .seed = 1}, group->rank(), group->size());

  torch::nn::Linear net(1, 1);
  net->to(device);
  ddp::DistributedDataParallel model(net, group);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5));

  int64_t step = 0;
  for (uint32_t epoch = 0; epoch < 5; ++epoch) {
    sampler.set_epoch(epoch);
    double loss_sum = 0;
    while (const auto batch = sampler.next_batch()) {
      const torch::Tensor mine = torch::tensor(batch->indices, torch::kLong).to(device);
      const torch::Tensor errors =
          model->forward(inputs.index_select(0, mine)) - targets.index_select(0, mine);
      const torch::Tensor loss = errors.pow(2).sum();
      optimizer.zero_grad();
      // Gradients are averaged over the ranks. Scaled like this, the average is the gradient of the
      // mean over the whole batch, also when the ranks' shares differ.
      (loss * group->size() / batch->global_size).backward();
      optimizer.step();
      sampler.commit();
      session.commit(++step);
      loss_sum += loss.item<double>();
    }
    torch::Tensor total = torch::tensor({loss_sum}, torch::kDouble).to(device);
    group->all_reduce(total);
    if (group->rank() == 0) {
      std::printf("epoch %u loss %.6f weight %.3f bias %.3f\n", epoch,
                  total.item<double>() / kSamples, net->weight.item<double>(),
                  net->bias.item<double>());
    }
  }
  return 0;
}

}  // namespace

int main() { return ddp::elastic::run_worker(Train); }
