#include "elastic/agent/node_status_tracker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp::elastic {
namespace {

// The window of a speed: long enough to smooth out single steps, short enough to show a change.
constexpr absl::Duration kSpeedWindow = absl::Seconds(20);
// Bounds the counts: a worker may write any number into its page.
constexpr int64_t kFailedSavesMax = int64_t{1} << 40;
// Minimal distance of the kept commits.
constexpr absl::Duration kCommitSpacing = absl::Seconds(1);

}  // namespace

NodeStatusTracker::NodeStatusTracker(Identity identity) : identity_(std::move(identity)) {}

void NodeStatusTracker::BeginGeneration(Generation generation) {
  generation_ = std::move(generation);
  failed_saves_before_ = FailedSaves();
  workers_.clear();
}

void NodeStatusTracker::WorkerStarted(int local_rank, int rank, pid_t pid, absl::Time now) {
  Worker worker;
  worker.rank = rank;
  worker.pid = pid;
  worker.started = now;
  workers_[local_rank] = std::move(worker);
}

void NodeStatusTracker::WorkerEnded(int local_rank) {
  const auto found = workers_.find(local_rank);
  if (found == workers_.end()) return;
  found->second.pid = 0;
  found->second.phase.clear();
  found->second.straggler_factor = -1;
}

void NodeStatusTracker::Observe(int local_rank, const Progress& progress, absl::Time now) {
  const auto found = workers_.find(local_rank);
  if (found == workers_.end() || found->second.pid == 0) return;
  Worker& worker = found->second;
  worker.phase = progress.phase;
  if (progress.failed_saves > worker.failed_saves) save_error_ = progress.save_error;
  worker.failed_saves = progress.failed_saves;
  worker.failed_saves_in_a_row = progress.failed_saves_in_a_row;
  if (progress.step < 0) return;
  std::deque<Commit>& commits = worker.commits;
  Commit commit{progress.step, absl::FromUnixNanos(progress.commit_monotonic_ns)};
  // The worker writes its page, so its stamps are not trusted.
  const absl::Time earliest = commits.empty() ? worker.started : commits.back().at;
  commit.at = std::clamp(commit.at, earliest, std::max(earliest, now));
  if (!commits.empty() && commit.step == commits.back().step) return;
  // A step that goes back (an older checkpoint was loaded) restarts the measurement of the speed.
  if (!commits.empty() && commit.step < commits.back().step) commits.clear();
  const size_t size = commits.size();
  if (size >= 2 && commits[size - 1].at - commits[size - 2].at < kCommitSpacing) commits.pop_back();
  commits.push_back(commit);
  while (commits.size() > 2 && commit.at - commits[1].at > kSpeedWindow) commits.pop_front();
}

void NodeStatusTracker::SetStragglerFactor(int local_rank, double factor) {
  const auto found = workers_.find(local_rank);
  if (found == workers_.end() || found->second.pid == 0) return;
  found->second.straggler_factor = factor;
}

void NodeStatusTracker::StoreOutOfReach() {
  if (std::exchange(store_in_reach_, false)) ++store_outages_;
}

int64_t NodeStatusTracker::highest_step() const {
  int64_t highest = -1;
  for (const auto& [local_rank, worker] : workers_) {
    if (!worker.commits.empty()) highest = std::max(highest, worker.commits.back().step);
  }
  return highest;
}

// Ranks save together, so the rank with the most failures counts for the node.
int64_t NodeStatusTracker::FailedSaves() const {
  int64_t most = 0;
  for (const auto& [local_rank, worker] : workers_) most = std::max(most, worker.failed_saves);
  return std::min(failed_saves_before_ + std::min(most, kFailedSavesMax), kFailedSavesMax);
}

double NodeStatusTracker::Speed(const Worker& worker, absl::Time now) {
  if (worker.pid == 0 || worker.commits.size() < 2) return -1;
  const Commit& oldest = worker.commits.front();
  const Commit& newest = worker.commits.back();
  const double measured_s = absl::ToDoubleSeconds(newest.at - oldest.at);
  const double idle_s = absl::ToDoubleSeconds(now - newest.at);
  const double steps = static_cast<double>(newest.step - oldest.step);
  // Two stamps may be equal, within the clock's resolution.
  const double speed = steps / std::max(measured_s, 1e-6);
  // The next step is late: the speed is at most one step in the idle time.
  return idle_s * speed <= 1 ? speed : 1 / idle_s;
}

double NodeStatusTracker::StepsPerSecond(absl::Time now) const {
  double fastest = -1;
  for (const auto& [local_rank, worker] : workers_) fastest = std::max(fastest, Speed(worker, now));
  return fastest;
}

NodeRow NodeStatusTracker::Row(absl::Time now) const {
  NodeRow row;
  row.host = identity_.host;
  row.role = identity_.job.role;
  row.agent_pid = identity_.agent_pid;
  row.state = state_;
  row.generation = generation_.number;
  row.group_rank = generation_.number == 0 ? -1 : generation_.group_rank;
  row.failed_saves = FailedSaves();
  row.save_error = save_error_;
  for (const auto& [local_rank, worker] : workers_) {
    row.failed_saves_in_a_row = std::max(row.failed_saves_in_a_row,
                                         std::min(worker.failed_saves_in_a_row, row.failed_saves));
    const bool has_step = !worker.commits.empty();
    RankRow rank;
    rank.rank = worker.rank;
    rank.local_rank = local_rank;
    rank.pid = worker.pid;
    if (has_step) rank.step = worker.commits.back().step;
    rank.steps_per_second = Speed(worker, now);
    rank.phase = worker.phase;
    const absl::Time progress = has_step ? worker.commits.back().at : worker.started;
    rank.progress_age_s = std::max(0.0, absl::ToDoubleSeconds(now - progress));
    rank.straggler_factor = worker.straggler_factor;
    row.ranks.push_back(std::move(rank));
  }
  return row;
}

std::string NodeStatusTracker::Shape() const {
  std::string shape = absl::StrCat(generation_.number, ".", generation_.nonce, " ", state_);
  for (const auto& [local_rank, worker] : workers_) absl::StrAppend(&shape, " ", worker.pid);
  return shape;
}

std::string NodeStatusTracker::RowText(absl::Time now) {
  std::string shape = Shape();
  const absl::Duration period = absl::Seconds(NodeRowPeriodSeconds(generation_.nodes));
  if (shape == row_shape_ && now < row_made_ + period) return row_text_;
  row_shape_ = std::move(shape);
  row_made_ = now;
  row_text_ = FormatNodeRow(Row(now));
  return row_text_;
}

JobStatus NodeStatusTracker::Status(absl::Time now) const {
  JobStatus status;
  status.run_id = identity_.job.run_id;
  status.instance = identity_.instance;
  status.state = state_;
  status.generation = generation_.number;
  status.nonce = generation_.nonce;
  status.reason = generation_.reason;
  status.restarts = generation_.restarts;
  status.max_restarts = identity_.job.limits.max_restarts;
  status.min_nodes = identity_.job.limits.min_nodes;
  status.max_nodes = identity_.job.limits.max_nodes;
  if (generation_.number != 0) {
    status.world_size = generation_.world_size;
    status.nodes_total = generation_.nodes;
  }
  NodeStatus node;
  node.is_member = generation_.number != 0;
  node.row_known = true;
  node.row = Row(now);
  status.nodes.push_back(std::move(node));
  status.store_in_reach = store_in_reach_;
  const RendezvousRules& rules = identity_.job.rules;
  status.heartbeat_interval_s = absl::ToDoubleSeconds(rules.HeartbeatInterval(rules.lease));
  status.store_outages = store_outages_;
  status.hangs = hangs_;
  return status;
}

}  // namespace ddp::elastic
