#include "testing/simulator/bugs/planted_bugs.h"

#include <glog/logging.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_replace.h"
#include "elastic/rendezvous/rendezvous_scripts.h"
#include "testing/simulator/bugs/core_bugs.h"

namespace ddp::testing {

using elastic::RendezvousScripts;
using elastic::ScriptName;

namespace {

std::vector<PlantedBug> ScriptBugs() {
  return {
      {.name = "charge_membership",
       .what = "a failure is charged although a node was lost",
       .symptom = "a membership change was charged",
       .edits = {{.from = "(J.change == '' or (J.excused ~= '1' and J.fail_victim ~= '1'))",
                  .to = "true"}}},
      {.name = "forget_ranks",
       .what = "a survivor takes any free rank",
       .symptom = "moves a node from group rank",
       .edits = {{.from = "for _, offer in ipairs(chosen) do take(offer, offer.old_rank) end",
                  .to = ""}}},
      {.name = "free_restarts",
       .what = "the budget is not looked at",
       .symptom = "the budget is",
       .edits = {{.from = "if num('restarts') - num('given_back') >= num('max_restarts') then",
                  .to = "if false then"}},
       .first_seed = 30000101},
      {.name = "no_adoption",
       .what = "a server that lost its memory does not learn the generation from its clients",
       .symptom = "nothing happened to any node",
       .edits = {{.from = "if seen > num('generation') then", .to = "if false then"}},
       .first_seed = 30000026},
      {.name = "one_too_many",
       .what = "a job without an id that is full takes in a spare",
       .symptom = "without a run id",
       .edits = {{.from = "if is_one_too_many() then", .to = "if false then"}},
       .first_seed = 30000171},
      {.name = "rank_twice",
       .what = "the first two nodes of a round get the same ranks",
       .symptom = "has rank",
       .edits = {{.from = "offer.first, offer.first_in_role = world, role_worlds[offer.role] or 0",
                  .to = "offer.first, offer.first_in_role = math.max(0, world - 1), 0"}}},
      {.name = "free_losses",
       .what = "lost nodes are free without bound",
       .symptom = "losses, the budget is",
       .edits = {{.from = "return J.lost_host == '' or count_loss()", .to = "return true"}},
       .first_seed = 30000039},
      {.name = "free_in_a_drain",
       .what = "a failure on the way to a common step is free",
       .symptom = "a failure was not charged",
       .edits = {{.from = "(J.excused ~= '1' and J.fail_victim ~= '1'))", .to = "false)"}},
       .first_seed = 30000225},
      {.name = "no_gathering",
       .what = "each newcomer drains the job at once",
       .symptom = "newcomers were not gathered",
       .edits = {{.from = "now - num('newcomer_at') >= delay or", .to = "true or"}},
       .first_seed = 30000164},
      {.name = "never_reap",
       .what = "a node whose lease has run out stays",
       .symptom = "no generation runs",
       .edits = {{.from = "if row then miss(name, row, 'was lost') end",
                  .to = "if row then redis.call('HSET', members, name, row) end"}}},
      {.name = "reap_while_frozen",
       .what = "nodes are given up for lost when it was the store that was away",
       .symptom = "nothing happened to any node",
       .edits = {{.from = "if not is_frozen() then\n    reap()", .to = "if true then\n    reap()"}},
       .first_seed = 30000009},
      // Needs a round that the store forgot after some nodes were told of it, and another one that
      // takes its number before they are heard: none of the two runs whole.
      {.name = "no_nonce",
       .what = "two generations of one number are taken for the same",
       .symptom = "no generation runs",
       .edits = {{.from = "my_generation == J.generation and my_nonce == J.nonce",
                  .to = "my_generation == J.generation"},
                 {.from = "brief[3] == my_generation and brief[4] == my_nonce",
                  .to = "brief[3] == my_generation"}},
       .first_seed = 30000248},
  };
}

}  // namespace

const std::vector<PlantedBug>& PlantedBugs() {
  static const auto* const kBugs = [] {
    auto* const bugs = new std::vector<PlantedBug>(ScriptBugs());
    for (PlantedBug& bug : CoreBugs()) bugs->push_back(std::move(bug));
    return bugs;
  }();
  return *kBugs;
}

const PlantedBug* FindPlantedBug(const std::string& name) {
  const auto found = std::find_if(PlantedBugs().begin(), PlantedBugs().end(),
                                  [&name](const PlantedBug& bug) { return bug.name == name; });
  return found == PlantedBugs().end() ? nullptr : &*found;
}

AgentCode Plant(const PlantedBug& bug) {
  AgentCode code;
  code.make_tamper = bug.make_tamper;
  if (bug.edits.empty()) return code;
  std::vector<int> planted(bug.edits.size());
  code.scripts = RendezvousScripts([&bug, &planted](ScriptName, std::string source) {
    for (size_t i = 0; i < planted.size(); ++i) {
      planted[i] += absl::StrReplaceAll({{bug.edits[i].from, bug.edits[i].to}}, &source);
    }
    return source;
  });
  for (size_t i = 0; i < planted.size(); ++i) {
    CHECK_GT(planted[i], 0) << "no script has a text that the bug " << bug.name
                            << " replaces: " << bug.edits[i].from;
  }
  return code;
}

}  // namespace ddp::testing
