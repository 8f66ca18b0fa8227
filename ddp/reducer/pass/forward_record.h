#ifndef DDP_REDUCER_PASS_FORWARD_RECORD_H_
#define DDP_REDUCER_PASS_FORWARD_RECORD_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace ddp::internal {

// One forward of the wrapped module. The graph of its outputs keeps the record alive, and
// ForwardHistory keeps the newest ones.
struct ForwardRecord {
  // The state of one output. kFresh: no backward has passed it. kPassed: a backward has passed it.
  // kReduced: the gradients of that backward are reduced.
  enum class Output : uint8_t { kFresh, kPassed, kReduced };

  bool synchronized = false;  // its backward is to be reduced
  bool collectives = false;   // its backward may have collectives of the model
  bool reduced = false;       // a complete reduction contains gradients of it
  bool training = false;      // of a module in training mode, whose every backward is seen
  bool skipped = false;       // counted as an iteration without a backward
  std::vector<Output> outputs;

  // Autograd numbers the nodes of a thread in the order of their creation. This forward created
  // the nodes of `thread` from first_node to end_node, exclusive.
  uint64_t thread = 0;
  uint64_t first_node = 0;
  uint64_t end_node = 0;

  // The nodes that a backward with create_graph through this forward has created. The gradient of
  // x.mm(weight) by x depends on the weight through these nodes alone.
  struct Nodes {
    uint64_t thread = 0;
    uint64_t first = 0;
    uint64_t end = 0;
  };
  std::vector<Nodes> of_gradients = {};

  bool Created(uint64_t of_thread, uint64_t node) const {
    if (node >= first_node && node < end_node && of_thread == thread) return true;
    return std::any_of(of_gradients.begin(), of_gradients.end(), [&](const Nodes& nodes) {
      return node >= nodes.first && node < nodes.end && of_thread == nodes.thread;
    });
  }
};

using ForwardPtr = std::shared_ptr<ForwardRecord>;

}  // namespace ddp::internal

#endif  // DDP_REDUCER_PASS_FORWARD_RECORD_H_
