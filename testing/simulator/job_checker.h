#ifndef DDP_TESTING_SIMULATOR_JOB_CHECKER_H_
#define DDP_TESTING_SIMULATOR_JOB_CHECKER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "elastic/rendezvous/round.h"

namespace ddp::testing {

// Watches a job from above, where everything is known at once, and says what must never be seen:
//
//   * two generations that run whole at one time, each reachable by the store
//   * a generation number that a node sees again or sees go back; one number with two nonces,
//     unless the store lost its memory between
//   * a node that got something else than it had offered
//   * in a generation: a rank twice, a rank missing, ranks of a node apart, two opinions on the
//     size of the world, the restarts, the reason or the master
//   * a survivor whose group rank is in range and moved
//   * fewer nodes than MIN, more than MAX, more restarts than the budget
//   * a restart that is charged when no worker failed by itself, or is not when one did and nothing
//     else happened
//   * a node given up for lost, or workers stopped, where nothing happened to any node, whatever
//     happened to the store
//   * workers of two generations on one node, or one's while what another's left behind is killed
//
// A node is one life of an agent: one that starts anew is another node. Thread-compatible.
class JobChecker {
 public:
  using NodeId = int;
  struct Limits {
    int min_nodes = 1;
    int max_nodes = 1;
    int max_restarts = 0;
    bool ranks_are_wanted = false;  // by their numbers: then a survivor may move
    // For how long a node may be in contact with the store and run a generation that is over.
    int64_t fencing_us = 2000000;
    // For how long a node waits at least for what workers left behind.
    int64_t kill_timeout_us = 0;
  };

  explicit JobChecker(const Limits& limits) : limits_(limits) {}

  // The first thing that must not be: one line. None so far: nothing.
  const std::optional<std::string>& violation() const { return violation_; }
  void Violate(const std::string& what);

  // Facts, in the order in which they happen.
  void OnRound(NodeId node, const elastic::Round& round, const elastic::NodeOffer& offer,
               int64_t now_us);
  void OnWorkerStarted(NodeId node, const elastic::GenerationId& generation, int rank,
                       int64_t now_us);
  // What a node's workers left behind is being killed, is gone.
  void OnStrays(NodeId node, bool are_left, int64_t now_us) {
    nodes_[node].strays_since_us = are_left ? now_us : -1;
  }
  enum class Cause {
    kOwnFailure,  // nothing else made it fail
    kOther,       // asked to end, finished, or failed because a peer or its host was gone
  };
  void OnWorkerEnded(NodeId node, const elastic::GenerationId& generation, int rank, Cause cause,
                     int64_t now_us);

  // A node was told that all of this generation are about to stop; that a worker makes no progress.
  void OnDrain(const elastic::GenerationId& generation) { At(generation).is_draining = true; }
  void OnHang(const elastic::GenerationId& generation, int64_t now_us) {
    ran_well_until_us_ = RanWellUntil(now_us);
    At(generation).hangs = true;
  }

  // Something happened by which membership may change or failures may go unseen: a node died, left,
  // came, was stopped or cut off. Restarts of now may be free.
  void OnDisturbance(int64_t now_us) { disturbed_at_us_ = now_us; }
  // A charge may be given back, so that the restarts of the job may be one more.
  void OnMayBeTakenBack() { ++may_be_taken_back_; }
  // Something happened to a node: from now on nodes may be lost.
  void OnNodeInTrouble() { nodes_are_sound_ = false; }
  // The store forgot something: numbers may repeat with another nonce, restarts may be lost.
  void OnStoreLostMemory(int64_t now_us) {
    ++memory_losses_;
    OnDisturbance(now_us);
  }
  // Now and then: whether two generations have run whole for too long.
  void CheckOnlyOneRuns(int64_t now_us);
  // Whether one runs whole, for long and in reach of the store.
  bool RunsInReach(int64_t now_us);
  // The last time at which one ran whole, got on, and had all of its nodes in contact with the
  // store.
  int64_t RanWellUntil(int64_t now_us) const;
  // The store is there for those that can hear it; from now on, where it was not.
  void OnStore(bool is_up, int64_t now_us);
  // Whether the node can hear the store.
  void OnContact(NodeId node, bool in_contact, int64_t now_us);

  // Whether messages arrive: then no membership changes unseen from here.
  void SetQuiet(bool is_quiet) { is_quiet_ = is_quiet; }

  // Whether a node was told of this generation.
  bool Knows(const elastic::GenerationId& generation) const {
    return generations_.contains({generation.number, generation.nonce});
  }

  // What the story's report counts.
  int generations() const { return static_cast<int>(generations_.size()); }
  int charged() const { return charged_; }

 private:
  struct Member {
    NodeId node = -1;
    int first_rank = 0;
    int local_world_size = 0;
  };
  struct Generation {
    elastic::Round round;           // as the first node told it
    std::map<int, Member> members;  // by group rank, as far as they have told
    std::map<int, NodeId> running;  // rank -> node
    int ranks_known = 0;
    int own_failures = 0;
    bool is_draining = false;
    bool hangs = false;
    int64_t started_us = 0;
    int memory_losses_at_start = 0;
    int64_t whole_since_us = -1;  // -1: it is not whole
  };
  struct Node {
    uint64_t generation = 0;  // the last it was told
    std::string nonce;
    int group_rank = -1;
    int memory_losses = 0;  // when it was told
    int living_workers = 0;
    int64_t strays_since_us = -1;  // -1: there are none
    elastic::GenerationId of_workers;
    bool in_contact = true;
    int64_t in_contact_since_us = 0;
  };
  using Key = std::pair<uint64_t, std::string>;

  Generation& At(const elastic::GenerationId& id) { return generations_[{id.number, id.nonce}]; }
  void CheckAgreement(const elastic::Round& told, const elastic::Round& known);
  void CheckMembers(const Generation& generation);
  void CheckSequence(Node& node, const elastic::Round& round);
  void CheckReason(const Generation& generation);
  void CheckBudget(const Generation& generation);
  bool HearsTheStore(const Generation& generation, int64_t now_us);
  bool RunsWell(const Generation& generation) const;
  const Generation* Before(const Generation& generation) const;

  const Limits limits_;
  std::optional<std::string> violation_;
  std::map<Key, Generation> generations_;
  std::map<NodeId, Node> nodes_;
  std::vector<Key> whole_;  // that run whole now
  int64_t ran_well_until_us_ = INT64_MIN / 2;
  bool is_quiet_ = true;
  bool nodes_are_sound_ = true;
  int charged_ = 0;
  int may_be_taken_back_ = 0;
  int64_t disturbed_at_us_ = INT64_MIN / 2;
  int memory_losses_ = 0;
  bool store_is_up_ = true;
  int64_t store_since_us_ = INT64_MIN / 2;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_JOB_CHECKER_H_
