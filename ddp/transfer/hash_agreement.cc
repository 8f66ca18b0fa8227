#include "ddp/transfer/hash_agreement.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include "ddp/comm/communicator.h"

namespace ddp::internal {

// The hashes are equal when their minimum equals their maximum, the negated minimum of the
// negatives.
bool SameOnAllRanks(std::pair<uint64_t, uint64_t> hash, c10::Device device,
                    const OperationName& what, Communicator& communicator) {
  const int64_t a = static_cast<int64_t>(hash.first >> 1);
  const int64_t b = static_cast<int64_t>(hash.second >> 1);
  const at::Tensor least = at::tensor({a, b, -a, -b}, at::kLong).to(device);
  Communicator::Pending pending = communicator.AllReduceMin(least, what);
  communicator.Wait(pending);
  const at::Tensor answer = communicator.ToHost(least, what);
  const int64_t* const found = answer.const_data_ptr<int64_t>();
  return found[0] == -found[2] && found[1] == -found[3];
}

}  // namespace ddp::internal
