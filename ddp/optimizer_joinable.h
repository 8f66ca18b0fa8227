#ifndef DDP_OPTIMIZER_JOINABLE_H_
#define DDP_OPTIMIZER_JOINABLE_H_

#include <memory>

#include "ddp/join.h"

namespace ddp::internal {

// A LibTorch optimizer under a Join. Its step has no collectives. When all ranks have joined, every
// rank gets the optimizer state of the last one, as it gets that rank's parameters: moments, step
// counts and options. `optimizer` must outlive the Join.
std::shared_ptr<Joinable> MakeOptimizerJoinable(torch::optim::Optimizer* optimizer);

}  // namespace ddp::internal

#endif  // DDP_OPTIMIZER_JOINABLE_H_
