#ifndef DDP_COMM_COLLECTIVE_H_
#define DDP_COMM_COLLECTIVE_H_

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "ddp/reduce_op.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace ddp::internal {

// One collective of one rank: its tensors, its operation, and the properties in which all ranks
// must agree.
//
// Tensors are contiguous, or sparse (COO; all-reduces only). The backend sees complex numbers as
// pairs of real ones, bools as bytes, and the tensors of a collective that only moves data as
// bytes: so data of every type can be moved.
struct Collective {
  enum class Kind : uint8_t {
    kAllReduce,
    kBroadcast,
    kAllGather,      // output: the inputs of all ranks, by rank
    kReduceScatter,  // input: one part for each rank, by rank; output: this rank's part, reduced
    kAllToAll,       // input: one part for each rank; output: one from each. All are of one size
    kAllToAllSized,  // the same; sizes of the parts are given
  };

  Kind kind = Kind::kAllReduce;
  ReduceOp op = ReduceOp::kSum;  // kAverage: the sum, which the caller divides
  int root = -1;                 // of a broadcast
  at::Tensor output;             // all-reduce and broadcast: in place
  at::Tensor input = {};         // the other kinds
  // kAllToAllSized: elements that come from each rank, and that go to each.
  std::vector<int64_t> output_sizes = {};
  std::vector<int64_t> input_sizes = {};

  // "all-reduce (sum)". A literal.
  const char* Name() const;

  // The tensor whose type and shape are the same on every rank. Of kAllToAllSized only the type is.
  const at::Tensor& agreed() const;
  bool sizes_agree() const { return kind != Kind::kAllToAllSized; }

  // No rank has anything to send. Ranks may not differ in the answer.
  bool IsEmpty() const;

  // The collective completes on no rank before all have launched it.
  bool needs_all_ranks() const { return kind != Kind::kBroadcast; }

  // The whole of it in a group of one rank.
  void CopyInGroupOfOne() const;

  // Starts it. Throws what the backend throws.
  c10::intrusive_ptr<c10d::Work> Launch(c10d::Backend& backend) const;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_COLLECTIVE_H_
