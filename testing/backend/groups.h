// Process groups for tests that need no launcher.
#ifndef DDP_TESTING_BACKEND_GROUPS_H_
#define DDP_TESTING_BACKEND_GROUPS_H_

#include <memory>
#include <utility>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "ddp/process_group.h"
#include "ddp/process_group/model_group.h"

namespace ddp::testing {

// Returns a group of one rank, over Gloo and a store in memory.
inline std::shared_ptr<ProcessGroup> GroupOfOne() {
  return std::make_shared<ProcessGroup>(c10::make_intrusive<c10d::HashStore>(),
                                        ProcessGroup::Place(),
                                        ProcessGroupOptions{.backend = "gloo"});
}

// Returns `group` as a Reducer sees it.
inline std::shared_ptr<internal::ModelGroup> ModelGroupOf(std::shared_ptr<ProcessGroup> group) {
  return std::make_shared<internal::ModelGroup>(std::move(group));
}

}  // namespace ddp::testing

#endif  // DDP_TESTING_BACKEND_GROUPS_H_
