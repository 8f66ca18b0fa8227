// Length: the faults, the checks and the nodes act on the same simulated world. A part would need
// access to all of it.

#include "testing/simulator/simulation.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "elastic/agent/job_result.h"
#include "store/redis/wire/redis_reply.h"
#include "testing/simulator/event_queue.h"
#include "testing/simulator/job_checker.h"
#include "testing/simulator/random.h"
#include "testing/simulator/recovery_bound.h"
#include "testing/simulator/simulated_node.h"
#include "testing/simulator/training_model.h"

namespace ddp::testing {

using elastic::JobEndReason;
using elastic::JobResult;

namespace {

constexpr int64_t kSecond = 1000000;
// Extra time for leases, heartbeats and retries, which the timeouts of a story do not include.
constexpr int64_t kSlackUs = 60 * kSecond;
constexpr int64_t kVanishUs = 3000;
constexpr int kNewcomers = 100;
// Longest time from a worker's end to the keeper's: it may be within the time for taking back a
// report, or later.
constexpr int64_t kKeeperEndsAfterUs = 80000;
// More than the events of 1,000 agents at one time.
constexpr int kEventsAtOnceMax = 200000;

const char* EndName(JobEndReason end) {
  switch (end) {
    case JobEndReason::kSucceeded:
      return "succeeded";
    case JobEndReason::kWorkerFailed:
      return "worker failed";
    case JobEndReason::kBudgetSpent:
      return "budget spent";
    case JobEndReason::kNoProgress:
      return "no progress";
    case JobEndReason::kClosed:
      return "closed";
    case JobEndReason::kRendezvousTimeout:
      return "rendezvous timeout";
    case JobEndReason::kStoreLost:
      return "store lost";
    case JobEndReason::kPreempted:
      return "preempted";
    case JobEndReason::kCannotStart:
      return "cannot start";
  }
  return "?";
}

}  // namespace

// Runs a story.
class Simulation {
 public:
  Simulation(const Story& story, const AgentCode& code, const Trace::Writer& trace)
      : story_(story),
        random_(story.seed ^ 0x5eed),
        trace_(&queue_, trace),
        store_(&queue_, random_.Fork(), story.network, &trace_,
               [this](const store::RedisReply& reply) { OnReply(reply); }),
        training_(&story_, &queue_, random_.Fork(), &trace_,
                  [this](const TrainingModel::Exit& exit) { OnWorkerExit(exit); }),
        code_(code) {}

  SimulationResult Run();

 private:
  void AddNode(int host, int nproc, int64_t at_us);
  void ComeBack(const SimulatedNode& node);
  SimulatedNode* Draw(bool sound_only);
  void Strike(const Fault& fault);
  void Hang(SimulatedNode& node);
  void StrikeNode(const Fault& fault);
  void LoseAgain(int host, int nproc, int64_t mean_us);
  void StrikeStore(const Fault& fault);
  void ForgetNextRound(const Fault& fault);
  void RestartStore(const Fault& fault, SimulatedStore::Memory memory);
  void OnReply(const store::RedisReply& reply);
  void OnWorkerExit(const TrainingModel::Exit& exit);
  void OnFinished(SimulatedNode& node);
  void CheckEnd(const SimulatedNode& node);
  void CheckEnoughForARound(const SimulatedNode& node);
  JobChecker& Checker(const std::string& job);
  bool AllOver() const;
  void Disturb();
  void OnStore(bool is_up);
  void CheckNowAndThen();
  void CheckRecovery();
  void CheckMedians();
  const std::string* Violation() const;
  void Mix(uint64_t value) { fingerprint_ = (fingerprint_ ^ value) * 0x100000001b3; }

  const Story story_;
  EventQueue queue_;
  Random random_;
  const Trace trace_;
  SimulatedStore store_;
  TrainingModel training_;
  const AgentCode& code_;

  std::map<std::string, std::unique_ptr<JobChecker>> checkers_;  // by the job's token
  std::vector<std::unique_ptr<SimulatedNode>> nodes_;
  int hosts_ = 0;
  int nodes_to_come_ = 0;
  int64_t store_sound_since_us_ = 0;
  bool memory_was_lost_ = false;
  bool node_was_in_trouble_ = false;
  int64_t disturbed_at_us_ = INT64_MIN / 2;
  int64_t last_fault_us_ = 0;  // includes faults that change no membership
  uint64_t swallowed_ = 0;
  uint64_t fingerprint_ = 0xcbf29ce484222325;
  SimulationResult result_;
};

JobChecker& Simulation::Checker(const std::string& job) {
  std::unique_ptr<JobChecker>& checker = checkers_[job];
  if (checker == nullptr) {
    checker = std::make_unique<JobChecker>(
        JobChecker::Limits{.min_nodes = story_.min_nodes,
                           .max_nodes = story_.max_nodes,
                           .max_restarts = story_.max_restarts,
                           .max_node_losses = story_.max_node_losses,
                           .node_unit = story_.node_unit,
                           .scale_up_delay_us = story_.scale_up_delay_us,
                           .way_us = WayUs(story_),
                           .ranks_are_wanted = story_.node_ranks,
                           .fencing_us = story_.lease_us + 3 * kSecond,
                           // Less than the story's, because a node's own clock drifts.
                           .kill_timeout_us = story_.kill_timeout_us * 99 / 100});
    checker->OnDisturbance(disturbed_at_us_);
    if (node_was_in_trouble_) checker->OnNodeInTrouble();
    checker->SetQuiet(
        story_.network.lose_request + story_.network.lose_reply + story_.network.swallow == 0);
  }
  return *checker;
}

const std::string* Simulation::Violation() const {
  for (const auto& [job, checker] : checkers_) {
    if (checker->violation().has_value()) return &*checker->violation();
  }
  return nullptr;
}

void Simulation::Disturb() {
  disturbed_at_us_ = last_fault_us_ = queue_.now_us();
  for (const auto& [job, checker] : checkers_) checker->OnDisturbance(queue_.now_us());
}

void Simulation::OnStore(bool is_up) {
  Disturb();
  if (is_up) store_sound_since_us_ = queue_.now_us();
  for (const auto& [job, checker] : checkers_) checker->OnStore(is_up, queue_.now_us());
}

void Simulation::CheckNowAndThen() {
  int running = 0;
  for (const auto& [job, checker] : checkers_) {
    checker->CheckOnlyOneRuns(queue_.now_us());
    running += checker->RunsInReach(queue_.now_us()) ? 1 : 0;
    if (running > 1 && story_.has_id) checker->Violate("two jobs of one run id run at once");
  }
  CheckRecovery();
  CheckMedians();
  queue_.After(kSecond, [this] { CheckNowAndThen(); });
}

// Checks that a generation runs, or the job ends, when enough nodes have been there for long
// without a fault.
void Simulation::CheckRecovery() {
  const int64_t now_us = queue_.now_us();
  // A swallowed message can delay recovery as much as a host that is cut off.
  if (std::exchange(swallowed_, store_.counts().swallowed) != store_.counts().swallowed) {
    last_fault_us_ = now_us;
  }
  if (!store_.up() || now_us - last_fault_us_ <= RecoveryBoundUs(story_, true)) return;
  struct Job {
    int nodes = 0;
    bool has_begun = true;
    int64_t well_until_us = 0;
  };
  std::map<std::string, Job> jobs;  // all nodes of one run id are one job
  for (const std::unique_ptr<SimulatedNode>& node : nodes_) {
    if (!node->is_sound() || node->is_leaving()) continue;
    Job& job = jobs[story_.has_id ? "" : node->job()];
    ++job.nodes;
    job.has_begun &= Checker(node->job()).generations() > 0;
  }
  for (const auto& [token, checker] : checkers_) {
    const auto found = jobs.find(story_.has_id ? "" : token);
    if (found == jobs.end()) continue;
    Job& job = found->second;
    job.well_until_us = std::max(job.well_until_us, checker->RanWellUntil(now_us));
  }
  for (const auto& [token, job] : jobs) {
    const int64_t since_us = now_us - std::max(last_fault_us_, job.well_until_us);
    const int64_t bound_us = RecoveryBoundUs(story_, job.has_begun);
    if (job.nodes < story_.min_nodes || since_us <= bound_us) continue;
    Checker(token).Violate(absl::StrCat("no generation runs, ", since_us / 1000,
                                        "ms after the last fault: at most ", bound_us / 1000,
                                        "ms are allowed; ", job.nodes, " nodes are there, ",
                                        story_.min_nodes, " are enough"));
  }
}

// Checks that every node knows the job's median busy time when no fault happened for long. A slow
// node learns from the median that it is slow.
void Simulation::CheckMedians() {
  const int64_t settled_us = 4 * story_.lease_us + 4 * kSecond;
  if (!story_.commits_steps || memory_was_lost_ || !store_.up() ||
      queue_.now_us() - last_fault_us_ < settled_us) {
    return;
  }
  std::map<std::string, std::vector<const SimulatedNode*>> jobs;
  for (const std::unique_ptr<SimulatedNode>& node : nodes_) {
    if (!node->is_alive()) continue;
    // A node waits or is ending, so the job has not settled.
    if (!node->is_sound() || node->state_name() != "running") return;
    if (node->stepping_for_us() < settled_us) return;
    jobs[node->job()].push_back(node.get());
  }
  for (const auto& [job, nodes] : jobs) {
    std::vector<int64_t> busy;
    for (const SimulatedNode* node : nodes) busy.push_back(node->busy_us());
    std::sort(busy.begin(), busy.end());
    const int64_t median_us = busy[(busy.size() - 1) / 2];
    for (const SimulatedNode* node : nodes) {
      if (node->median_busy_us() == median_us) continue;
      Checker(job).Violate(absl::StrCat(node->name(), " takes ", node->median_busy_us(),
                                        "us for the median of the job, which is ", median_us));
    }
  }
}

void Simulation::AddNode(int host, int nproc, int64_t at_us) {
  ++nodes_to_come_;
  queue_.At(at_us, [this, host, nproc] {
    --nodes_to_come_;
    const SimulatedNode::Identity identity = {.id = static_cast<int>(nodes_.size()),
                                              .host = host,
                                              .nproc = nproc,
                                              .can_start = host != story_.bad_host};
    const SimulatedNode::World world = {
        .story = &story_,
        .queue = &queue_,
        .store = &store_,
        .training = &training_,
        .code = &code_,
        .trace = &trace_,
        .checker = [this](const std::string& job) -> JobChecker& { return Checker(job); },
        .on_finished = [this](SimulatedNode& node) { OnFinished(node); }};
    nodes_.push_back(std::make_unique<SimulatedNode>(identity, world, random_.Fork()));
    if (trace_.on()) trace_.Add(nodes_.back()->name(), absl::StrCat("starts on host ", host));
    // A newcomer excuses no failure, except by a drain, which the checkers are told of.
    last_fault_us_ = queue_.now_us();
    nodes_.back()->Start();
  });
}

// Starts a lost agent again by chance, as a supervisor of its host would.
void Simulation::ComeBack(const SimulatedNode& node) {
  if (!random_.Chance(story_.comeback_chance)) return;
  const int64_t after_us = random_.Exponential(story_.comeback_mean_s * kSecond);
  AddNode(node.identity().host, node.identity().nproc, queue_.now_us() + after_us);
}

SimulatedNode* Simulation::Draw(bool sound_only) {
  std::vector<SimulatedNode*> candidates;
  for (const std::unique_ptr<SimulatedNode>& node : nodes_) {
    if (sound_only ? node->is_sound() : node->is_alive()) candidates.push_back(node.get());
  }
  if (candidates.empty()) return nullptr;
  return candidates[random_.Between(0, static_cast<int64_t>(candidates.size()) - 1)];
}

void Simulation::Strike(const Fault& fault) {
  switch (fault.kind) {
    case FaultKind::kStorePaused:
    case FaultKind::kStoreRestarted:
    case FaultKind::kStoreRolledBack:
    case FaultKind::kStoreWiped:
    case FaultKind::kStoreAway:
    case FaultKind::kRoundForgotten:
      return StrikeStore(fault);
    case FaultKind::kHostLostForever:
      if (const SimulatedNode* const node = Draw(/*sound_only=*/true); node != nullptr) {
        ++result_.faults[static_cast<int>(fault.kind)];
        LoseAgain(node->identity().host, node->identity().nproc, fault.duration_us);
      }
      return;
    case FaultKind::kNewcomers:
      ++result_.faults[static_cast<int>(fault.kind)];
      for (int i = 0; i < kNewcomers; ++i) {
        AddNode(hosts_++, static_cast<int>(random_.Between(1, story_.nproc_max)),
                queue_.now_us() + random_.Between(0, fault.duration_us));
      }
      return;
    case FaultKind::kNewcomer:
      ++result_.faults[static_cast<int>(fault.kind)];
      return AddNode(hosts_++, static_cast<int>(random_.Between(1, story_.nproc_max)),
                     queue_.now_us());
    default:
      return StrikeNode(fault);
  }
}

void Simulation::StrikeNode(const Fault& fault) {
  SimulatedNode* const node = Draw(fault.kind != FaultKind::kHostLost);
  if (node == nullptr) return;
  if (fault.kind == FaultKind::kWorkerCrash) {
    // A failure changes no membership, so it is no disturbance.
    if (training_.Crash(node->identity().id)) ++result_.faults[static_cast<int>(fault.kind)];
    last_fault_us_ = queue_.now_us();
    return;
  }
  if (fault.kind == FaultKind::kWorkerHangs) return Hang(*node);
  if (fault.kind == FaultKind::kFamilyKilled && !training_.Crash(node->identity().id)) return;
  if (fault.kind == FaultKind::kHostSlows) {
    ++result_.faults[static_cast<int>(fault.kind)];
    trace_.Add(node->name(), "*** gets slow");
    last_fault_us_ = queue_.now_us();
    return training_.Slow(node->identity().id, story_.slow_factor);
  }
  ++result_.faults[static_cast<int>(fault.kind)];
  trace_.Add(node->name(), absl::StrCat("*** ", FaultName(fault.kind)));
  node_was_in_trouble_ = true;
  for (const auto& [job, checker] : checkers_) checker->OnNodeInTrouble();
  Disturb();
  const auto later = [this, node, &fault](void (SimulatedNode::*end)()) {
    queue_.After(fault.duration_us, [this, node, end] {
      Disturb();
      if (node->is_alive()) trace_.Add(node->name(), "*** goes on");
      (node->*end)();
    });
  };
  switch (fault.kind) {
    case FaultKind::kAgentKilled:
    case FaultKind::kHostLost:
      node->Kill();
      return ComeBack(*node);
    case FaultKind::kFamilyKilled:
      for (const auto& [job, checker] : checkers_) checker->OnMayBeTakenBack();
      queue_.After(random_.Between(0, kKeeperEndsAfterUs), [node] { node->EndKeeper(); });
      return ComeBack(*node);
    case FaultKind::kAgentStopped:
      node->StopAgent();
      return later(&SimulatedNode::ContinueAgent);
    case FaultKind::kHostFrozen:
      node->Freeze();
      return later(&SimulatedNode::Thaw);
    case FaultKind::kCutOff:
      node->SetCutOff(true);
      queue_.After(fault.duration_us, [this, node] {
        Disturb();
        if (node->is_alive()) trace_.Add(node->name(), "*** goes on");
        node->SetCutOff(false);
      });
      return;
    case FaultKind::kAgentTerminated:
      return node->Terminate();
    default:
      return;
  }
}

// Ends the agent of the host, as the OOM killer ends a whole pod, and starts another one, again and
// again.
void Simulation::LoseAgain(int host, int nproc, int64_t mean_us) {
  node_was_in_trouble_ = true;
  for (const auto& [job, checker] : checkers_) checker->OnNodeInTrouble();
  Disturb();
  for (const std::unique_ptr<SimulatedNode>& node : nodes_) {
    if (node->identity().host != host || !node->is_alive()) continue;
    trace_.Add(node->name(), "*** is lost once more");
    node->Kill();
  }
  AddNode(host, nproc, queue_.now_us() + random_.Exponential(kSecond / 10));
  if (queue_.now_us() >= story_.faults_end_us) return;
  queue_.After(kSecond / 10 + random_.Exponential(mean_us),
               [=, this] { LoseAgain(host, nproc, mean_us); });
}

void Simulation::Hang(SimulatedNode& node) {
  if (story_.hang_floor_us == 0) return;
  const elastic::GenerationId* const generation = training_.Hang(node.identity().id);
  if (generation == nullptr) return;
  ++result_.faults[static_cast<int>(FaultKind::kWorkerHangs)];
  trace_.Add(node.name(), "*** a worker hangs");
  last_fault_us_ = queue_.now_us();
  Checker(node.job_of_workers()).OnHang(*generation, queue_.now_us());
}

void Simulation::StrikeStore(const Fault& fault) {
  if (!store_.up()) return;
  ++result_.faults[static_cast<int>(fault.kind)];
  trace_.Add("store", absl::StrCat("*** ", FaultName(fault.kind)));
  Disturb();
  switch (fault.kind) {
    case FaultKind::kStorePaused:
      store_.Pause();
      OnStore(false);
      queue_.After(fault.duration_us, [this] {
        trace_.Add("store", "*** goes on");
        OnStore(true);
        store_.Continue();
      });
      return;
    case FaultKind::kStoreRestarted:
    case FaultKind::kStoreAway:
      return RestartStore(fault, SimulatedStore::Memory::kAll);
    case FaultKind::kStoreWiped:
      return RestartStore(fault, SimulatedStore::Memory::kNothing);
    case FaultKind::kStoreRolledBack:
      store_.TakeSnapshot();
      queue_.After(random_.Between(1, kSecond), [this, fault] {
        if (store_.up()) RestartStore(fault, SimulatedStore::Memory::kSnapshot);
      });
      return;
    case FaultKind::kRoundForgotten:
      return ForgetNextRound(fault);
    default:
      return;
  }
}

// Makes the store forget the next round after other nodes may have fetched their placements.
void Simulation::ForgetNextRound(const Fault& fault) {
  const auto is_new_round = [this](const store::RedisReply& reply) {
    const auto parts = reply.AsArray();
    uint64_t number = 0;
    if (!parts.ok() || parts->size() < 3 || (*parts)[0].AsString().value_or("") != "round" ||
        !absl::SimpleAtoi((*parts)[1].AsString().value_or(""), &number)) {
      return false;
    }
    const elastic::GenerationId id = {number, (*parts)[2].AsString().value_or("")};
    return std::none_of(checkers_.begin(), checkers_.end(),
                        [&id](const auto& entry) { return entry.second->Knows(id); });
  };
  store_.TakeSnapshotBefore(is_new_round, [this, fault] {
    const double mean_us = story_.network.delay_mean_us + 500;
    queue_.After(random_.Exponential(4 * mean_us), [this, fault] {
      if (store_.up()) RestartStore(fault, SimulatedStore::Memory::kSnapshot);
    });
  });
}

void Simulation::RestartStore(const Fault& fault, SimulatedStore::Memory memory) {
  trace_.Add("store", "*** is down");
  store_.Kill();
  OnStore(false);
  queue_.After(fault.duration_us, [this, memory, jump_us = fault.clock_jump_us] {
    trace_.Add("store", "*** is back");
    if (memory != SimulatedStore::Memory::kAll) {
      memory_was_lost_ = true;
      for (const auto& [job, checker] : checkers_) checker->OnStoreLostMemory(queue_.now_us());
    }
    OnStore(true);
    store_.Start(memory, jump_us);
  });
}

void Simulation::OnReply(const store::RedisReply& reply) {
  Mix(static_cast<uint64_t>(queue_.now_us()));
  if (reply.IsError()) {
    Checker("").Violate(absl::StrCat("the store answers an error: ", reply.error_text()));
  }
}

void Simulation::OnWorkerExit(const TrainingModel::Exit& exit) {
  Mix(static_cast<uint64_t>(queue_.now_us() + exit.pid));
  SimulatedNode& node = *nodes_[exit.node];
  Checker(node.job_of_workers())
      .OnWorkerEnded(exit.node, exit.generation, exit.rank,
                     exit.by_itself ? JobChecker::Cause::kOwnFailure
                     : exit.hung    ? JobChecker::Cause::kHang
                                    : JobChecker::Cause::kOther,
                     queue_.now_us());
  queue_.After(kVanishUs, [this, exit] { nodes_[exit.node]->OnWorkerExit(exit); });
}

void Simulation::OnFinished(SimulatedNode& node) {
  const JobResult result = node.result();
  ++result_.ends[EndName(result.end)];
  Mix(static_cast<uint64_t>(queue_.now_us()) * 31 + static_cast<uint64_t>(result.end));
  // If the store forgets that this node has left, the node counts as lost.
  node_was_in_trouble_ = true;
  for (const auto& [job, checker] : checkers_) checker->OnNodeInTrouble();
  Disturb();
  CheckEnd(node);
  // A preempted host may come back.
  const bool may_come_back = queue_.now_us() < story_.faults_end_us;
  if (result.end == JobEndReason::kPreempted && may_come_back) ComeBack(node);
}

void Simulation::CheckEnd(const SimulatedNode& node) {
  const JobResult result = node.result();
  JobChecker& checker = Checker(node.job());
  const auto wrong = [&](const std::string& what) {
    checker.Violate(absl::StrCat(node.name(), " ended (", EndName(result.end), ": ", result.reason,
                                 "), though ", what));
  };
  switch (result.end) {
    case JobEndReason::kSucceeded:
      if (!training_.all_trained()) wrong("the work is not done");
      break;
    case JobEndReason::kPreempted:
      if (result_.faults[static_cast<int>(FaultKind::kAgentTerminated)] == 0) {
        wrong("nobody sent a signal");
      }
      break;
    case JobEndReason::kWorkerFailed:
      if (story_.max_restarts > 0) wrong("the job may restart");
      break;
    case JobEndReason::kBudgetSpent:
      if (absl::StrContains(result.reason, "--max-node-losses")) {
        // Each loss has ended a generation.
        if (!node_was_in_trouble_) wrong("no node was lost");
        if (!memory_was_lost_ && checker.generations() <= story_.max_node_losses) {
          wrong(absl::StrCat("there were only ", checker.generations(), " generations"));
        }
      } else if (!memory_was_lost_ && checker.charged() < story_.max_restarts) {
        wrong(absl::StrCat("only ", checker.charged(), " restarts were charged"));
      }
      break;
    case JobEndReason::kCannotStart:
      if (node.identity().can_start) wrong("its program can be started");
      break;
    case JobEndReason::kClosed:
      // A node that was away while the store was wiped and the job began again gets this end.
      if (story_.bad_host < 0 &&
          !(memory_was_lost_ && absl::StrContains(result.reason, "lost its memory"))) {
        wrong("nobody closed it");
      }
      break;
    case JobEndReason::kNoProgress:
      if (story_.no_progress_limit == 0 || !story_.commits_steps) wrong("nobody can know");
      if (!memory_was_lost_ && checker.generations() < story_.no_progress_limit) {
        wrong(absl::StrCat("there were only ", checker.generations(), " generations"));
      }
      break;
    case JobEndReason::kStoreLost:
      if (absl::StartsWith(result.reason, "the rendezvous was out of reach") &&
          queue_.now_us() - node.stepped_us() < story_.store_outage_timeout_us * 9 / 10) {
        wrong("its workers made steps");
      }
      CheckEnoughForARound(node);
      break;
    case JobEndReason::kRendezvousTimeout:
      CheckEnoughForARound(node);
      break;
  }
}

// Reports an agent that stopped waiting although no fault lasted and enough others were there.
void Simulation::CheckEnoughForARound(const SimulatedNode& node) {
  const int64_t waited_us = story_.rendezvous_timeout_us;
  const int64_t well_since_us =
      std::max({store_sound_since_us_, story_.faults_end_us, node.started_us()});
  if (!store_.up() || queue_.now_us() - well_since_us < waited_us + kSecond) return;
  int others = 0;
  for (const std::unique_ptr<SimulatedNode>& other : nodes_) {
    const bool was_there = other.get() == &node || other->is_sound();
    if (was_there && other->job() == node.job() &&
        other->started_us() + waited_us < queue_.now_us()) {
      ++others;
    }
  }
  if (others < story_.min_nodes) return;
  Checker(node.job())
      .Violate(absl::StrCat(node.name(), " gave up (", EndName(node.result().end), ": ",
                            node.result().reason, ") while ", others,
                            " agents were there for all of its wait; ", story_.min_nodes,
                            " are enough"));
}

bool Simulation::AllOver() const {
  if (nodes_to_come_ > 0 || queue_.now_us() < story_.faults_end_us) return false;
  return std::none_of(nodes_.begin(), nodes_.end(),
                      [](const auto& node) { return node->is_alive(); });
}

SimulationResult Simulation::Run() {
  hosts_ = story_.hosts;
  CheckNowAndThen();
  for (int host = 0; host < story_.hosts; ++host) {
    AddNode(host, static_cast<int>(random_.Between(1, story_.nproc_max)),
            random_.Between(0, story_.start_spread_us));
  }
  for (const Fault& fault : story_.faults) {
    queue_.At(fault.at_us, [this, &fault] { Strike(fault); });
  }
  queue_.At(story_.faults_end_us, [this] {
    trace_.Add("network", "*** is sound from now on");
    store_.Heal();
  });
  int64_t store_is_back_us = story_.faults_end_us;
  for (const Fault& fault : story_.faults) {
    store_is_back_us = std::max(store_is_back_us, fault.at_us + fault.duration_us);
  }
  const int64_t bound_us =
      store_is_back_us + 30 * kSecond + 2 * story_.rendezvous_timeout_us +
      static_cast<int64_t>(2 * story_.slow_factor * story_.training_s * kSecond) +
      story_.exit_barrier_timeout_us + 2 * story_.shutdown_timeout_us + kSlackUs;
  int64_t at_us = -1;
  int events_at_once = 0;
  while (Violation() == nullptr && !AllOver() && queue_.RunNext(bound_us)) {
    events_at_once = queue_.now_us() == at_us ? events_at_once + 1 : 0;
    at_us = queue_.now_us();
    if (events_at_once > kEventsAtOnceMax)
      Checker("").Violate("a core asks for time that stands still");
  }
  if (Violation() == nullptr && !AllOver()) {
    for (const std::unique_ptr<SimulatedNode>& node : nodes_) {
      if (!node->is_alive()) continue;
      Checker(node->job())
          .Violate(absl::StrCat(node->name(), " is still ", node->state_name(), " ",
                                (bound_us - store_is_back_us) / kSecond, "s after the last fault"));
      break;
    }
  }
  if (const std::string* violation = Violation()) result_.violation = *violation;
  for (const auto& [job, checker] : checkers_) {
    result_.generations += checker->generations();
    result_.charged += checker->charged();
  }
  result_.fingerprint = fingerprint_;
  result_.simulated_us = queue_.now_us();
  result_.events = queue_.events_run();
  result_.agents = static_cast<int>(nodes_.size());
  result_.messages = store_.counts();
  return result_;
}

SimulationResult Simulate(const Story& story, const AgentCode& code, const Trace::Writer& trace) {
  return Simulation(story, code, trace).Run();
}

}  // namespace ddp::testing
