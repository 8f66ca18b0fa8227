#ifndef DDP_MODEL_MODEL_METADATA_H_
#define DDP_MODEL_MODEL_METADATA_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ddp::internal {

// A text of all that the ranks of one model must agree on before they reduce gradients together.
// Two such texts can be compared, and the first difference named. Pure; thread-compatible.
class ModelMetadata {
 public:
  struct Tensor {
    std::string name;
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;
    bool requires_grad = false;
  };

  // Add in the order in which the model registers them.
  void AddParameter(const Tensor& tensor);
  void AddBuffer(const Tensor& tensor);
  void AddOption(const std::string& name, const std::string& value);

  // Returns the text, one item to a line. Equal texts mean equal metadata.
  std::string Serialize() const;

  // Returns the 128-bit XXH3 hash of Serialize().
  std::pair<uint64_t, uint64_t> Hash() const;

  // Returns the first difference between two serialized metadata, for a person:
  //   parameter 3 is fc.weight float [10, 64] on rank 0 and fc.weight double [10, 64] on rank 2
  // Returns "" when they are equal.
  static std::string FirstDifference(const std::string& a, int rank_a, const std::string& b,
                                     int rank_b);

 private:
  std::vector<std::string> lines_;
  int parameters_ = 0;
  int buffers_ = 0;
};

}  // namespace ddp::internal

#endif  // DDP_MODEL_MODEL_METADATA_H_
