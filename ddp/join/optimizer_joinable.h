#ifndef DDP_JOIN_OPTIMIZER_JOINABLE_H_
#define DDP_JOIN_OPTIMIZER_JOINABLE_H_

#include <memory>

#include "ddp/join.h"

namespace ddp::internal {

// Returns a joinable for a LibTorch optimizer under a Join (see join.h). An optimizer's step has no
// collectives. When all ranks have joined, every rank gets the optimizer state of the last joiner:
// moments, step counts and options. `optimizer` must outlive the Join.
std::shared_ptr<Joinable> MakeOptimizerJoinable(torch::optim::Optimizer* optimizer);

}  // namespace ddp::internal

#endif  // DDP_JOIN_OPTIMIZER_JOINABLE_H_
