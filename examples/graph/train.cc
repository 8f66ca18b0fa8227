// Trains a TorchScript file that Python wrote, as a graph cut at bucket boundaries, on any number
// of ranks. A rank, a node or all ranks may be killed at any moment: ddprun restarts them, and
// training continues from the newest checkpoint.
//
//   bazel run //examples/graph:train.launch -- --nproc-per-node=2 --max-restarts=3 --
//       --checkpoint_dir=/tmp/spirals
//
// examples/graph/make_model.py makes two files: model.pt is a script, traced.pt is a trace.
#include <torch/script.h>
#include <torch/torch.h>

#include <gflags/gflags.h>

#include <cmath>
#include <cstdio>
#include <string>

#include "ddp/ddp.h"
#include "ddp/graph/optimize_graph.h"
#include "elastic/training/training.h"
#include "elastic/worker/run_worker.h"
#include "examples/example_file.h"

DEFINE_string(model, "", "TorchScript file; default: examples/graph/model.pt of this repository");
DEFINE_string(checkpoint_dir, "", "where checkpoints go; empty: nowhere");
DEFINE_int32(epochs, 30, "passes over the points");
DEFINE_bool(interpreter, false,
            "run the operations one by one: a restarted job then has the bits of an undisturbed "
            "one, because no piece makes a profiling run again");

namespace {

constexpr int64_t kPoints = 1000;

std::string ModelFile() {
  return FLAGS_model.empty() ? ExampleFile("examples/graph/model.pt", "--model") : FLAGS_model;
}

// Returns points on two spirals [N, 2] and the spiral of each [N].
std::pair<torch::Tensor, torch::Tensor> Spirals() {
  const torch::Tensor labels = torch::arange(kPoints) % 2;
  const torch::Tensor radius = torch::arange(kPoints) / static_cast<double>(kPoints);
  const torch::Tensor angle = 2 * M_PI * radius + M_PI * labels;
  const torch::Tensor points = torch::stack({radius * angle.cos(), radius * angle.sin()}, 1);
  return {points.to(torch::kFloat), labels};
}

int Train() {
  const auto group = ddp::init_process_group();  // blocks until all ranks have joined
  const torch::Device device = group->device();  // the CPU, or this rank's GPU
  torch::manual_seed(1 + group->rank());         // of the dropout
  auto [points, labels] = Spirals();
  points = points.to(device);
  labels = labels.to(device);

  torch::jit::Module script = torch::jit::load(ModelFile(), device);
  ddp::GraphOptions graph_options{.bucket_cap_mb = 0.01};  // three pieces of this small model
  if (FLAGS_interpreter) graph_options.backend = ddp::interpreter_backend();
  const auto graph = ddp::optimize_graph(script, graph_options);
  if (group->rank() == 0) std::printf("%s", graph->describe().c_str());

  ddp::DistributedDataParallel model(graph, group, {.bucket_layout = graph->bucket_layout()});
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
  ddp::elastic::Training training(model, optimizer,
                                  {.dataset_size = kPoints,
                                   .global_batch_size = 100,
                                   .epochs = FLAGS_epochs,
                                   .min_samples_per_rank = 2,  // the script has a batch norm
                                   .checkpoint_folder = FLAGS_checkpoint_dir,
                                   .checkpoint_every = 20});
  while (training.next_epoch()) {
    while (const auto batch = training.next_batch()) {
      const torch::Tensor mine = torch::tensor(batch->indices, torch::kLong).to(device);
      const torch::Tensor scores = model.forward(points.index_select(0, mine)).toTensor();
      training.step(torch::nn::functional::cross_entropy(scores, labels.index_select(0, mine)));
    }
    if (!training.epoch_complete()) continue;  // this generation ends; the next one continues
    const double loss = training.mean_loss();
    if (group->rank() != 0) continue;
    std::printf("epoch %ld loss %.9f", training.epoch(), loss);
    if (script.hasattr("seen")) {  // the buffer that model.pt assigns
      std::printf(" seen %.0f", script.attr("seen").toTensor().item<double>());
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  return ddp::elastic::run_worker([] { return Train(); });
}
