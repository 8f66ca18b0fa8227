#ifndef DDP_RPC_DISTRIBUTED_OPTIMIZER_H_
#define DDP_RPC_DISTRIBUTED_OPTIMIZER_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/rpc/remote.h"

namespace ddp::rpc {

class AutogradContext;
class Registry;

// An optimizer of LibTorch by name, with its options. Equal on all workers that update one object.
struct OptimizerSpec {
  std::string name;
  std::vector<double> options;
  friend bool operator==(const OptimizerSpec&, const OptimizerSpec&) = default;
};
OptimizerSpec sgd(double learning_rate, double momentum = 0, double weight_decay = 0);
OptimizerSpec adagrad(double learning_rate);
OptimizerSpec adam(double learning_rate, double weight_decay = 0);

// An object whose parameters a DistributedOptimizer updates: any RRef of a class with parameters().
struct RemoteParameters {
  template <typename T>
  RemoteParameters(const RRef<T>& object) : use(object.use()) {}  // NOLINT
  std::shared_ptr<internal::ObjectUse> use;
};

// Updates parameters where they are, from the gradients of an autograd context.
//
//   rpc::DistributedOptimizer optimizer(rpc::sgd(0.1), {table}, model->parameters());
//   optimizer.step(context);
//
// Each object has one optimizer, at its owner, which dies with the object: all workers share its
// state. Steps of several workers on one object follow each other, and their gradients are not
// averaged. The order of steps decides the bits: a program that needs equal bits in every run lets
// its workers step in turn. Parameters without a gradient in the context stay as they are.
//
// State, for a checkpoint: LibTorch's own values, as tensors. A list has, for each parameter in the
// order of parameters():
// - sgd() with momentum: the number of momentum buffers, 0 or 1; the momentum buffer
// - adagrad(): the step count; the sum of squares
// - adam(): the step count; the averages of the gradients and of their squares
// - sgd() without momentum: nothing
// A count is one int64 without dimensions. The others have the type and the shape of the parameter,
// and are zero before the parameter's first step. An optimizer with a loaded state, over parameters
// with loaded values, continues bit by bit.
//
// An owner's step holds a lock against other steps and accesses to the state, and against nothing
// else: a method of the object may run meanwhile. Thread-compatible.
class DistributedOptimizer {
 public:
  // `objects`: on any worker; `local`: parameters of this worker. Throws ConfigurationError for an
  // unknown optimizer.
  DistributedOptimizer(OptimizerSpec spec, std::vector<RemoteParameters> objects,
                       std::vector<at::Tensor> local = {});
  ~DistributedOptimizer();
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  // Makes one step everywhere. Blocks until all owners have made it. Throws as Future::wait(); a
  // RemoteError when the object has an optimizer with another spec, or no parameters(). Leaves
  // `.grad` as it was, also after an error.
  void step(const AutogradContext& context);

  // The learning rate of this worker's later steps, on the objects and on the local parameters. It
  // is that of the spec before set_learning_rate(). Workers that share an object may use different
  // rates: a step uses the rate of the worker that makes it. Throws ConfigurationError for a rate
  // that is negative or not finite. A checkpoint of the state does not hold the rate.
  double learning_rate() const { return learning_rate_; }
  void set_learning_rate(double rate);

  // Returns a copy of the state of an object's optimizer, or sets it. Any worker may call them,
  // also before the first step, and for any object of this spec. Block until the owner has
  // answered. Throw as step(); load_state() a RemoteError for a list of other lengths, types or
  // shapes, and then changes nothing. state() throws a RemoteError for momentum of sparse
  // gradients, which LibTorch keeps as a sparse tensor.
  std::vector<at::Tensor> state(const RemoteParameters& object) const;
  void load_state(const RemoteParameters& object, const std::vector<at::Tensor>& state) const;

  // The same for the local parameters. Throw ConfigurationError where the others throw a
  // RemoteError, and when there are no local parameters.
  std::vector<at::Tensor> local_state() const;
  void load_local_state(const std::vector<at::Tensor>& state);

 private:
  class Local;
  Local& local() const;
  const OptimizerSpec spec_;
  const std::vector<RemoteParameters> objects_;
  const std::unique_ptr<Local> local_;
  double learning_rate_;
};

namespace internal {

// Registers the functions through which other workers update objects of this one.
void AddOptimizerFunctions(Registry& registry);

}  // namespace internal

}  // namespace ddp::rpc

#endif  // DDP_RPC_DISTRIBUTED_OPTIMIZER_H_
