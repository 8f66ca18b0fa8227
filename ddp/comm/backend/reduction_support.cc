#include "ddp/comm/backend/reduction_support.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace ddp::internal {
namespace {

// Returns true when Gloo reduces the type: a complex number as two real ones, a bool as a byte.
bool GlooReduces(at::ScalarType type) {
  constexpr at::ScalarType kTypes[] = {at::kBool, at::kByte,     at::kChar,  at::kInt,   at::kLong,
                                       at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  return std::ranges::find(kTypes, c10::toRealValueType(type)) != std::end(kTypes);
}

std::string Refusal(const char* backend, at::ScalarType type) {
  return absl::StrCat(backend, " does not reduce ", c10::toString(type), ". Convert with .to(...)");
}

}  // namespace

std::string GlooRefusal(ReduceOp op, at::ScalarType type) {
  return GlooReduces(type) ? "" : Refusal("Gloo", type);
}

std::string SharedMemoryRefusal(ReduceOp op, at::ScalarType type) {
  return GlooReduces(type) || type == at::kShort ? "" : Refusal("shared memory", type);
}

std::string NcclRefusal(ReduceOp op, at::ScalarType type) {
  if (type == at::kShort) return Refusal("NCCL", type);
  return IsBitwise(op) ? "NCCL has no bitwise operations" : "";
}

}  // namespace ddp::internal
