#ifndef DDP_REDUCER_COMM_HOOK_LAUNCHER_H_
#define DDP_REDUCER_COMM_HOOK_LAUNCHER_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/common/grad_bucket.h"
#include "ddp/common/tensor_future.h"
#include "ddp/reducer/buckets/bucket_plan.h"

namespace ddp::internal {

class Communicator;

// Calls the comm hook of a model: its rounds for each bucket, with their arguments, and the waits
// for their futures. Owned by the Reducer, which decides when; without a hook, it calls
// GradientBuckets::Launch() instead. Thread-compatible.
//
// The calls for one bucket in one pass: Start(), NextRound() for each further round, then
// WaitForResult(), or Wait() in its place on a joined rank. When the hook or a wait throws, all but
// Wait() call `on_error` in the catch block, and throw what `on_error` throws. Wait() throws as
// Communicator::WaitFuture().
class CommHookLauncher {
 public:
  // A function that is called in a catch block with the name of the hook's call that failed. It
  // throws.
  using OnError = std::function<void(const std::string& about)>;

  CommHookLauncher(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                   OnError on_error)
      : parameters_(std::move(parameters)),
        parameter_names_(std::move(names)),
        on_error_(std::move(on_error)) {}

  // Sets the hook, under a name for messages.
  void Register(std::string name, CommHookRounds rounds);
  bool registered() const { return static_cast<bool>(rounds_.first); }
  int rounds() const { return 1 + static_cast<int>(rounds_.further.size()); }
  CommHook& first_round() { return rounds_.first; }  // empty: no hook is registered
  const std::string& name() const { return name_; }

  // Sets the plan, and forgets the buckets of the earlier one.
  void SetPlan(const BucketPlan& plan);

  // Calls the first round with `buffer`.
  void Start(int bucket, at::Tensor buffer);
  // Waits for the round before `round` (from 1), then calls `round` with that round's value.
  void NextRound(int bucket, int round, Communicator& communicator);
  // Waits for the last round.
  void Wait(int bucket, Communicator& communicator);
  // Waits for the last round and returns its tensor. Throws ReductionError when the tensor is not
  // like the buffer.
  at::Tensor WaitForResult(int bucket, Communicator& communicator);

  // Forgets the futures of a pass. `release_buffers`: the buffers as well.
  void EndPass(bool release_buffers);

 private:
  struct Call {
    std::unique_ptr<GradBucket> argument;
    std::vector<std::string> names;    // of the rounds' calls, for messages
    TensorFuture future;               // of the last round that was called
    std::vector<TensorFuture> former;  // of the rounds before: their values live as long
  };

  void MakeCalls();
  std::string NameOfRound(int bucket, int round) const;
  // Calls `function`, and on_error_ with the name of the round when it throws.
  void Guard(int bucket, int round, const std::function<void()>& function) const;
  void Await(int bucket, int round, Communicator& communicator);

  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> parameter_names_;
  const OnError on_error_;
  std::string name_;
  CommHookRounds rounds_;
  BucketPlan plan_;
  std::vector<Call> calls_;  // by bucket; made by the first Start() of a plan
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_COMM_HOOK_LAUNCHER_H_
