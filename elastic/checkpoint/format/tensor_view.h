#ifndef DDP_ELASTIC_CHECKPOINT_FORMAT_TENSOR_VIEW_H_
#define DDP_ELASTIC_CHECKPOINT_FORMAT_TENSOR_VIEW_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ddp::elastic {

// The element types of the safetensors format that LibTorch has too.
enum class Dtype {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kF64,
  kI64,
  kU64,
  kC64,
};

// Returns the format's name: "F32".
const char* DtypeName(Dtype dtype);
std::optional<Dtype> DtypeFromName(const std::string& name);
uint64_t DtypeBytes(Dtype dtype);

// Returns the size of a tensor in bytes; nullopt when it does not fit in 64 bits.
std::optional<uint64_t> TensorBytes(Dtype dtype, const std::vector<uint64_t>& shape);

// Returns "[2, 3]".
std::string ShapeText(const std::vector<uint64_t>& shape);

// The element type and the shape of a tensor.
struct TensorType {
  Dtype dtype = Dtype::kF32;
  std::vector<uint64_t> shape;  // empty: one element

  friend bool operator==(const TensorType&, const TensorType&) = default;
};

// Returns "F32 [2, 3]".
std::string TensorTypeText(const TensorType& type);

// The name, type and values of a tensor. The values are contiguous, row by row, in memory that the
// view does not own.
struct TensorView {
  std::string name;
  TensorType type;
  const char* data = nullptr;
  uint64_t bytes = 0;  // TensorBytes(type)
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FORMAT_TENSOR_VIEW_H_
