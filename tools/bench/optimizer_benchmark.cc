// train::FusedAdamW beside torch::optim::AdamW: the time of one step, for many small parameters and
// for one large one.
//
//   bazel run --config=opt //tools/bench:optimizer_benchmark -- --benchmark_repetitions=7
//       --benchmark_enable_random_interleaving --benchmark_report_aggregates_only
//
// Arguments: the number of parameters, and the elements of each. The repetitions of both take turns
// at random, so that a slower machine is slower for both. OMP_NUM_THREADS sets the threads.

#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include <torch/optim/adamw.h>
#include <torch/types.h>

#include "train/optim/fused_adam.h"

namespace ddp {
namespace {

template <typename AdamW>
void Step(benchmark::State& state) {
  std::vector<torch::Tensor> parameters;
  for (int64_t i = 0; i < state.range(0); ++i) {
    parameters.push_back(torch::ones({state.range(1)}));
    parameters.back().mutable_grad() = torch::full({state.range(1)}, 0.5);
  }
  AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-3));
  optimizer.step();  // makes the state
  for (auto _ : state) optimizer.step();
  state.SetItemsProcessed(state.iterations() * state.range(0) * state.range(1));
}

#define DDP_STEPS(type)       \
  BENCHMARK(Step<type>)       \
      ->Args({1000, 64})      \
      ->Args({1000, 1024})    \
      ->Args({100, 100'000})  \
      ->Args({1, 16'000'000}) \
      ->UseRealTime()         \
      ->Unit(benchmark::kMicrosecond)
DDP_STEPS(torch::optim::AdamW);
DDP_STEPS(train::FusedAdamW);
#undef DDP_STEPS

}  // namespace
}  // namespace ddp

BENCHMARK_MAIN();
