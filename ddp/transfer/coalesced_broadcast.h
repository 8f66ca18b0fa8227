#ifndef DDP_TRANSFER_COALESCED_BROADCAST_H_
#define DDP_TRANSFER_COALESCED_BROADCAST_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp::internal {

class Communicator;

struct CoalescedBroadcastOptions {
  int rank = 0;  // of the calling rank
  int root = 0;
  int64_t chunk_bytes = int64_t{250} << 20;  // of one message; a single larger tensor exceeds it

  // Asked before a tensor, given by index, gets other values. True: its autograd version stays, and
  // a graph that saved the tensor uses the new values. Null: every version rises.
  std::function<bool(size_t index)> keeps_version;

  const char* what = "a coalesced broadcast";  // for messages
};

// Copies `root`'s tensors into those of the other ranks, with at most two messages in progress. All
// ranks give tensors of equal types and shapes in equal order, and their `names` for messages.
//
// A tensor keeps its memory, so its views follow. Its autograd version rises, so a backward that
// needs the old values throws. A tensor on the CPU with equal bits is not written. Every dense type
// works, because bytes are sent.
//
// Returns `root`'s values as contiguous parts of the messages. Each part keeps its whole message
// alive.
//
// Throws ConfigurationError for a tensor that is not dense. Throws as Communicator::Wait() does.
std::vector<at::Tensor> BroadcastCoalesced(Communicator& communicator,
                                           const std::vector<at::Tensor>& tensors,
                                           const std::vector<std::string>& names,
                                           const CoalescedBroadcastOptions& options);

// Returns true when two tensors of one type and shape, both on the CPU, hold the same bits: NaN
// equals itself, and 0 differs from -0.
bool SameBits(const at::Tensor& a, const at::Tensor& b);

}  // namespace ddp::internal

#endif  // DDP_TRANSFER_COALESCED_BROADCAST_H_
