#include "testing/simulator/job_checker.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ddp::testing {

using elastic::GenerationId;
using elastic::NodeOffer;
using elastic::NodePlacement;
using elastic::Round;

namespace {

std::string Name(const GenerationId& generation) {
  return absl::StrCat("generation ", generation.number, ".", generation.nonce);
}

// Returns the number of newcomers that a generation was drained for: "node a joins", "3 nodes
// join".
int Newcomers(const std::string& reason) {
  if (absl::StartsWith(reason, "node ") && absl::EndsWith(reason, " joins")) return 1;
  int count = 0;
  const bool is_count = absl::EndsWith(reason, " nodes join") &&
                        absl::SimpleAtoi(reason.substr(0, reason.find(' ')), &count);
  return is_count ? count : 0;
}

}  // namespace

void JobChecker::Violate(const std::string& what) {
  if (!violation_.has_value()) violation_ = what;
}

void JobChecker::OnContact(NodeId node, bool in_contact, int64_t now_us) {
  ran_well_until_us_ = RanWellUntil(now_us);
  Node& self = nodes_[node];
  if (in_contact && !self.in_contact) self.in_contact_since_us = now_us;
  self.in_contact = in_contact;
  // Its lease may have expired. The node is then a newcomer, with any group rank.
  if (!in_contact) self.group_rank = -1;
}

void JobChecker::OnRound(NodeId node, const Round& round, const NodeOffer& offer, int64_t now_us,
                         int64_t joined_us) {
  const NodePlacement& placement = round.placement;
  const std::string name = Name(round.generation);
  const auto [found, is_first] =
      generations_.try_emplace({round.generation.number, round.generation.nonce});
  Generation& generation = found->second;
  if (is_first) {
    generation.round = round;
    generation.started_us = now_us;
    generation.memory_losses_at_start = memory_losses_;
    CheckBudget(generation, now_us);
    CheckReason(generation);
  }
  CheckAgreement(round, generation.round);
  if (nodes_[node].generation + 1 != round.generation.number)
    CheckGathering(generation, offer, joined_us);
  CheckSequence(nodes_[node], round);
  if (placement.local_world_size != offer.nproc) {
    Violate(absl::StrCat(name, ": node ", node, " offered ", offer.nproc, " workers and got ",
                         placement.local_world_size));
  }
  if (placement.group_rank == 0 && placement.master_port != offer.master_port) {
    Violate(absl::StrCat(name, ": node ", node, ", which has rank 0, offered port ",
                         offer.master_port, ", the others were told ", placement.master_port));
  }
  const auto [member, is_new] = generation.members.try_emplace(
      placement.group_rank, Member{node, placement.first_rank, placement.local_world_size});
  if (!is_new && member->second.node != node) {
    Violate(absl::StrCat(name, ": group rank ", placement.group_rank, " was given to node ",
                         member->second.node, " and to node ", node));
  }
  if (is_new) {
    generation.ranks_known += placement.local_world_size;
    CheckMembers(generation);
  }
}

void JobChecker::CheckAgreement(const Round& told, const Round& known) {
  const NodePlacement &a = told.placement, &b = known.placement;
  const std::string name = Name(told.generation);
  if (a.world_size != b.world_size || a.group_world_size != b.group_world_size) {
    Violate(absl::StrCat(name, " has a world of ", a.world_size, " on ", a.group_world_size,
                         " nodes for one and of ", b.world_size, " on ", b.group_world_size,
                         " for another"));
  }
  if (told.restarts != known.restarts || told.charged != known.charged) {
    Violate(absl::StrCat(name, " has ", told.restarts, " restarts for one and ", known.restarts,
                         " for another"));
  }
  if (told.reason != known.reason) {
    Violate(absl::StrCat(name, " has two reasons: ", told.reason, "; ", known.reason));
  }
  if (a.master_addr != b.master_addr || a.master_port != b.master_port) {
    Violate(absl::StrCat(name, " has two masters: ", a.master_addr, ":", a.master_port, " and ",
                         b.master_addr, ":", b.master_port));
  }
  if (told.store_url != known.store_url) {
    Violate(absl::StrCat(name, " has two stores: ", told.store_url, " and ", known.store_url));
  }
  if ((a.group_rank == 0) != (a.first_rank == 0 && a.local_world_size > 0)) {
    Violate(absl::StrCat(name, ": the node of group rank ", a.group_rank, " has ranks from ",
                         a.first_rank));
  }
  if (a.group_world_size < limits_.min_nodes || a.group_world_size > limits_.max_nodes) {
    Violate(absl::StrCat(name, " has ", a.group_world_size, " nodes, allowed are ",
                         limits_.min_nodes, " to ", limits_.max_nodes));
  }
  if (a.group_world_size % limits_.node_unit != 0) {
    Violate(
        absl::StrCat(name, " has ", a.group_world_size, " nodes, the unit is ", limits_.node_unit));
  }
  if (a.group_rank < 0 || a.group_rank >= a.group_world_size || a.first_rank < 0 ||
      a.first_rank + a.local_world_size > a.world_size) {
    Violate(absl::StrCat(name, ": group rank ", a.group_rank, " with ranks from ", a.first_rank,
                         " is out of range"));
  }
}

void JobChecker::CheckMembers(const Generation& generation) {
  int end_of_last = 0;
  int last_group_rank = -1;
  for (const auto& [group_rank, member] : generation.members) {
    const bool is_next = group_rank == last_group_rank + 1;
    if (member.first_rank < end_of_last || (is_next && member.first_rank != end_of_last)) {
      Violate(absl::StrCat(Name(generation.round.generation), ": group rank ", group_rank,
                           " has ranks from ", member.first_rank, ", those before it end at ",
                           end_of_last));
    }
    end_of_last = member.first_rank + member.local_world_size;
    last_group_rank = group_rank;
  }
  const NodePlacement& any = generation.round.placement;
  const bool is_complete = static_cast<int>(generation.members.size()) == any.group_world_size;
  if (is_complete && generation.ranks_known != any.world_size) {
    Violate(absl::StrCat(Name(generation.round.generation), " has ", generation.ranks_known,
                         " ranks in a world of ", any.world_size));
  }
}

void JobChecker::CheckSequence(Node& node, const Round& round) {
  const GenerationId& id = round.generation;
  const std::string name = Name(id);
  const bool is_same = id.number == node.generation && id.nonce == node.nonce;
  if (id.number == 0 || id.nonce.empty()) Violate(absl::StrCat(name, " is none"));
  if (is_same || id.number <= node.generation) {
    Violate(absl::StrCat("a node was given ", name, " after generation ", node.generation, ".",
                         node.nonce));
  }
  const auto at = generations_.find({id.number, id.nonce});
  if (at != generations_.begin()) {
    const auto before = std::prev(at);
    const bool repeats = before->first.first == id.number;
    if (repeats && before->second.memory_losses_at_start == memory_losses_) {
      Violate(absl::StrCat(name, " has the number of ", Name(before->second.round.generation)));
    }
  }
  const bool was_in_the_last =
      is_quiet_ && node.group_rank >= 0 && node.generation + 1 == id.number;
  if (!limits_.ranks_are_wanted && was_in_the_last && node.memory_losses == memory_losses_ &&
      node.group_rank < round.placement.group_world_size &&
      node.group_rank != round.placement.group_rank) {
    Violate(absl::StrCat(name, " moves a node from group rank ", node.group_rank, " to ",
                         round.placement.group_rank));
  }
  node.generation = id.number;
  node.nonce = id.nonce;
  node.group_rank = round.placement.group_rank;
  node.memory_losses = memory_losses_;
}

// Returns the generation of the number before, or null. Of several, one of which the store forgot,
// it is the newest.
const JobChecker::Generation* JobChecker::Before(const Generation& generation) const {
  const uint64_t number = generation.round.generation.number - 1;
  const Generation* newest = nullptr;
  for (auto found = generations_.lower_bound({number, std::string()});
       found != generations_.end() && found->first.first == number; ++found) {
    if (newest == nullptr || found->second.started_us > newest->started_us) newest = &found->second;
  }
  return newest;
}

// Checks that no node counts as lost, and no generation ends, without a fault of a node. A restart
// is allowed when the store lost a generation before all of its nodes were told of it.
void JobChecker::CheckReason(const Generation& generation) {
  const Round& round = generation.round;
  const Generation* const before = Before(generation);
  if (!is_quiet_ || !nodes_are_sound_) return;
  // A restart also has a cause when the store lost it: a failure, or a newcomer.
  const bool is_for_nothing =
      absl::StrContains(round.reason, "starts again") && before != nullptr &&
      !before->has_failed() && !before->is_draining &&
      before->round.placement.group_world_size == round.placement.group_world_size;
  if (!is_for_nothing && !absl::StrContains(round.reason, "lost")) return;
  if (before != nullptr &&
      static_cast<int>(before->members.size()) < before->round.placement.group_world_size) {
    return;
  }
  Violate(
      absl::StrCat(Name(round.generation), ": nothing happened to any node, yet ", round.reason));
}

void JobChecker::CheckBudget(const Generation& generation, int64_t now_us) {
  const Round& round = generation.round;
  const std::string name = Name(round.generation);
  if (round.charged) ++charged_;
  if (absl::StrContains(round.reason, " was lost")) ++losses_;
  if (losses_ > limits_.max_node_losses && memory_losses_ == 0) {
    Violate(absl::StrCat(name, ": ", losses_, " losses, the budget is ", limits_.max_node_losses));
  }
  if (round.restarts < 0 || round.restarts > limits_.max_restarts + may_be_taken_back_) {
    Violate(absl::StrCat(name, ": ", round.restarts, " restarts, the budget is ",
                         limits_.max_restarts));
  }
  const Generation* const before = Before(generation);
  if (before == nullptr || before->memory_losses_at_start != memory_losses_) return;
  const int charge = round.restarts - before->round.restarts;
  if (charge != (round.charged ? 1 : 0)) {
    Violate(absl::StrCat(name, " counts ", round.restarts, " restarts after ",
                         before->round.restarts, ", and says that the last was ",
                         round.charged ? "charged" : "free"));
  }
  if (round.charged && !before->has_failed()) {
    Violate(absl::StrCat(name, ": a membership change was charged: ", round.reason));
  }
  // The store had begun the drain, and the failure came before anybody was told.
  const bool nobody_was_told = !before->is_draining && absl::StrContains(round.reason, " join");
  if (is_quiet_ && !round.charged && !nobody_was_told && before->has_failed_without_excuse() &&
      before->started_us - disturbed_at_us_ > limits_.fencing_us) {
    Violate(absl::StrCat(name, ": a failure was not charged: ", round.reason));
  }
}

bool JobChecker::Generation::has_failed_without_excuse() const {
  // Nobody looks for hangs any more when the workers are asked to stop.
  if (hung > 0 && !is_draining) return true;
  return std::any_of(failed_us.begin(), failed_us.end(),
                     [this](int64_t at_us) { return at_us < excuses_from_us; });
}

// Checks that the newcomer had waited for further ones when all were told to stop for it. It came
// to the store after `joined_us`, and the store decided before the nodes were told, so the real
// wait was even shorter. A newcomer that the cause does not name may have come after the decision.
void JobChecker::CheckGathering(const Generation& generation, const NodeOffer& offer,
                                int64_t joined_us) {
  const Generation* const before = Before(generation);
  if (!is_quiet_ || !nodes_are_sound_ || before == nullptr ||
      before->drained_for_newcomers_us == INT64_MAX) {
    return;
  }
  // Newcomers that fill the job are not kept waiting. The round may have fewer nodes all the same:
  // the program may have told in the meantime that it takes fewer workers.
  const int nodes =
      std::max(generation.round.placement.group_world_size,
               before->round.placement.group_world_size + Newcomers(generation.round.reason));
  if (nodes > limits_.max_nodes - limits_.node_unit) return;
  const bool came_while_it_ran =
      joined_us > std::max(before->started_us, store_since_us_) &&  // a restart may set the clock
      joined_us < before->drained_for_newcomers_us;
  const int64_t waited_us = before->drained_for_newcomers_us - joined_us;
  const bool is_named =
      absl::StrContains(generation.round.reason, absl::StrCat("node ", offer.host, " joins"));
  if (!came_while_it_ran || waited_us >= limits_.scale_up_delay_us ||
      (!is_named && waited_us < limits_.way_us)) {
    return;
  }
  Violate(absl::StrCat(Name(generation.round.generation),
                       ": newcomers were not gathered, one came ", waited_us / 1000,
                       "ms before: ", generation.round.reason));
}

void JobChecker::OnWorkerStarted(NodeId node, const GenerationId& id, int rank, int64_t now_us) {
  const Key key(id.number, id.nonce);
  Generation& generation = generations_[key];
  const std::string name = Name(id);
  const auto [at, is_new] = generation.running.try_emplace(rank, node);
  if (!is_new) {
    Violate(
        absl::StrCat(name, ": rank ", rank, " runs on node ", at->second, " and on node ", node));
  }
  Node& self = nodes_[node];
  if (self.living_workers > 0 && !(self.of_workers == id)) {
    Violate(absl::StrCat("node ", node, " starts ", name, " while workers of ",
                         Name(self.of_workers), " live"));
  }
  if (self.strays_since_us >= 0 && now_us - self.strays_since_us < limits_.kill_timeout_us) {
    Violate(absl::StrCat("node ", node, " starts ", name, " while what workers of ",
                         Name(self.of_workers), " left behind lives"));
  }
  ++self.living_workers;
  self.of_workers = id;
  const auto world = static_cast<size_t>(generation.round.placement.world_size);
  if (generation.running.size() == world) {
    generation.whole_since_us = now_us;
    whole_.push_back(key);
    CheckOnlyOneRuns(now_us);
  }
}

void JobChecker::OnWorkerEnded(NodeId node, const GenerationId& id, int rank, Cause cause,
                               int64_t now_us) {
  ran_well_until_us_ = RanWellUntil(now_us);
  const Key key(id.number, id.nonce);
  Generation& generation = generations_[key];
  generation.running.erase(rank);
  if (cause == Cause::kOwnFailure) generation.failed_us.push_back(now_us);
  if (cause == Cause::kHang) ++generation.hung;
  --nodes_[node].living_workers;
  if (std::exchange(generation.whole_since_us, -1) >= 0) {
    whole_.erase(std::remove(whole_.begin(), whole_.end(), key), whole_.end());
  }
}

void JobChecker::OnStore(bool is_up, int64_t now_us) {
  if (is_up && !store_is_up_) store_since_us_ = now_us;
  store_is_up_ = is_up;
}

// Returns true when a node of `generation` has had contact with the store for fencing_us, and so
// could know that the generation is over.
bool JobChecker::HearsTheStore(const Generation& generation, int64_t now_us) {
  if (!store_is_up_ || now_us - store_since_us_ < limits_.fencing_us) return false;
  return std::any_of(generation.members.begin(), generation.members.end(), [&](const auto& entry) {
    const Node& node = nodes_[entry.second.node];
    return node.in_contact && now_us - node.in_contact_since_us >= limits_.fencing_us;
  });
}

bool JobChecker::RunsWell(const Generation& generation) const {
  if (generation.hangs) return false;
  return std::all_of(generation.members.begin(), generation.members.end(), [&](const auto& entry) {
    const auto found = nodes_.find(entry.second.node);
    return found == nodes_.end() || found->second.in_contact;
  });
}

int64_t JobChecker::RanWellUntil(int64_t now_us) const {
  const bool runs_well = std::any_of(
      whole_.begin(), whole_.end(), [&](const Key& key) { return RunsWell(generations_.at(key)); });
  return runs_well ? now_us : ran_well_until_us_;
}

bool JobChecker::RunsInReach(int64_t now_us) {
  return std::any_of(whole_.begin(), whole_.end(), [&](const Key& key) {
    const Generation& generation = generations_[key];
    return now_us - generation.whole_since_us >= limits_.fencing_us &&
           HearsTheStore(generation, now_us);
  });
}

void JobChecker::CheckOnlyOneRuns(int64_t now_us) {
  for (size_t i = 1; i < whole_.size(); ++i) {
    const Generation& one = generations_[whole_[i - 1]];
    const Generation& other = generations_[whole_[i]];
    const int64_t since_us = std::max(one.whole_since_us, other.whole_since_us);
    // When no message is lost, the earlier generation is over before the later one begins.
    const bool is_clear = is_quiet_ && one.memory_losses_at_start == memory_losses_;
    if (now_us - since_us < (is_clear ? 0 : limits_.fencing_us)) continue;
    // The earlier generation must stop as soon as its nodes can know of the later one.
    const bool one_is_over = one.round.generation.number < other.round.generation.number;
    if (!HearsTheStore(one_is_over ? one : other, now_us)) continue;
    Violate(absl::StrCat(Name(one.round.generation), " and ", Name(other.round.generation),
                         " run at once"));
  }
}

}  // namespace ddp::testing
