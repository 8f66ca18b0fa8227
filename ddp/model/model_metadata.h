#ifndef DDP_MODEL_MODEL_METADATA_H_
#define DDP_MODEL_MODEL_METADATA_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ddp::internal {

// Collects all that the ranks of one model must agree on before they reduce gradients together, and
// serializes it as text. FirstDifference() compares the texts of two ranks. Thread-compatible.
class ModelMetadata {
 public:
  struct Tensor {
    std::string name;
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;
    bool requires_grad = false;
  };

  // Add one item. Call them in the same order on every rank: the order counts.
  void AddParameter(const Tensor& tensor);
  void AddBuffer(const Tensor& tensor);
  void AddOption(const std::string& name, const std::string& value);

  // Returns the text, one item to a line. Equal texts mean equal metadata.
  std::string Serialize() const;

  // Returns the 128-bit XXH3 hash of Serialize().
  std::pair<uint64_t, uint64_t> Hash() const;

  // Returns the first difference between two serialized metadata, for a person:
  //   parameter 3 is w Float [8] strides [1] on rank 0 and w Double [8] strides [1] on rank 2
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
