#include "ddp/comm/backend/reduction_support.h"

#include "absl/strings/str_cat.h"

namespace ddp::internal {
namespace {

// Returns true when Gloo reduces the type: a complex number as two real ones, a bool as a byte.
bool GlooReduces(at::ScalarType type) {
  switch (c10::toRealValueType(type)) {
    case at::kBool:
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      return true;
    default:
      return false;
  }
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
