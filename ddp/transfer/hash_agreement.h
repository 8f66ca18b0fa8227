#ifndef DDP_TRANSFER_HASH_AGREEMENT_H_
#define DDP_TRANSFER_HASH_AGREEMENT_H_

#include <cstdint>
#include <utility>

#include <c10/core/Device.h>

#include "ddp/comm/check/operation_name.h"

namespace ddp::internal {

class Communicator;

// Returns true when all ranks have given the same hash. Collective: one all-reduce of 32 bytes on
// `device`. Compares all bits but the lowest of each half. The answer is the same on all ranks.
// Throws as Communicator::Wait().
bool SameOnAllRanks(std::pair<uint64_t, uint64_t> hash, c10::Device device,
                    const OperationName& what, Communicator& communicator);

}  // namespace ddp::internal

#endif  // DDP_TRANSFER_HASH_AGREEMENT_H_
