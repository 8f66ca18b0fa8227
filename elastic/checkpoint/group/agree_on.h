#ifndef DDP_ELASTIC_CHECKPOINT_GROUP_AGREE_ON_H_
#define DDP_ELASTIC_CHECKPOINT_GROUP_AGREE_ON_H_

#include "absl/status/status.h"
#include "elastic/checkpoint/group/checkpoint_group.h"

namespace ddp::elastic {

// Tells all ranks whether a step has succeeded on every rank. Returns OK on all ranks when `mine`
// is OK on all ranks; else the error of the lowest rank that has one, with its number.
//
// Collective over `group`: a call of Decide(). Blocks as Decide() does. Errors: also those of
// Decide().
absl::Status AgreeOn(CheckpointGroup& group, const absl::Status& mine);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_GROUP_AGREE_ON_H_
