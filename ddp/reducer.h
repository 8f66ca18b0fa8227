#ifndef DDP_REDUCER_H_
#define DDP_REDUCER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/bucket_plan.h"
#include "ddp/comm/communicator.h"
#include "ddp/flat_buckets.h"

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace ddp {

class ProcessGroup;

// Averages the gradients of one model over the ranks while they are computed.
//
// A hook on every parameter's gradient accumulator puts the gradient into its bucket. When all of a
// bucket are there, its all-reduce starts, always in plan order so that the ranks agree; the rest
// of the backward runs meanwhile. At the backward's end a callback waits for the sums and makes
// them the gradients. At the end of the first synchronized backward the buckets are dealt anew, in
// the order in which rank 0 saw the gradients become ready. (The method is that of PyTorch's DDP:
// Li et al., VLDB 2020.)
//
//   state        what a gradient means        leaves it
//   kLocal       accumulates on this rank     BeginBackward(true) -> kExpecting
//   kExpecting   the first of a reduction     that gradient -> kReducing
//   kReducing    one more of it               the last one, at the backward's end -> kDone
//   kDone        an error: a second backward  BeginBackward(true) -> kExpecting, (false) -> kLocal
//
// Thread-compatible; gradients of one model come from one thread (autograd's thread for the
// device). The parameters must outlive the reducer's group but not the reducer.
class Reducer {
 public:
  struct Parameter {
    std::string name;
    at::Tensor tensor;  // a leaf that requires a gradient
  };

  struct Options {
    std::vector<int64_t> bucket_limits_bytes;  // first bucket, further buckets
    bool gradient_as_bucket_view = false;
    std::optional<BucketPlan> plan;  // given: used as it is, from the first backward on
  };

  // All ranks give equal parameters and options. Throws ConfigurationError.
  Reducer(std::vector<Parameter> parameters, std::shared_ptr<ProcessGroup> group,
          const Options& options);

  // Takes its hooks back.
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Before a forward whose backward is to be synchronized. Throws ReductionError, naming the
  // parameters, when the last backward left a reduction unfinished: the peers are told, since they
  // wait for it.
  void BeginForward();

  // After a forward. With `synchronize` the next backward is reduced; without, the backwards until
  // the next call only accumulate.
  void BeginBackward(bool synchronize);

  const BucketPlan& plan() const { return buckets_->plan(); }
  std::vector<std::vector<std::string>> plan_names() const;

 private:
  enum class State { kLocal, kExpecting, kReducing, kDone };
  class GradientHook;

  void AddHooks();
  void OnGradient(int parameter);
  void LaunchReadyBuckets();
  void Finalize();
  void RebuildBuckets();
  std::vector<at::Tensor> Tensors() const;
  [[noreturn]] void ThrowUnfinished();

  // Constant after construction.
  const std::vector<Parameter> parameters_;
  const std::shared_ptr<ProcessGroup> group_;
  const Options options_;
  std::vector<BucketPlan::Tensor> descriptions_;
  struct Hook {
    std::shared_ptr<torch::autograd::Node> accumulator;
    uintptr_t key = 0;
  };
  std::vector<Hook> hooks_;

  std::unique_ptr<FlatBuckets> buckets_;
  State state_ = State::kLocal;
  bool rebuilt_ = false;
  std::vector<int> ready_order_;  // of the first synchronized backward

  // Of the current backward. A parameter is ready when its entry equals pass_.
  uint64_t pass_ = 0;
  std::vector<uint64_t> ready_pass_;
  std::vector<int> missing_;  // gradients that each bucket still waits for
  int next_bucket_ = 0;       // the first that is not launched
  std::vector<Communicator::Pending> launched_;
};

}  // namespace ddp

#endif  // DDP_REDUCER_H_
