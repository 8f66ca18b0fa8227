#ifndef DDP_BACKWARD_WATCH_H_
#define DDP_BACKWARD_WATCH_H_

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

// One forward, kept alive by the graph of its outputs.
struct ForwardRecord {
  bool synchronized = false;  // its backward is to be reduced
  bool reduced = false;       // and was
  std::vector<int> unused;    // parameters that its outputs do not reach, where that was searched
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

  // Hangs the hooks on those of `outputs` that have a history.
  void Watch(const std::vector<at::Tensor>& outputs, const std::shared_ptr<ForwardRecord>& record);

  const Backward& current() const { return current_; }

 private:
  class Token;

  void Enter(const std::shared_ptr<ForwardRecord>& record);
  void Leave(int task, bool with_exception);

  Observer* const observer_;
  const std::shared_ptr<BackwardWatch*> self_;  // what hooks that outlive us hold weakly
  Backward current_;
};

}  // namespace ddp

#endif  // DDP_BACKWARD_WATCH_H_
