#ifndef DDP_COMMON_SHARDED_OPTIMIZER_H_
#define DDP_COMMON_SHARDED_OPTIMIZER_H_

#include <functional>
#include <memory>
#include <vector>

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace ddp {

class Joinable;

// An optimizer whose ranks each hold a part of the state. A checkpoint saves and restores it
// through a plain optimizer with the whole state, so the files are those of the plain optimizer.
class ShardedOptimizer {
 public:
  virtual ~ShardedOptimizer() = default;

  // Returns a plain optimizer over the same parameters, with the form of the whole state: step
  // counts, and tensors of the right types and sizes whose elements are all in one place in memory.
  // On every rank. Collective. Throws what a collective throws.
  virtual std::unique_ptr<torch::optim::Optimizer> DescribeState() = 0;

  // Gives `whole`, a result of DescribeState() since the last step, the values of the states that
  // this rank needs, in host memory. `needed`: by parameter, in the order of the groups; the ranks
  // may need different ones. Collective. Throws what a collective throws.
  virtual void FillState(torch::optim::Optimizer& whole, const std::vector<bool>& needed) = 0;

  // Returns a plain optimizer over the same parameters without a state. Not a collective.
  virtual std::unique_ptr<torch::optim::Optimizer> EmptyOptimizer() const = 0;

  // Builds this rank's part of the state of `whole`, and returns the function that puts it and
  // the options in place. `whole` was made by EmptyOptimizer() and may end before. Not a
  // collective: call it on every rank. Throws when the part cannot be built; the function does not
  // throw.
  virtual std::function<void()> PrepareState(const torch::optim::Optimizer& whole) = 0;

  // Returns the object that a ddp::Join takes for this optimizer. Valid as long as the optimizer.
  virtual Joinable* joinable() const = 0;
};

}  // namespace ddp

#endif  // DDP_COMMON_SHARDED_OPTIMIZER_H_
