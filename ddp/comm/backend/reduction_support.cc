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

}  // namespace

std::string GlooRefusal(ReduceOp op, at::ScalarType type) {
  if (GlooReduces(type)) return "";
  return absl::StrCat("Gloo does not reduce ", c10::toString(type), ". Convert with .to(...)");
}

std::string SharedMemoryRefusal(ReduceOp op, at::ScalarType type) {
  if (GlooReduces(type) || type == at::kShort) return "";
  return absl::StrCat("shared memory does not reduce ", c10::toString(type),
                      ". Convert with .to(...)");
}

std::string NcclRefusal(ReduceOp op, at::ScalarType type) {
  if (type == at::kShort) return "NCCL does not reduce Short. Convert with .to(...)";
  return IsBitwise(op) ? "NCCL has no bitwise operations" : "";
}

}  // namespace ddp::internal
