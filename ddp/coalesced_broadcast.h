#ifndef DDP_COALESCED_BROADCAST_H_
#define DDP_COALESCED_BROADCAST_H_

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

class Communicator;

struct CoalescedBroadcastOptions {
  int rank = 0;  // this one
  int root = 0;
  int64_t chunk_bytes = int64_t{250} << 20;  // of one message; more for a single larger tensor

  // A tensor that changes gets new memory, so that what a graph saved of it stays as it was.
  // Otherwise it is written to in place, and the graph is wrong from then on without noticing.
  bool fresh_memory = false;

  const char* what = "a coalesced broadcast";  // for messages
};

// Copies `root`'s tensors into the others', two messages under way at once. All ranks give tensors
// of equal types and shapes, in equal order. A tensor that is equal already is left alone, and no
// tensor's autograd version is raised. Throws as Communicator::Wait.
void BroadcastCoalesced(Communicator& communicator, const std::vector<at::Tensor>& tensors,
                        const CoalescedBroadcastOptions& options);

}  // namespace ddp

#endif  // DDP_COALESCED_BROADCAST_H_
