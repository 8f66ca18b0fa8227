#include "elastic/rendezvous/round.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

// Bounds on what another node may claim, far above any machine and far below an overflow.
constexpr int kNprocMax = 1 << 16;
constexpr int kNodesMax = 1 << 16;
constexpr int kWorldMax = 1 << 30;
constexpr size_t kOfferBytesMax = 4096;

absl::Status Bad(const std::string& what) {
  return absl::InternalError(absl::StrCat("rendezvous: ", what));
}

// Whether `count` things from `first` on lie in 0 .. `size` - 1.
bool Fits(int first, int count, int size) {
  return first >= 0 && count >= 0 && size <= kWorldMax && first <= size && count <= size - first;
}

absl::Status ReadInteger(const nlohmann::json& json, const char* name, int64_t min, int64_t max,
                         int& value) {
  const auto found = json.find(name);
  if (found == json.end() || !found->is_number_integer()) {
    return Bad(absl::StrCat("an offer of a node has no number ", name));
  }
  const int64_t number = found->get<int64_t>();
  if (number < min || number > max) {
    return Bad(absl::StrCat("an offer of a node has ", name, " ", number));
  }
  value = static_cast<int>(number);
  return absl::OkStatus();
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

std::string FormatOffer(const NodeOffer& offer) {
  const nlohmann::json json = {{"nproc", offer.nproc},
                               {"role", offer.role},
                               {"host", offer.host},
                               {"master_addr", offer.master_addr},
                               {"master_port", offer.master_port},
                               {"node_rank", offer.node_rank}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

absl::StatusOr<NodeOffer> ParseOffer(const std::string& text) {
  if (text.size() > kOfferBytesMax) return Bad("an offer of a node is too long");
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Bad("an offer of a node is no JSON object");
  NodeOffer offer;
  for (const absl::Status& status :
       {ReadInteger(json, "nproc", 0, kNprocMax, offer.nproc),
        ReadInteger(json, "master_port", 0, 65535, offer.master_port),
        ReadInteger(json, "node_rank", -1, kNodesMax, offer.node_rank)}) {
    if (!status.ok()) return status;
  }
  for (const auto& [name, string] : {std::pair<const char*, std::string*>{"role", &offer.role},
                                     {"host", &offer.host},
                                     {"master_addr", &offer.master_addr}}) {
    const auto found = json.find(name);
    if (found == json.end() || !found->is_string()) {
      return Bad(absl::StrCat("an offer of a node has no text ", name));
    }
    *string = found->get<std::string>();
  }
  return offer;
}

}  // namespace ddp::elastic
