#include "elastic/rendezvous/round.h"

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

// Bounds on what another node may claim, far above any machine and far below an overflow.
constexpr int kNprocMax = 1 << 16;
constexpr size_t kMembersMax = 1 << 14;
constexpr size_t kOfferBytesMax = 4096;

absl::Status Bad(const std::string& what) {
  return absl::InternalError(absl::StrCat("rendezvous: ", what));
}

}  // namespace

NodePlacement PlaceNode(const Round& round) {
  const RoundMember& self = round.members[round.self];
  NodePlacement placement;
  placement.group_rank = self.group_rank;
  placement.group_world_size = static_cast<int>(round.members.size());
  placement.local_world_size = self.offer.nproc;
  for (const RoundMember& member : round.members) {
    const bool before = member.group_rank < self.group_rank;
    placement.world_size += member.offer.nproc;
    if (before) placement.first_rank += member.offer.nproc;
    if (member.offer.role != self.offer.role) continue;
    placement.role_world_size += member.offer.nproc;
    if (before) placement.first_role_rank += member.offer.nproc;
  }
  placement.master_addr = round.members.front().offer.master_addr;
  placement.master_port = round.members.front().offer.master_port;
  return placement;
}

absl::Status ValidateRound(const Round& round) {
  if (round.generation.number == 0) return Bad("a round without a generation");
  if (round.members.empty() || round.members.size() > kMembersMax) {
    return Bad(absl::StrCat("a round of ", round.members.size(), " nodes"));
  }
  for (size_t i = 0; i < round.members.size(); ++i) {
    const RoundMember& member = round.members[i];
    if (member.group_rank != static_cast<int>(i)) {
      return Bad(absl::StrCat("node ", member.node, " has group rank ", member.group_rank,
                              " in place ", i));
    }
    if (member.offer.nproc < 1 || member.offer.nproc > kNprocMax) {
      return Bad(absl::StrCat("node ", member.node, " offers ", member.offer.nproc, " workers"));
    }
    if (member.offer.master_port < 1 || member.offer.master_port > 65535) {
      return Bad(absl::StrCat("node ", member.node, " offers port ", member.offer.master_port));
    }
  }
  if (round.self < 0 || static_cast<size_t>(round.self) >= round.members.size()) {
    return Bad("this node is no member of its own round");
  }
  return absl::OkStatus();
}

std::string FormatOffer(const NodeOffer& offer) {
  const nlohmann::json json = {{"nproc", offer.nproc},
                               {"role", offer.role},
                               {"master_addr", offer.master_addr},
                               {"master_port", offer.master_port}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

absl::StatusOr<NodeOffer> ParseOffer(const std::string& text) {
  if (text.size() > kOfferBytesMax) return Bad("an offer of a node is too long");
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Bad("an offer of a node is no JSON object");
  NodeOffer offer;
  for (const auto& [name, number] :
       {std::pair<const char*, int*>{"nproc", &offer.nproc}, {"master_port", &offer.master_port}}) {
    const auto found = json.find(name);
    if (found == json.end() || !found->is_number_integer()) {
      return Bad(absl::StrCat("an offer of a node has no number ", name));
    }
    const int64_t value = found->get<int64_t>();
    if (value < 0 || value > kNprocMax) {
      return Bad(absl::StrCat("an offer of a node has ", name, " ", value));
    }
    *number = static_cast<int>(value);
  }
  for (const auto& [name, string] : {std::pair<const char*, std::string*>{"role", &offer.role},
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
