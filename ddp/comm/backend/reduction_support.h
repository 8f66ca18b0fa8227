#ifndef DDP_COMM_BACKEND_REDUCTION_SUPPORT_H_
#define DDP_COMM_BACKEND_REDUCTION_SUPPORT_H_

#include <string>

#include <c10/core/ScalarType.h>

#include "ddp/common/reduce_op.h"

namespace ddp::internal {

// Each returns why the backend of that name cannot combine tensors of `type` by `op`, as a
// sentence for a message; "" when it can. A bool counts as the byte, and a complex number as the
// pair of numbers, that Collective::Launch() makes of it. For BackendTraits::refusal.
std::string GlooRefusal(ReduceOp op, at::ScalarType type);
std::string SharedMemoryRefusal(ReduceOp op, at::ScalarType type);
std::string NcclRefusal(ReduceOp op, at::ScalarType type);

}  // namespace ddp::internal

#endif  // DDP_COMM_BACKEND_REDUCTION_SUPPORT_H_
