#ifndef DDP_ELASTIC_CHECKPOINT_GROUP_GATHER_GROUP_H_
#define DDP_ELASTIC_CHECKPOINT_GROUP_GATHER_GROUP_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/group/checkpoint_group.h"

namespace ddp::elastic {

// A CheckpointGroup over a collective that gathers a text of every rank, for a save while the store
// is away. A rank that waits sees no progress of the others. Passes on the collective's exceptions.
class GatherGroup final : public CheckpointGroup {
 public:
  // Returns the texts of all ranks, by rank, on every rank.
  using Gather = std::function<std::vector<std::string>(const std::string& mine)>;

  GatherGroup(int rank, int world_size, Gather gather)
      : rank_(rank), world_size_(world_size), gather_(std::move(gather)) {}

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  absl::StatusOr<std::string> Decide(const std::string& value, const Decision& decide) override {
    const std::vector<std::string> values = gather_(value);
    return gather_(rank_ == 0 ? decide(values) : std::string()).at(0);
  }

 private:
  const int rank_;
  const int world_size_;
  const Gather gather_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_GROUP_GATHER_GROUP_H_
