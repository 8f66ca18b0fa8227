#ifndef DDP_PROCESS_REDUCER_GROUP_H_
#define DDP_PROCESS_REDUCER_GROUP_H_

#include <memory>
#include <string>
#include <utility>

#include "ddp/process_group.h"
#include "ddp/reducer/reducer_group.h"

namespace ddp::internal {

// Implements ReducerGroup with a ProcessGroup. Shares its ownership. Thread-compatible.
class ProcessReducerGroup final : public ReducerGroup {
 public:
  explicit ProcessReducerGroup(std::shared_ptr<ProcessGroup> group) : group_(std::move(group)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  at::Device device() const override { return group_->device(); }
  Communicator& communicator() override { return group_->communicator(); }
  void report_failure(const std::string& reason) override { group_->report_failure(reason); }
  bool failed() const override { return group_->failed(); }

 private:
  const std::shared_ptr<ProcessGroup> group_;
};

}  // namespace ddp::internal

#endif  // DDP_PROCESS_REDUCER_GROUP_H_
