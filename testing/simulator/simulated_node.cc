#include "testing/simulator/simulated_node.h"

#include <signal.h>

#include <algorithm>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "elastic/health/phase.h"

namespace ddp::testing {

using elastic::AgentCore;
using elastic::AgentEvent;
using elastic::News;
using elastic::RendezvousAnswer;
using elastic::Round;

namespace {

// Time from the keeper's end to the agent's, as in launcher/process/keeper.cc.
constexpr int64_t kLastWordUs = 500'000;

int64_t DrawSkew(const Story& story, Random& random) {
  return story.clock_skew_us == 0 ? 0 : random.Between(-story.clock_skew_us, story.clock_skew_us);
}

}  // namespace

SimulatedNode::SimulatedNode(const Identity& identity, const World& world, Random random)
    : identity_(identity),
      world_(world),
      name_(absl::StrCat("node ", identity.id)),
      process_(world.queue, DrawSkew(*world.story, random),
               world.story->clock_drift * (2 * random.Fraction() - 1)),
      tamper_(world.code->make_tamper ? world.code->make_tamper() : nullptr),
      core_(JobOf(*world.story), absl::StrCat("host-", identity.host)),
      rendezvous_({.name = absl::StrCat("host-", identity.host, "-", identity.id),
                   .host = absl::StrCat("host-", identity.host),
                   .story = world.story,
                   .process = &process_,
                   .store = world.store,
                   .scripts = &world.code->scripts,
                   .trace = world.trace,
                   .tamper = tamper_.get(),
                   .before_tick = [this] { Report(); },
                   .after_step = [this] { CheckDeadlines(); }},
                  random.Next()),
      hangs_(JobOf(*world.story).hangs),
      random_(random.Next()) {}

void SimulatedNode::Start() {
  started_us_ = world_.queue->now_us();
  rendezvous_.Watch([this](const News& news) {
    if (news.kind == News::Kind::kDrain) {
      const bool stops_at_a_step = world_.story->stop_aware_chance == 1 && news.stop_at_step >= 0;
      const int64_t window_us = stops_at_a_step ? world_.story->shutdown_timeout_us / 2 : 0;
      const int64_t now_us = world_.queue->now_us();
      // A failure may be on its way to the store when the drain begins there.
      const int64_t way_us = WayUs(*world_.story);
      const bool for_newcomers = absl::StrContains(news.cause, " join");
      world_.checker(job()).OnDrain(news.generation, for_newcomers, now_us + window_us - way_us,
                                    now_us);
    }
    CheckNoSpare(news);
    Post(elastic::NewsEvent{news});
  });
  Post(elastic::StartEvent{});
}

// Checks that a full job without an id takes no spare.
void SimulatedNode::CheckNoSpare(const News& news) {
  if (world_.story->has_id || news.kind != News::Kind::kWaiting) return;
  if (!absl::StrContains(news.cause, "as a spare: all ") &&
      !absl::StrContains(news.cause, "as a spare: the only seat")) {
    return;
  }
  world_.checker(job()).Violate(absl::StrCat(name_, " waits ", news.cause, ", without a run id"));
}

bool SimulatedNode::is_leaving() const {
  const std::string state = state_name();
  return state == "shutting down" || state == "leaving" || state == "finished";
}

void SimulatedNode::OnWorkerExit(const TrainingModel::Exit& exit) {
  if (exit.with_its_node) return;
  process_.Deliver([this, exit] {
    hangs_.Forget(exit.local_rank);
    pages_.erase(exit.local_rank);
    elastic::WorkerExitedEvent event;
    event.local_rank = exit.local_rank;
    event.pid = exit.pid;
    event.status = exit.status;
    event.is_victim = exit.is_victim;
    event.stopped_as_asked = exit.stopped_as_asked;
    event.is_unprompted = exit.is_unprompted;
    if (world_.story->commits_steps) highest_step_ = std::max(highest_step_, exit.step);
    Post(event);
  });
}

// The core, used as in elastic/agent/agent.cc. ----------------------------------------------------

void SimulatedNode::Post(AgentEvent event) {
  events_.push_back(std::move(event));
  if (std::exchange(stepping_, true)) return;
  while (!events_.empty() && !finished_ && is_alive()) {
    AgentEvent next = std::move(events_.front());
    events_.pop_front();
    Take(std::move(next));
  }
  stepping_ = false;
  ArmDeadline();
  CheckDeadlines();
}

void SimulatedNode::Take(AgentEvent event) {
  AgentCore::Decision decision;
  if (tamper_ == nullptr || tamper_->TellsAgent(event)) {
    decision = core_.Step(event, process_.now());
  }
  std::vector<AgentEvent> more;
  if (tamper_ != nullptr) tamper_->AfterAgent(decision.actions, more);
  if (world_.trace->on()) {
    if (!decision.reason.empty()) world_.trace->Add(name_, decision.reason);
    for (const elastic::AgentAction& action : decision.actions) {
      world_.trace->Add(name_, absl::StrCat("-> ", elastic::DebugString(action)));
    }
  }
  for (const elastic::AgentAction& action : decision.actions) {
    std::visit([this](const auto& a) { Do(a); }, action);
  }
  events_.insert(events_.end(), more.begin(), more.end());
}

void SimulatedNode::ArmDeadline() {
  if (core_.next_deadline() == armed_deadline_ || finished_) return;
  armed_deadline_ = core_.next_deadline();
  const uint64_t serial = ++timer_serial_;
  if (armed_deadline_ == absl::InfiniteFuture()) return;
  process_.DeliverAt(armed_deadline_, [this, serial] {
    if (serial != timer_serial_) return;
    armed_deadline_ = absl::InfiniteFuture();
    Post(elastic::TickEvent{});
  });
}

// Checks that the node does not wait without a deadline: one of the cores must have one. Only the
// end of a process by SIGKILL needs no deadline.
void SimulatedNode::CheckDeadlines() {
  const bool kills = kill_sent_ && core_.has_workers();
  if (!is_alive()) return;
  if (finished_ || stepping_ || rendezvous_.is_stepping() || kills) return;
  const absl::Time next = std::min(core_.next_deadline(), rendezvous_.next_deadline());
  if (next == absl::InfiniteFuture()) {
    world_.checker(job()).Violate(
        absl::StrCat(name_, " is ", core_.state_name(), " and waits without a deadline"));
  }
}

// Checks for hangs as elastic/agent/worker_group.cc does, until the workers are asked to stop.
void SimulatedNode::Look() {
  const absl::Time now = absl::FromUnixMicros(world_.queue->now_us());
  for (auto& [local_rank, page] : pages_) {
    page = world_.training->Page(identity_.id, local_rank).value_or(page);
    hangs_.Observe(local_rank, page, now);
  }
  const std::optional<elastic::RankAtWork> work = rendezvous_.at_work();
  const int local_rank = work.has_value() ? work->rank - round_.placement.first_rank : -1;
  hangs_.SetOthersAtWork(work.has_value() && (local_rank < 0 || local_rank >= identity_.nproc),
                         now);
  if (const auto hang = hangs_.Check(now); hang.has_value()) {
    ++look_serial_;
    if (!world_.store->up()) {
      world_.checker(job_of_workers_).OnHangWithoutStore(round_.generation);
    }
    elastic::WorkerHungEvent event;
    event.local_rank = hang->local_rank;
    event.what = DescribeHang(*hang);
    event.is_victim = hang->waits_for_peers;
    return Post(event);
  }
  if (pages_.empty()) return;
  world_.queue->After(world_.story->hang_floor_us / 4, [this, serial = look_serial_] {
    process_.Deliver([this, serial] {
      if (serial == look_serial_) Look();
    });
  });
}

void SimulatedNode::Report() {
  elastic::NodeReport report;
  report.step = world_.story->commits_steps ? world_.training->step(identity_.id) : -1;
  if (report.step > highest_step_) {
    stepped_us_ = world_.queue->now_us();
    Post(elastic::StepEvent{absl::Microseconds(busy_us())});
    // Workers that poll for requests to stop end at the common step.
    if (is_stopping_ && world_.story->stop_aware_chance == 1) Post(elastic::ProgressEvent{});
  }
  highest_step_ = std::max(highest_step_, report.step);
  if (report.step >= 0 && stepping_since_us_ < 0) stepping_since_us_ = world_.queue->now_us();
  report.steps_per_second = report.step >= 0 ? world_.training->steps_per_second() : 0;
  report.busy_us = report.step >= 0 ? world_.training->busy_us(identity_.id) : -1;
  report.max_world_size = world_.story->max_world;
  if (const auto work = hangs_.FindAtWork(absl::FromUnixMicros(world_.queue->now_us()));
      work.has_value() && !is_stopping_ && pages_.contains(work->local_rank)) {
    report.at_work = elastic::RankAtWork{.rank = round_.placement.first_rank + work->local_rank,
                                         .phase = std::string(elastic::PhaseName(work->phase)),
                                         .stalled_for = work->stalled_for};
  }
  rendezvous_.SetReport(report);
}

// Actions of the core. ----------------------------------------------------------------------------

elastic::NodeOffer SimulatedNode::Offer() const {
  const std::string host = absl::StrCat("host-", identity_.host);
  return {.nproc = identity_.nproc,
          .role = "default",
          .host = host,
          .master_addr = host,
          .master_port = 10000 + identity_.id % 50000,
          .node_rank = world_.story->node_ranks ? identity_.host : -1};
}

// Adds to a request what AgentCore does not know, as elastic/agent/agent.cc does.
void SimulatedNode::Do(const elastic::RequestAction& action) {
  elastic::RendezvousRequest request = action.request;
  if (auto* const join = std::get_if<elastic::JoinRequest>(&request)) {
    joined_us_ = world_.queue->now_us();
    join->offer = Offer();
  } else if (auto* const failure = std::get_if<elastic::FailureRequest>(&request)) {
    Report();
    failure->step = highest_step_;
    failure->progress_known = world_.story->commits_steps;
  } else if (std::holds_alternative<elastic::DrainRequest>(request)) {
    Report();
  }
  rendezvous_.Ask(request, action.timeout, [this, request](const RendezvousAnswer& answer) {
    if (answer.ok() && std::holds_alternative<Round>(*answer)) OnRound(std::get<Round>(*answer));
    Post(elastic::AnsweredEvent{request, answer});
  });
}

void SimulatedNode::OnRound(const Round& round) {
  round_ = round;
  job_of_workers_ = job();
  highest_step_ = -1;
  stepping_since_us_ = -1;
  TellContact();
  world_.checker(job()).OnRound(identity_.id, round_, Offer(), world_.queue->now_us(), joined_us_);
}

// Starts the workers as elastic/agent/worker_group.cc does: one after the other. A start may be
// slow.
void SimulatedNode::Do(const elastic::StartWorkersAction&) {
  kill_sent_ = false;
  ++strays_serial_;  // a start ends the killing of strays
  started_.emplace();
  if (!identity_.can_start) return EndStart(absl::NotFoundError("no such program"));
  StartNext();
}

void SimulatedNode::StartNext() {
  const auto local_rank = static_cast<int>(started_->size());
  if (local_rank == identity_.nproc) return EndStart(absl::OkStatus());
  const Story& story = *world_.story;
  After(story.slow_exec_chance, story.slow_exec_us, [this, serial = start_serial_, local_rank] {
    if (serial != start_serial_) return;  // the start was cancelled
    world_.checker(job()).OnWorkerStarted(identity_.id, round_.generation,
                                          round_.placement.first_rank + local_rank,
                                          world_.queue->now_us());
    world_.training->Start(identity_.id, local_rank, round_);
    started_->push_back(local_rank);
    pages_[local_rank] = {};
    StartNext();
  });
}

void SimulatedNode::EndStart(const absl::Status& status) {
  ++start_serial_;
  is_stopping_ = false;
  elastic::WorkersStartedEvent event;
  event.status = status;
  event.started = *std::exchange(started_, std::nullopt);
  if (event.started.size() == static_cast<size_t>(identity_.nproc)) {
    ++look_serial_;
    hangs_.Begin(absl::FromUnixMicros(world_.queue->now_us()), round_.placement.group_world_size);
    if (world_.story->hang_floor_us > 0) Look();
  }
  Post(event);
}

void SimulatedNode::CutStart(const std::vector<int>& local_ranks) {
  if (!started_.has_value()) return;
  const auto begun = static_cast<int>(started_->size());
  const bool cut = std::any_of(local_ranks.begin(), local_ranks.end(),
                               [begun](int local_rank) { return local_rank >= begun; });
  if (cut) EndStart(absl::OkStatus());
}

// Runs `what` now or, by chance, later; never when the agent has ended by then.
void SimulatedNode::After(double chance, int64_t most_us, std::function<void()> what) {
  const bool may_be_slow = world_.queue->now_us() < world_.story->faults_end_us;
  if (chance == 0 || !may_be_slow || !random_.Chance(chance)) return what();
  world_.queue->After(random_.Between(1, most_us),
                      [this, what = std::move(what)] { process_.Deliver(what); });
}

void SimulatedNode::Do(const elastic::KillStraysAction&) {
  const Story& story = *world_.story;
  JobChecker& checker = world_.checker(job_of_workers_);
  checker.OnStrays(identity_.id, true, world_.queue->now_us());
  After(story.slow_stray_chance, story.slow_stray_us, [this, &checker, serial = ++strays_serial_] {
    checker.OnStrays(identity_.id, false, world_.queue->now_us());
    if (serial == strays_serial_) Post(elastic::StraysGoneEvent{});
  });
}

void SimulatedNode::Do(const elastic::SignalWorkersAction& action) {
  ++look_serial_;
  if (action.signal == SIGKILL) kill_sent_ = true;
  for (const int local_rank : action.local_ranks) {
    world_.training->Signal(identity_.id, local_rank, action.signal);
  }
  CutStart(action.local_ranks);
}

void SimulatedNode::Do(const elastic::StopWorkersAction& action) {
  ++look_serial_;
  is_stopping_ = true;
  world_.training->Stop(identity_.id, action.local_ranks, action.stop_at_step, action.signal);
  CutStart(action.local_ranks);
}

void SimulatedNode::Do(const elastic::FinishAction& action) {
  finished_ = true;
  if (world_.trace->on()) {
    world_.trace->Add(
        name_, absl::StrCat("ends with code ", action.exit_code, ": ", core_.result().reason));
  }
  rendezvous_.End();
  world_.training->Vanish(identity_.id);
  process_.End();
  world_.on_finished(*this);
}

// Faults. -----------------------------------------------------------------------------------------

void SimulatedNode::TellContact() {
  const bool in_contact = is_alive() && !process_.is_stopped() && !cut_off_;
  world_.checker(job()).OnContact(identity_.id, in_contact, world_.queue->now_us());
}

void SimulatedNode::Kill() {
  rendezvous_.End();
  process_.End();
  world_.training->Vanish(identity_.id);
  TellContact();
}

void SimulatedNode::EndKeeper() {
  if (!is_alive()) return;
  process_.Deliver([this] { Post(elastic::KeeperGoneEvent{}); });
  world_.queue->After(kLastWordUs, [this] {
    if (is_alive()) Kill();
  });
}

void SimulatedNode::StopAgent() {
  process_.Stop();
  TellContact();
}

void SimulatedNode::ContinueAgent() {
  if (!is_alive()) return;
  process_.Continue();
  TellContact();
}

void SimulatedNode::Freeze() {
  StopAgent();
  world_.training->Freeze(identity_.id);
}

void SimulatedNode::Thaw() {
  if (!is_alive()) return;
  world_.training->Thaw(identity_.id);
  ContinueAgent();
}

void SimulatedNode::SetCutOff(bool cut_off) {
  if (!is_alive()) return;
  cut_off_ = cut_off;
  rendezvous_.SetCutOff(cut_off);
  TellContact();
}

void SimulatedNode::Terminate() {
  process_.Deliver([this] { Post(elastic::SignalEvent{SIGTERM}); });
}

}  // namespace ddp::testing
