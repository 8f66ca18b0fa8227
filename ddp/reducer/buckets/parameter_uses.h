#ifndef DDP_REDUCER_BUCKETS_PARAMETER_USES_H_
#define DDP_REDUCER_BUCKETS_PARAMETER_USES_H_

#include <cstddef>
#include <memory>
#include <vector>

namespace ddp::internal {

// The parameters of one live model, counted by the process. Two models that reduce one parameter in
// one backward read its gradient one after the other, so neither may change the gradient before the
// backward ends.
//
// Thread-safe.
class ParameterUses {
 public:
  // Counts the parameters, named by the addresses of their tensors, until the destruction. Requires
  // that the tensors live as long.
  explicit ParameterUses(const std::vector<const void*>& parameters);

  // Returns true when another live model has the parameter too. O(1), without a lock.
  bool shared(size_t index) const { return uses_[index].use_count() > 1; }

 private:
  std::vector<std::shared_ptr<const void>> uses_;
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_PARAMETER_USES_H_
