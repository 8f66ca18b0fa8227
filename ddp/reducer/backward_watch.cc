#include "ddp/reducer/backward_watch.h"

#include <algorithm>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

namespace ddp::internal {

// Reports the end of a backward. Lives as long as the graph task that owns its callback.
class BackwardWatch::Token {
 public:
  Token(std::weak_ptr<BackwardWatch*> watch, int task) : watch_(std::move(watch)), task_(task) {}
  ~Token() {
    const auto watch = watch_.lock();
    if (!ended_ && watch) (*watch)->Leave(task_, /*with_exception=*/true);
  }
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;

  void End() {
    ended_ = true;
    if (const auto watch = watch_.lock()) (*watch)->Leave(task_, /*with_exception=*/false);
  }

 private:
  const std::weak_ptr<BackwardWatch*> watch_;
  const int task_;
  bool ended_ = false;
};

BackwardWatch::BackwardWatch(Observer* observer)
    : observer_(observer), self_(std::make_shared<BackwardWatch*>(this)) {}

BackwardWatch::~BackwardWatch() = default;

bool BackwardWatch::Watch(const std::vector<at::Tensor>& outputs,
                          const std::shared_ptr<ForwardRecord>& record) {
  bool all = true;
  record->outputs.assign(outputs.size(), ForwardRecord::Output::kFresh);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    // A parameter that is returned as an output would keep the hook for ever.
    if (outputs[i].is_leaf()) {
      all = false;
      continue;
    }
    outputs[i].register_hook(
        [watch = std::weak_ptr<BackwardWatch*>(self_), record, i](const at::Tensor&) {
          if (const auto alive = watch.lock()) (*alive)->Enter(record, i);
        });
  }
  return all;
}

void BackwardWatch::Enter(const std::shared_ptr<ForwardRecord>& record, size_t output) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task != current_.task) {
    current_ = {.task = task};
    const auto token = std::make_shared<Token>(self_, task);
    torch::autograd::Engine::get_default_engine().queue_callback([token] { token->End(); });
    observer_->OnBackwardBegin();
  }
  if (record->outputs[output] == ForwardRecord::Output::kFresh) {
    record->outputs[output] = ForwardRecord::Output::kPassed;
  }
  if (record->synchronized && std::find(current_.synchronized.begin(), current_.synchronized.end(),
                                        record) == current_.synchronized.end()) {
    current_.synchronized.push_back(record);
  }
}

void BackwardWatch::Leave(int task, bool with_exception) {
  if (task != current_.task) return;
  if (with_exception) {
    observer_->OnBackwardException();
    current_ = {};
    return;
  }
  current_.task = -1;  // the work after this point belongs to another backward
  observer_->OnBackwardEnd();
  current_ = {};
}

}  // namespace ddp::internal
