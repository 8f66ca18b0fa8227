#ifndef DDP_STATISTICS_STATISTICS_GROUP_H_
#define DDP_STATISTICS_STATISTICS_GROUP_H_

#include <cstdint>

#include "ddp/reducer/reducer_group.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

// The ranks over which a layer takes its batch statistics: the part of a process group that the
// layer needs. ProcessReducerGroup (ddp/process_group/process_reducer_group.h) implements it with a
// ProcessGroup. Thread-compatible.
class StatisticsGroup : public ReducerGroup {
 public:
  // Does what ProcessGroup::ensure_usable() and incarnation() do.
  virtual void ensure_usable() = 0;
  virtual int64_t incarnation() const = 0;

  // Returns true when both are made of one process group.
  bool SameAs(const StatisticsGroup& other) const {
    return process_group() == other.process_group();
  }

  // Returns the group that this is a part of. Lives as long as this object.
  virtual ProcessGroup* process_group() const = 0;
};

}  // namespace ddp::internal

#endif  // DDP_STATISTICS_STATISTICS_GROUP_H_
