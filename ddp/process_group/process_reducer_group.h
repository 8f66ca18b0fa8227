#ifndef DDP_PROCESS_GROUP_PROCESS_REDUCER_GROUP_H_
#define DDP_PROCESS_GROUP_PROCESS_REDUCER_GROUP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/statistics/statistics_group.h"

namespace ddp::internal {

// Implements ReducerGroup and StatisticsGroup with a ProcessGroup. Shares its ownership.
// Thread-compatible.
class ProcessReducerGroup final : public StatisticsGroup {
 public:
  // `also`: groups whose ranks wait for this rank within a backward. They get its failure reports.
  explicit ProcessReducerGroup(std::shared_ptr<ProcessGroup> group,
                               std::vector<std::shared_ptr<StatisticsGroup>> also = {})
      : group_(std::move(group)), also_(std::move(also)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  at::Device device() const override { return group_->device(); }
  Communicator& communicator() override { return group_->communicator(); }
  void report_failure(const std::string& reason) override {
    std::vector<ProcessGroup*> groups = {group_.get()};
    for (const auto& group : also_) groups.push_back(group->process_group());
    ProcessGroup::report_failure_to(groups, reason);
  }
  bool failed() const override { return group_->failed(); }

  void ensure_usable() override { group_->ensure_usable(); }
  int64_t incarnation() const override { return group_->incarnation(); }
  ProcessGroup* process_group() const override { return group_.get(); }

 private:
  const std::shared_ptr<ProcessGroup> group_;
  const std::vector<std::shared_ptr<StatisticsGroup>> also_;
};

}  // namespace ddp::internal

#endif  // DDP_PROCESS_GROUP_PROCESS_REDUCER_GROUP_H_
