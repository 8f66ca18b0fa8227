#ifndef DDP_MODEL_METADATA_H_
#define DDP_MODEL_METADATA_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ddp::internal {

// All that the ranks of one model must agree on before they may reduce each other's gradients,
// written down so that two ranks can be compared and the first difference named. Pure;
// thread-compatible.
class ModelMetadata {
 public:
  struct Tensor {
    std::string name;
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;
    bool requires_grad = false;
  };

  // In the order in which the model registers them.
  void AddParameter(const Tensor& tensor);
  void AddBuffer(const Tensor& tensor);
  void AddOption(const std::string& name, const std::string& value);

  // The whole as text, one item to a line; equal texts mean equal metadata.
  std::string Serialize() const;

  // 128 bits over Serialize(), by XXH3.
  std::pair<uint64_t, uint64_t> Hash() const;

  // The first difference between two serialized metadata, for a person:
  //   parameter 3 is fc.weight float [10, 64] on rank 0 and fc.weight double [10, 64] on rank 2
  // Empty when they are equal.
  static std::string FirstDifference(const std::string& a, int rank_a, const std::string& b,
                                     int rank_b);

 private:
  std::vector<std::string> lines_;
  int parameters_ = 0;
  int buffers_ = 0;
};

}  // namespace ddp::internal

#endif  // DDP_MODEL_METADATA_H_
