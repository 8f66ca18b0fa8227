#ifndef DDP_COALESCED_BROADCAST_H_
#define DDP_COALESCED_BROADCAST_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp::internal {

class Communicator;

struct CoalescedBroadcastOptions {
  int rank = 0;  // of the caller
  int root = 0;
  int64_t chunk_bytes = int64_t{250} << 20;  // of one message; more for a single larger tensor

  // Asked before a tensor, by its index, gets other values. True: its autograd version stays as it
  // is, and a graph that saved the tensor takes the new values for the old ones. Null: no tensor's.
  std::function<bool(size_t index)> keeps_version;

  const char* what = "a coalesced broadcast";  // for messages
};

// Copies `root`'s tensors into the others', two messages under way at once. All ranks give tensors
// of equal types and shapes, in equal order; `names` are theirs, for messages.
//
// A tensor keeps its memory, so its views follow. Its autograd version rises, so a backward that
// needs the old values throws. A tensor whose bits are equal already is left alone. Every dense
// type works, because bytes are sent.
//
// Returns `root`'s values: contiguous parts of the messages, which live as long as one of them.
//
// Throws ConfigurationError for a tensor that is not dense, and as Communicator::Wait.
std::vector<at::Tensor> BroadcastCoalesced(Communicator& communicator,
                                           const std::vector<at::Tensor>& tensors,
                                           const std::vector<std::string>& names,
                                           const CoalescedBroadcastOptions& options);

// Whether two tensors of one type, shape and device hold the same bits: NaN equals itself, and 0
// differs from -0.
bool SameBits(const at::Tensor& a, const at::Tensor& b);

}  // namespace ddp::internal

#endif  // DDP_COALESCED_BROADCAST_H_
