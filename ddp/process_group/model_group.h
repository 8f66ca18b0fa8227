#ifndef DDP_PROCESS_GROUP_MODEL_GROUP_H_
#define DDP_PROCESS_GROUP_MODEL_GROUP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/process_group.h"

namespace ddp::internal {

// The ranks of a model, or of a layer with ranks of its own: the part of a process group that the
// reducer and such layers need. Shares the ownership of the process group. Thread-compatible.
class ModelGroup final {
 public:
  // `also`: groups whose ranks wait for this rank within a backward. They get its failure reports.
  explicit ModelGroup(std::shared_ptr<ProcessGroup> group,
                      std::vector<std::shared_ptr<ModelGroup>> also = {})
      : group_(std::move(group)), also_(std::move(also)) {}

  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  // Returns the device of the collectives' tensors.
  at::Device device() const { return group_->device(); }

  // Returns the current communicator. The group replaces it after a failure, between two passes.
  Communicator& communicator() { return group_->communicator(); }

  // Reports to all ranks that this rank cannot continue. Never throws.
  void report_failure(const std::string& reason) {
    std::vector<ProcessGroup*> groups = {group_.get()};
    for (const auto& group : also_) groups.push_back(group->group_.get());
    ProcessGroup::report_failure_to(groups, reason);
  }
  // Returns true when some rank has failed since the communicator was made.
  bool failed() const { return group_->failed(); }

  void ensure_usable() { group_->ensure_usable(); }
  int64_t incarnation() const { return group_->incarnation(); }

  // Returns true when both are parts of one process group.
  bool SameAs(const ModelGroup& other) const { return group_ == other.group_; }

 private:
  const std::shared_ptr<ProcessGroup> group_;
  const std::vector<std::shared_ptr<ModelGroup>> also_;
};

}  // namespace ddp::internal

#endif  // DDP_PROCESS_GROUP_MODEL_GROUP_H_
