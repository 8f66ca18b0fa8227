#ifndef DDP_BACKWARD_WATCH_H_
#define DDP_BACKWARD_WATCH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp::internal {

// One forward, kept alive by the graph of its outputs.
struct ForwardRecord {
  // Of one output: no backward has passed it; one has; and the gradients of that one are reduced.
  enum class Output : uint8_t { kFresh, kPassed, kReduced };

  bool synchronized = false;  // its backward is to be reduced
  bool reduced = false;       // a complete reduction contains gradients of it
  std::vector<Output> outputs;

  // Autograd numbers the nodes of a thread in the order of their creation. This forward created
  // those of `thread` from first_node to end_node, exclusive.
  uint64_t thread = 0;
  uint64_t first_node = 0;
  uint64_t end_node = 0;
};

// Tells when a backward through the outputs of watched forwards begins, which forwards it passes
// through, and whether it ends well or with an exception. Autograd itself says none of this: the
// watch hangs a hook on every output, and with the first one of a backward a callback on that
// backward's graph task. The callback is run at a good end; an exception only destroys it.
//
// A backward nested in another one (re-entrant checkpointing) is a part of the outer one, which has
// passed the outputs before.
//
// Thread-compatible: used on the thread that runs forwards and on the one that runs backwards,
// never at once.
class BackwardWatch {
 public:
  class Observer {
   public:
    // Before any operation of the forward is passed.
    virtual void OnBackwardBegin() = 0;
    // At the end, after all gradients. May throw: the exception leaves backward().
    virtual void OnBackwardEnd() = 0;
    // While the exception passes by.
    virtual void OnBackwardException() = 0;

   protected:
    ~Observer() = default;
  };

  // What the backward under way is known to pass through.
  struct Backward {
    int task = -1;  // autograd's number of it; -1: none that came through a watched output
    std::vector<std::shared_ptr<ForwardRecord>> synchronized;
  };

  // `observer` must outlive the watch, not the outputs.
  explicit BackwardWatch(Observer* observer);
  ~BackwardWatch();
  BackwardWatch(const BackwardWatch&) = delete;
  BackwardWatch& operator=(const BackwardWatch&) = delete;

  // Registers a hook on every output that has a history. Returns whether each output that requires
  // a gradient has a hook now: then no backward from them goes unseen.
  bool Watch(const std::vector<at::Tensor>& outputs, const std::shared_ptr<ForwardRecord>& record);

  const Backward& current() const { return current_; }

 private:
  class Token;

  void Enter(const std::shared_ptr<ForwardRecord>& record, size_t output);
  void Leave(int task, bool with_exception);

  Observer* const observer_;
  const std::shared_ptr<BackwardWatch*> self_;  // what hooks that outlive us hold weakly
  Backward current_;
};

}  // namespace ddp::internal

#endif  // DDP_BACKWARD_WATCH_H_
