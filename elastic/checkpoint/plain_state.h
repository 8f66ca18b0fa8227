#ifndef DDP_ELASTIC_CHECKPOINT_PLAIN_STATE_H_
#define DDP_ELASTIC_CHECKPOINT_PLAIN_STATE_H_

#include <memory>

#include <torch/optim/optimizer.h>

#include "ddp/common/sharded_optimizer.h"
#include "elastic/checkpoint/checkpointer.h"

namespace ddp::elastic {

// A training state whose optimizer is a plain one. For a ShardedOptimizer, `whole` stands for it.
struct PlainState {
  TrainingState state;
  ShardedOptimizer* sharded = nullptr;
  std::unique_ptr<torch::optim::Optimizer> whole = nullptr;

  // Collective over the ranks of a sharded optimizer.
  static PlainState WithForms(const TrainingState& state) {
    return Make(state, [](ShardedOptimizer& sharded) { return sharded.DescribeState(); });
  }
  static PlainState WithoutState(const TrainingState& state) {
    return Make(state, [](ShardedOptimizer& sharded) { return sharded.EmptyOptimizer(); });
  }

 private:
  template <typename MakeWhole>
  static PlainState Make(const TrainingState& state, const MakeWhole& make_whole) {
    PlainState plain{.state = state, .sharded = dynamic_cast<ShardedOptimizer*>(state.optimizer)};
    if (plain.sharded == nullptr) return plain;
    plain.whole = make_whole(*plain.sharded);
    plain.state.optimizer = plain.whole.get();
    return plain;
  }
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_PLAIN_STATE_H_
