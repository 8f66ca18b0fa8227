#ifndef DDP_COALESCED_BROADCAST_H_
#define DDP_COALESCED_BROADCAST_H_

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

class Communicator;

// Copies `root`'s tensors into the others', in place, in messages of at most about `chunk_bytes`
// (more for a single larger tensor), two of them under way at once. All ranks give tensors of equal
// types and shapes, in equal order. A tensor that is equal already is not written to, and no
// tensor's autograd version is raised: a graph that saved it stays valid. Throws as
// Communicator::Wait.
void BroadcastCoalesced(Communicator& communicator, const std::vector<at::Tensor>& tensors,
                        int rank, int root, int64_t chunk_bytes, const std::string& what);

}  // namespace ddp

#endif  // DDP_COALESCED_BROADCAST_H_
