// A trainer that uses only the public labels of the library. It learns the sum of four numbers,
// fails once with --fail_once, and prints a line at the end.
#include <torch/torch.h>

#include <cstdio>
#include <stdexcept>
#include <string>

#include "ddp/ddp.h"
#include "elastic/worker/run_worker.h"
#include "elastic/worker/worker_session.h"

namespace {

bool fail_once = false;

int Train() {
  ddp::elastic::WorkerSession session = ddp::elastic::WorkerSession::from_environment();
  const auto group = ddp::init_process_group();
  torch::manual_seed(group->rank());
  torch::nn::Linear net(4, 1);
  net->to(group->device());
  ddp::DistributedDataParallel model(net, group);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  for (int64_t step = 1; step <= 400; ++step) {
    if (fail_once && step == 200 && session.restart_count() == 0 && session.rank() == 1) {
      throw std::runtime_error("told to fail");
    }
    const torch::Tensor inputs = torch::rand({16, 4}, group->device());
    optimizer.zero_grad();
    (model->forward(inputs) - inputs.sum(1, true)).pow(2).mean().backward();
    optimizer.step();
    session.commit(step);
  }
  const double error = (net->weight - 1).abs().max().item<double>();
  if (error > 0.1) throw std::runtime_error("did not learn: off by " + std::to_string(error));
  std::printf("rank %d of %d learned, restart %lld\n", group->rank(), group->size(),
              static_cast<long long>(session.restart_count()));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  fail_once = argc > 1 && std::string(argv[1]) == "--fail_once";
  return ddp::elastic::run_worker(Train);
}
