#include "ddp/comm/kernels/reduce.h"

#include <cstddef>
#include <span>
#include <vector>

#include <glog/logging.h>

#include "ddp/comm/kernels/element_type.h"
#include "ddp/comm/kernels/float_environment.h"
#include "ddp/comm/kernels/kernel_table.h"

namespace ddp::internal {
namespace {

std::vector<const KernelTable*> FindSupported() {
  std::vector<const KernelTable*> supported;
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    supported.push_back(&kAvx512Kernels);
  }
  // Every processor with AVX2 has F16C.
  if (__builtin_cpu_supports("avx2")) supported.push_back(&kAvx2Kernels);
#endif
  supported.push_back(&kGenericKernels);
  return supported;
}

bool IsFloating(ElementType type) { return type >= ElementType::kHalf; }

bool IsBitwise(ReduceKind kind) { return kind >= ReduceKind::kBitAnd; }

}  // namespace

std::span<const KernelTable* const> SupportedKernels() {
  static const auto& supported = *new std::vector<const KernelTable*>(FindSupported());
  return supported;
}

void ReduceTreeWith(const KernelTable& table, ReduceKind kind, ElementType type,
                    std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
                    size_t count, double factor) {
  CHECK(!inputs.empty() && inputs.size() <= kMaxReduceInputs) << inputs.size() << " inputs";
  const bool floating = IsFloating(type);
  CHECK(factor == 1.0 || (kind == ReduceKind::kSum && floating)) << "factor " << factor;
  if (kind != ReduceKind::kSum) {
    for (const std::byte* input : inputs) CHECK(input != nullptr || count == 0) << "a null input";
  }
  if (IsBitwise(kind)) {
    CHECK(!floating) << "a bitwise operation on floating numbers";
    count *= SizeOf(type);
    type = ElementType::kUint8;
  }
  if (outputs.empty() || count == 0) return;
  table.reduce[static_cast<int>(kind)][static_cast<int>(type)](
      inputs.data(), inputs.size(), outputs.data(), outputs.size(), count, factor);
}

void ReduceTree(ReduceKind kind, ElementType type, std::span<const std::byte* const> inputs,
                std::span<std::byte* const> outputs, size_t count, double factor) {
  const DefaultFloatEnvironment environment;
  ReduceTreeWith(*SupportedKernels().front(), kind, type, inputs, outputs, count, factor);
}

}  // namespace ddp::internal
