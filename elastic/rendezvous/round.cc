#include "elastic/rendezvous/round.h"

#include "absl/strings/str_cat.h"

namespace ddp::elastic {
namespace {

// Bound on the claims of another node, far below an overflow.
constexpr int kWorldMax = 1 << 30;

absl::Status Bad(const std::string& what) {
  return absl::InternalError(absl::StrCat("rendezvous: ", what));
}

// Returns true when the range of `count` items from `first` lies in 0 .. `size` - 1.
bool Fits(int first, int count, int size) {
  return first >= 0 && count >= 0 && size <= kWorldMax && first <= size && count <= size - first;
}

}  // namespace

const char* JobEndName(JobEnd::Kind kind) {
  switch (kind) {
    case JobEnd::Kind::kSucceeded:
      return "succeeded";
    case JobEnd::Kind::kBudgetSpent:
      return "budget_spent";
    case JobEnd::Kind::kNoProgress:
      return "no_progress";
    case JobEnd::Kind::kNodesLost:
      return "nodes_lost";
    case JobEnd::Kind::kClosed:
      return "closed";
  }
  return "closed";
}

absl::Status ValidatePlacement(const NodePlacement& placement) {
  if (placement.local_world_size < 1 || placement.local_world_size > kNprocMax) {
    return Bad(absl::StrCat("a node with ", placement.local_world_size, " workers"));
  }
  if (placement.group_world_size > kNodesMax ||
      !Fits(placement.group_rank, 1, placement.group_world_size)) {
    return Bad(absl::StrCat("group rank ", placement.group_rank, " of ", placement.group_world_size,
                            " nodes"));
  }
  if (!Fits(placement.first_rank, placement.local_world_size, placement.world_size)) {
    return Bad(absl::StrCat("rank ", placement.first_rank, " and ", placement.local_world_size,
                            " workers of ", placement.world_size));
  }
  if (placement.role_world_size > placement.world_size ||
      !Fits(placement.first_role_rank, placement.local_world_size, placement.role_world_size)) {
    return Bad(absl::StrCat("role rank ", placement.first_role_rank, " and ",
                            placement.local_world_size, " workers of ", placement.role_world_size));
  }
  if (placement.master_port < 1 || placement.master_port > 65535) {
    return Bad(absl::StrCat("the first node's port is ", placement.master_port));
  }
  return absl::OkStatus();
}

absl::Status ValidateOffer(const NodeOffer& offer) {
  if (offer.nproc < 1 || offer.nproc > kNprocMax) {
    return absl::InvalidArgumentError(absl::StrCat("a node with ", offer.nproc, " workers"));
  }
  if (offer.master_port < 1 || offer.master_port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("a node whose workers' store is at port ", offer.master_port));
  }
  return absl::OkStatus();
}

}  // namespace ddp::elastic
