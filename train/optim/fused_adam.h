#ifndef DDP_TRAIN_OPTIM_FUSED_ADAM_H_
#define DDP_TRAIN_OPTIM_FUSED_ADAM_H_

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

namespace ddp::train {

// torch::optim::Adam in one pass over memory: each parameter, its gradient and its state are read
// and written once, by LibTorch's vectorized kernel of `fused=True`. LibTorch's own step() passes
// over them about ten times, with a kernel for each.
//
//   train::FusedAdam optimizer(model->parameters(), torch::optim::AdamOptions(1e-3));
//
// Options, states and files are those of torch::optim::Adam, so each can load what the other has
// saved, and checkpoints and ZeroRedundancyOptimizer take it as they take that one. The values are
// equal to 1e-6 of the largest, not to the bit: the kernel rounds less often.
//
// step() falls back to torch::optim::Adam's where a gradient is sparse or of another type than its
// parameter, a parameter is complex or has gaps or overlaps in memory, or the device has no such
// kernel (the CPU and CUDA do). The kernel uses LibTorch's threads; the host does not wait for a
// device. Thread-compatible.
class FusedAdam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override;
};

// The same of torch::optim::AdamW.
class FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace ddp::train

#endif  // DDP_TRAIN_OPTIM_FUSED_ADAM_H_
