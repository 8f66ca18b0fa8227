#ifndef DDP_ELASTIC_CHECKPOINT_RANDOM_GENERATORS_H_
#define DDP_ELASTIC_CHECKPOINT_RANDOM_GENERATORS_H_

#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/save_load/load_checkpoint.h"
#include "elastic/checkpoint/tensors/torch_tensors.h"

namespace ddp::elastic {

// Returns copies of the states of this process's random generators, under the names of `rank`: the
// CPU's and, with an accelerator, its current device's.
std::vector<NamedTensor> RngStates(int rank);

// Checks the generators' states in `checkpoint` and returns the function that sets them. The
// function cannot fail: a clone of each generator has accepted its state already. A rank that the
// checkpoint does not know gets seeds of its own, made from rank 0's state.
absl::StatusOr<std::function<void()>> PrepareRng(const LoadedCheckpoint& checkpoint, int rank);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_RANDOM_GENERATORS_H_
