#ifndef DDP_HEALTH_GROUP_FAILURE_H_
#define DDP_HEALTH_GROUP_FAILURE_H_

#include <string>

#include "absl/strings/str_cat.h"

namespace ddp::internal {

// A failure that ends an incarnation of a group. A value.
struct GroupFailure {
  int rank = -1;       // the rank at fault; -1 when the ranks disagree and none alone is at fault
  std::string reason;  // written by that rank, or by the rank that found the failure

  // Returns "rank 2 failed: <reason>", or the reason alone when `rank` is -1.
  std::string ToString() const {
    return rank < 0 ? reason : absl::StrCat("rank ", rank, " failed: ", reason);
  }
};

}  // namespace ddp::internal

#endif  // DDP_HEALTH_GROUP_FAILURE_H_
