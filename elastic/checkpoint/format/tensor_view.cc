#include "elastic/checkpoint/format/tensor_view.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "glog/logging.h"

namespace ddp::elastic {
namespace {

struct DtypeEntry {
  Dtype dtype;
  const char* name;
  uint64_t bytes;
};

constexpr std::array<DtypeEntry, 16> kDtypes = {{
    {Dtype::kBool, "BOOL", 1},
    {Dtype::kU8, "U8", 1},
    {Dtype::kI8, "I8", 1},
    {Dtype::kF8E5M2, "F8_E5M2", 1},
    {Dtype::kF8E4M3, "F8_E4M3", 1},
    {Dtype::kI16, "I16", 2},
    {Dtype::kU16, "U16", 2},
    {Dtype::kF16, "F16", 2},
    {Dtype::kBF16, "BF16", 2},
    {Dtype::kI32, "I32", 4},
    {Dtype::kU32, "U32", 4},
    {Dtype::kF32, "F32", 4},
    {Dtype::kF64, "F64", 8},
    {Dtype::kI64, "I64", 8},
    {Dtype::kU64, "U64", 8},
    {Dtype::kC64, "C64", 8},
}};

const DtypeEntry& EntryOf(Dtype dtype) {
  for (const DtypeEntry& entry : kDtypes) {
    if (entry.dtype == dtype) return entry;
  }
  LOG(FATAL) << "no such dtype: " << static_cast<int>(dtype);
}

}  // namespace

const char* DtypeName(Dtype dtype) { return EntryOf(dtype).name; }

std::optional<Dtype> DtypeFromName(const std::string& name) {
  for (const DtypeEntry& entry : kDtypes) {
    if (name == entry.name) return entry.dtype;
  }
  return std::nullopt;
}

uint64_t DtypeBytes(Dtype dtype) { return EntryOf(dtype).bytes; }

std::optional<uint64_t> TensorBytes(Dtype dtype, const std::vector<uint64_t>& shape) {
  uint64_t bytes = DtypeBytes(dtype);
  bool empty = false;
  for (const uint64_t size : shape) {
    empty = empty || size == 0;
  }
  if (empty) return 0;
  for (const uint64_t size : shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return bytes;
}

std::string ShapeText(const std::vector<uint64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::string TensorTypeText(const TensorType& type) {
  return absl::StrCat(DtypeName(type.dtype), " ", ShapeText(type.shape));
}

}  // namespace ddp::elastic
