#ifndef DDP_COMM_COLLECTIVE_H_
#define DDP_COMM_COLLECTIVE_H_

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "ddp/comm/backend/backend_traits.h"
#include "ddp/common/reduce_op.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace ddp::internal {

// A collective as one rank calls it: the kind, the operation and the tensors. A value.
// Communicator::Start() launches it. The functions of ddp/transfer/collective_arguments.h make the
// tensors contiguous. For an average they divide the sum.
//
// The tensors are contiguous, or sparse (COO; all-reduces only). Launch() gives the backend bytes
// if the collective only moves data. If it reduces, Launch() views dense complex numbers as pairs
// of real numbers and dense bools as bytes; all other types go to the backend as they are.
struct Collective {
  enum class Kind : uint8_t {
    kAllReduce,
    kBroadcast,
    kAllGather,      // output: the inputs of all ranks, by rank
    kReduceScatter,  // input: one part for each rank, by rank; output: this rank's part, reduced
    kAllToAll,       // input: one part for each rank; output: one from each; all of one size
    kAllToAllSized,  // as kAllToAll, with the sizes of the parts given
  };

  Kind kind = Kind::kAllReduce;
  ReduceOp op = ReduceOp::kSum;  // kAverage gives the sum; the caller divides
  int root = -1;                 // rank, of a broadcast
  at::Tensor output;             // also the input of an all-reduce or a broadcast
  at::Tensor input = {};         // of the other kinds
  // kAllToAllSized: the elements that come from each rank, and that go to each rank.
  std::vector<int64_t> output_sizes = {};
  std::vector<int64_t> input_sizes = {};

  // Returns a literal such as "all-reduce (sum)".
  const char* Name() const;

  // Returns the tensor whose type and shape must be equal on every rank. For kAllToAllSized only
  // the type must be.
  const at::Tensor& agreed() const;
  bool sizes_agree() const { return kind != Kind::kAllToAllSized; }

  // Returns true when no rank has data to send. The answer is the same on every rank.
  bool IsEmpty() const;

  // Returns true when the collective completes on no rank before all ranks have launched it.
  bool needs_all_ranks() const { return kind != Kind::kBroadcast; }

  // Does the whole collective for a group of one rank: copies the input to the output.
  void CopyInGroupOfOne() const;

  // Starts the collective on `backend` and does not wait. Throws what the backend throws.
  c10::intrusive_ptr<c10d::Work> Launch(c10d::Backend& backend, const BackendTraits& traits) const;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_COLLECTIVE_H_
