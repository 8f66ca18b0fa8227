#include "ddp/comm/kernels/reduce.h"

#include <cstddef>
#include <span>

#include "ddp/comm/kernels/element_type.h"
#include "ddp/comm/kernels/float_environment.h"
#include "ddp/comm/kernels/supported_kernels.h"

namespace ddp::internal {

void ReduceTree(ReduceKind kind, ElementType type, std::span<const std::byte* const> inputs,
                std::span<std::byte* const> outputs, size_t count, double factor) {
  const DefaultFloatEnvironment environment;
  ReduceTreeWith(*SupportedKernels().front(), kind, type, inputs, outputs, count, factor);
}

}  // namespace ddp::internal
