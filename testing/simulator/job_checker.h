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

// Checks the invariants of a job. The simulation reports every fact of the job to it, and the
// checker finds a violation:
//
//   * two generations run whole at one time, although a node of the earlier one reaches the store
//   * a node sees a generation number again, or a lower one; a number has two nonces, unless the
//     store lost its memory in between
//   * a node gets a placement that does not match its offer
//   * in a generation, a rank is there twice or not at all, the ranks of a node are not contiguous,
//     or nodes differ on the world size, the restarts, the reason, the master or the store
//   * a survivor gets another group rank, though its own is in range
//   * there are fewer nodes than MIN, more than MAX, or more restarts or losses than their budgets
//   * a restart is charged although no worker failed by itself; or it is free although a worker did
//     and nothing else happened
//   * a node counts as lost, or workers are stopped, although no fault hit a node, only the store
//   * the number of nodes is no multiple of the unit
//   * a generation is drained for newcomers sooner after one of them came than the time for further
//     ones, though there are free seats
//   * workers of two generations are on one node, or workers start while strays are being killed
//
// "Runs whole" means that every rank of the generation runs. A node is one life of an agent: an
// agent that is restarted is another node. Thread-compatible.
class JobChecker {
 public:
  using NodeId = int;
  struct Limits {
    int min_nodes = 1;
    int max_nodes = 1;
    int max_restarts = 0;
    int max_node_losses = 1000;
    int node_unit = 1;
    int64_t scale_up_delay_us = 0;  // 0: not checked
    int64_t way_us = 0;             // a request reaches the store within it
    bool ranks_are_wanted = false;  // nodes ask for group ranks, so a survivor may move
    // Longest time for which a node in contact with the store may run a generation that is over.
    int64_t fencing_us = 2000000;
    // Shortest time for which a node waits for strays (processes that workers left behind).
    int64_t kill_timeout_us = 0;
  };

  explicit JobChecker(const Limits& limits) : limits_(limits) {}

  // The first violation, as one line, or nullopt.
  const std::optional<std::string>& violation() const { return violation_; }
  void Violate(const std::string& what);

  // The following calls report facts, in the order in which they happen.
  // `joined_us`: when the node began to wait for the round; -1: unknown.
  void OnRound(NodeId node, const elastic::Round& round, const elastic::NodeOffer& offer,
               int64_t now_us, int64_t joined_us = -1);
  void OnWorkerStarted(NodeId node, const elastic::GenerationId& generation, int rank,
                       int64_t now_us);
  // The node is killing strays (`are_left`), or all of them have ended.
  void OnStrays(NodeId node, bool are_left, int64_t now_us) {
    nodes_[node].strays_since_us = are_left ? now_us : -1;
  }
  enum class Cause {
    kOwnFailure,  // the worker failed by itself
    kHang,        // the worker hung, and was ended
    kOther,       // was asked to end, finished, or failed because a peer or its host was gone
  };
  void OnWorkerEnded(NodeId node, const elastic::GenerationId& generation, int rank, Cause cause,
                     int64_t now_us);

  // A node was told that all nodes of the generation will stop (OnDrain), or that a worker makes no
  // progress (OnHang). The drain, for newcomers or for a node that leaves, excuses failures from
  // `excuses_from_us` on.
  void OnDrain(const elastic::GenerationId& generation, bool for_newcomers, int64_t excuses_from_us,
               int64_t now_us) {
    if (std::exchange(At(generation).is_draining, true)) return;
    At(generation).excuses_from_us = excuses_from_us;
    if (for_newcomers) At(generation).drained_for_newcomers_us = now_us;
  }
  void OnHang(const elastic::GenerationId& generation, int64_t now_us) {
    ran_well_until_us_ = RanWellUntil(now_us);
    At(generation).hangs = true;
  }

  // A worker of the generation waits too long for a peer while no store can tell whether the peer's
  // host is lost: the end of the generation may be charged or free.
  void OnHangWithoutStore(const elastic::GenerationId& generation) {
    ++At(generation).without_store;
  }

  // A node died, left, was stopped or was cut off. Membership may change and failures may go
  // unseen, so restarts at this time may be free.
  void OnDisturbance(int64_t now_us) { disturbed_at_us_ = now_us; }
  // A charge may be given back, so the job may have one restart more.
  void OnMayBeTakenBack() { ++may_be_taken_back_; }
  // A fault hit a node: from now on nodes may be lost.
  void OnNodeInTrouble() { nodes_are_sound_ = false; }
  // The store lost data: numbers may repeat with another nonce, and restarts may be lost.
  void OnStoreLostMemory(int64_t now_us) {
    ++memory_losses_;
    OnDisturbance(now_us);
  }
  // Checks that no two generations have run whole for too long. To be called periodically.
  void CheckOnlyOneRuns(int64_t now_us);
  // Returns true when a generation has run whole for fencing_us, within reach of the store.
  bool RunsInReach(int64_t now_us);
  // Returns the last time at which a generation ran whole, did not hang, and had all of its nodes
  // in contact with the store.
  int64_t RanWellUntil(int64_t now_us) const;
  // The store came up, or went down.
  void OnStore(bool is_up, int64_t now_us);
  // The node got into contact with the store, or lost it.
  void OnContact(NodeId node, bool in_contact, int64_t now_us);

  // Says whether the network loses no message. Only then is every membership change reported here,
  // and some checks are stricter. Default: true.
  void SetQuiet(bool is_quiet) { is_quiet_ = is_quiet; }

  // Returns true when a node was told of this generation.
  bool Knows(const elastic::GenerationId& generation) const {
    return generations_.contains({generation.number, generation.nonce});
  }

  // Counts for the report of the story.
  int generations() const { return static_cast<int>(generations_.size()); }
  int charged() const { return charged_; }

 private:
  struct Member {
    NodeId node = -1;
    int first_rank = 0;
    int local_world_size = 0;
  };
  struct Generation {
    elastic::Round round;           // as the first node reported it
    std::map<int, Member> members;  // by group rank, of the nodes that have reported it
    std::map<int, NodeId> running;  // rank -> node
    int ranks_known = 0;
    // Workers that failed by themselves: when they did, how many hung, and how many while no store
    // could tell whether they failed.
    std::vector<int64_t> failed_us;
    int hung = 0;
    int without_store = 0;
    bool is_draining = false;
    int64_t excuses_from_us = INT64_MAX;           // see OnDrain
    int64_t drained_for_newcomers_us = INT64_MAX;  // when a node was told so
    bool hangs = false;
    bool has_failed() const { return !failed_us.empty() || hung + without_store > 0; }
    bool has_failed_without_excuse() const;
    int64_t started_us = 0;
    int memory_losses_at_start = 0;
    int64_t whole_since_us = -1;  // -1 when it does not run whole
  };
  struct Node {
    uint64_t generation = 0;  // the last one that it was told
    std::string nonce;
    int group_rank = -1;
    int memory_losses = 0;  // at that time
    int living_workers = 0;
    int64_t strays_since_us = -1;  // -1 for none
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
  void CheckBudget(const Generation& generation, int64_t now_us);
  void CheckGathering(const Generation& generation, const elastic::NodeOffer& offer,
                      int64_t joined_us);
  bool HearsTheStore(const Generation& generation, int64_t now_us);
  bool RunsWell(const Generation& generation) const;
  const Generation* Before(const Generation& generation) const;

  const Limits limits_;
  std::optional<std::string> violation_;
  std::map<Key, Generation> generations_;
  std::map<NodeId, Node> nodes_;
  std::vector<Key> whole_;  // generations that run whole now
  int64_t ran_well_until_us_ = INT64_MIN / 2;
  bool is_quiet_ = true;
  bool nodes_are_sound_ = true;
  int charged_ = 0;
  int losses_ = 0;  // generations that ended because a node was lost
  int may_be_taken_back_ = 0;
  int64_t disturbed_at_us_ = INT64_MIN / 2;
  int memory_losses_ = 0;
  bool store_is_up_ = true;
  int64_t store_since_us_ = INT64_MIN / 2;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_JOB_CHECKER_H_
