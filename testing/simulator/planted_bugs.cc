#include "testing/simulator/planted_bugs.h"

#include <glog/logging.h>

#include <algorithm>

#include "absl/strings/str_replace.h"

namespace ddp::testing {

using elastic::RendezvousScripts;
using elastic::ScriptName;

const std::vector<PlantedBug>& PlantedBugs() {
  static const auto* const kBugs = new std::vector<PlantedBug>{
      {.name = "charge_membership",
       .what = "a failure is charged although a node was lost",
       .from = "return J.fail_cause ~= '' and J.change == ''",
       .to = "return J.fail_cause ~= ''",
       .symptom = "a membership change was charged"},
      {.name = "forget_ranks",
       .what = "a survivor takes any free rank",
       .from = "for _, offer in ipairs(chosen) do take(offer, offer.old_rank) end",
       .to = "",
       .symptom = "moves a node from group rank"},
      {.name = "free_restarts",
       .what = "the budget is not looked at",
       .from = "if num('restarts') >= num('max_restarts') then",
       .to = "if false then",
       .symptom = "the budget is"},
      {.name = "no_adoption",
       .what = "a server that lost its memory does not learn the generation from its clients",
       .from = "if seen > num('generation') then",
       .to = "if false then",
       .symptom = "was given generation"},
      {.name = "rank_twice",
       .what = "the first two nodes of a round get the same ranks",
       .from = "offer.first, offer.first_in_role = world, role_worlds[offer.role] or 0",
       .to = "offer.first, offer.first_in_role = math.max(0, world - 1), 0",
       .symptom = "has rank"},
      {.name = "never_reap",
       .what = "a node whose lease has run out stays",
       .from = "if row then miss(name, row, 'was lost') end",
       .to = "if row then redis.call('HSET', members, name, row) end",
       .symptom = "is still"},
      {.name = "reap_while_frozen",
       .what = "nodes are given up for lost when it was the store that was away",
       .from = "if not is_frozen() then\n    reap()",
       .to = "if true then\n    reap()",
       .symptom = "nothing happened to any node"},
  };
  return *kBugs;
}

const PlantedBug* FindPlantedBug(const std::string& name) {
  const auto found = std::find_if(PlantedBugs().begin(), PlantedBugs().end(),
                                  [&name](const PlantedBug& bug) { return bug.name == name; });
  return found == PlantedBugs().end() ? nullptr : &*found;
}

RendezvousScripts Plant(const PlantedBug& bug) {
  int planted = 0;
  RendezvousScripts scripts([&bug, &planted](ScriptName, std::string source) {
    planted += absl::StrReplaceAll({{bug.from, bug.to}}, &source);
    return source;
  });
  CHECK_GT(planted, 0) << "no script has the text that the bug " << bug.name << " replaces";
  return scripts;
}

}  // namespace ddp::testing
