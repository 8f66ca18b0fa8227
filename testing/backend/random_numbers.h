// Random numbers for ranks that are threads: such ranks share LibTorch's default generator, so it
// gives each of them other numbers in every run.
#ifndef DDP_TESTING_BACKEND_RANDOM_NUMBERS_H_
#define DDP_TESTING_BACKEND_RANDOM_NUMBERS_H_

#include <cstdint>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/module.h>
#include <torch/types.h>

namespace ddp::testing {

// Returns normally distributed numbers that depend only on `seed`, on the device on which
// torch::empty() makes tensors.
inline torch::Tensor RandomNumbers(uint64_t seed, at::IntArrayRef sizes) {
  const torch::Tensor numbers =
      torch::randn(sizes, at::detail::createCPUGenerator(seed), torch::Device(torch::kCPU));
  return torch::empty(sizes).copy_(numbers);
}

// Gives the module's parameters values that depend only on `seed`.
inline void Randomize(torch::nn::Module& module, uint64_t seed) {
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& parameter : module.parameters()) {
    parameter.copy_(RandomNumbers(seed++, parameter.sizes()));
  }
}

}  // namespace ddp::testing

#endif  // DDP_TESTING_BACKEND_RANDOM_NUMBERS_H_
