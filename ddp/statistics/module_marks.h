#ifndef DDP_STATISTICS_MODULE_MARKS_H_
#define DDP_STATISTICS_MODULE_MARKS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "ddp/process_group/model_group.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace ddp::internal {

// A module of one of LibTorch's own classes whose forward takes batch statistics over all ranks.
// The class itself does not show that.
struct MarkedModule {
  std::weak_ptr<torch::nn::Module> module;
  // Returns the group of the layer's own; null when that has been destroyed. A mark does not keep a
  // group alive. Empty: the group is that of the model.
  std::function<std::shared_ptr<ModelGroup>()> group;
};

// The marked modules of this process. A module is recognized by tensors of its own: its running
// mean, and its weight. A mark ends with its tensor. An entry holds the tensor weakly, so no other
// tensor gets the same address while the entry exists. Thread-safe.
class ModuleMarks {
 public:
  // Returns the marks of the process. A process has one set, because functions of LibTorch's
  // dispatcher read it, and a process has one dispatcher. The set is never destroyed, because a
  // module may outlive all statics.
  static ModuleMarks& OfProcess() {
    static ModuleMarks& marks = *new ModuleMarks();
    return marks;
  }

  // Marks a module. Find() then recognizes the module by each of `tensors`. A second mark of the
  // same tensors replaces the group.
  void Set(const std::vector<at::Tensor>& tensors, const MarkedModule& marked) {
    MutexLock lock(mutex_);
    ++changes_;
    for (auto entry = marks_.begin(); entry != marks_.end();) {
      entry = entry->second.tensor.expired() ? marks_.erase(entry) : std::next(entry);
    }
    for (const at::Tensor& tensor : tensors) {
      marks_.insert_or_assign(
          tensor.unsafeGetTensorImpl(),
          Entry{.tensor = WeakTensor(tensor.getIntrusivePtr()), .marked = marked});
    }
  }

  // Returns the marked module that `tensor` belongs to. A tensor that two modules share has the
  // mark of one of them.
  std::optional<MarkedModule> Find(const at::Tensor& tensor) const {
    MutexLock lock(mutex_);
    const auto found = marks_.find(tensor.unsafeGetTensorImpl());
    if (found == marks_.end()) return std::nullopt;
    return found->second.marked;
  }

  // Returns how often Set() was called. One atomic load.
  int64_t changes() const { return changes_; }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    WeakTensor tensor;
    MarkedModule marked;
  };

  std::atomic<int64_t> changes_ = 0;
  mutable Mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Entry> marks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::internal

#endif  // DDP_STATISTICS_MODULE_MARKS_H_
