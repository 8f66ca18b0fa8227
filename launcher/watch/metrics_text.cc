#include "launcher/watch/metrics_text.h"

#include <prometheus/metric_family.h>
#include <prometheus/metric_type.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "launcher/output/printable.h"

namespace ddp::launcher {
namespace {

using elastic::JobStatus;
using elastic::RankRow;
using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

class Families {
 public:
  // Begins a family; later samples go to it.
  void Begin(MetricType type, std::string name, std::string help) {
    families_.push_back({std::move(name), std::move(help), type, {}});
  }

  void Add(double value, Labels labels = {}) {
    MetricFamily& family = families_.back();
    ClientMetric metric;
    metric.label = std::move(labels);
    (family.type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
    family.metric.push_back(std::move(metric));
  }

  void Gauge(std::string name, std::string help, double value) {
    Begin(MetricType::Gauge, std::move(name), std::move(help));
    Add(value);
  }

  std::string Text() const {
    std::vector<MetricFamily> used;
    std::copy_if(families_.begin(), families_.end(), std::back_inserter(used),
                 [](const MetricFamily& family) { return !family.metric.empty(); });
    std::ostringstream text;
    prometheus::TextSerializer().Serialize(text, used);
    return text.str();
  }

 private:
  std::vector<MetricFamily> families_;
};

Labels RankLabels(const RankRow& rank) {
  return {{"rank", absl::StrCat(rank.rank)}, {"local_rank", absl::StrCat(rank.local_rank)}};
}

void AddJob(const JobStatus& status, Families& families) {
  families.Begin(MetricType::Gauge, "ddp_job_info",
                 "What this agent runs; always 1, the labels tell.");
  if (!status.nodes.empty()) {
    const elastic::NodeRow& self = status.nodes.front().row;
    families.Add(1, {{"run_id", Printable(status.run_id)},
                     {"instance", absl::StrCat(status.instance)},
                     {"host", Printable(self.host)},
                     {"role", Printable(self.role)},
                     {"group_rank", absl::StrCat(self.group_rank)},
                     {"state", Printable(self.state)}});
  }
  families.Gauge("ddp_generation",
                 "Generation of the job that this node took part in last; 0 before the first.",
                 static_cast<double>(status.generation));
  families.Begin(MetricType::Counter, "ddp_restarts_total",
                 "Times that all workers of the job were started again: charged to the budget "
                 "(failures) or not (nodes that came, left or were lost).");
  const double begun = std::max<double>(1, static_cast<double>(status.generation));
  const double charged = std::max(0, status.restarts);
  families.Add(charged, {{"charged", "true"}});
  families.Add(std::max(0.0, begun - 1 - charged), {{"charged", "false"}});
  families.Gauge("ddp_restarts_allowed", "Failures that the job may recover from (--max-restarts).",
                 status.max_restarts);
  families.Gauge("ddp_world_size", "Ranks of the generation.", status.world_size);
  families.Gauge("ddp_nodes", "Nodes of the generation.", static_cast<double>(status.nodes_total));
  families.Gauge("ddp_nodes_min", "Fewest nodes that the job runs with.", status.min_nodes);
  families.Gauge("ddp_nodes_max", "Most nodes that the job runs with.", status.max_nodes);
}

void AddStore(const JobStatus& status, Families& families) {
  families.Gauge("ddp_store_in_reach",
                 "1 while the rendezvous store answers; 0: training goes on, membership is frozen.",
                 status.store_in_reach ? 1 : 0);
  families.Begin(MetricType::Counter, "ddp_store_outages_total",
                 "Times that the rendezvous store was out of reach since the agent was started.");
  families.Add(static_cast<double>(status.store_outages));
  if (status.heartbeat_interval_s >= 0) {
    families.Gauge("ddp_heartbeat_seconds", "Time between two heartbeats of this node.",
                   status.heartbeat_interval_s);
  }
  families.Begin(MetricType::Counter, "ddp_hangs_total",
                 "Workers of this node that were stopped because they made no progress.");
  families.Add(static_cast<double>(status.hangs));
}

void AddSaves(const elastic::NodeRow& self, Families& families) {
  families.Begin(MetricType::Counter, "ddp_failed_saves_total",
                 "Saves of checkpoints that have failed on this node since the agent was started.");
  families.Add(static_cast<double>(self.failed_saves));
  families.Gauge("ddp_failed_saves_in_a_row",
                 "Saves of checkpoints that have failed since the last one that succeeded.",
                 static_cast<double>(self.failed_saves_in_a_row));
}

// Adds a family with `number` of each rank; ranks whose number is unknown are left out.
template <typename Number>
void AddPerRank(const std::vector<RankRow>& ranks, const char* name, const char* help,
                Number number, Families& families) {
  families.Begin(MetricType::Gauge, name, help);
  for (const RankRow& rank : ranks) {
    const double value = number(rank);
    if (value >= 0) families.Add(value, RankLabels(rank));
  }
}

void AddRanks(const std::vector<RankRow>& ranks, Families& families) {
  AddPerRank(
      ranks, "ddp_worker_up", "1 while the worker runs, 0 once it has ended.",
      [](const RankRow& rank) { return rank.pid != 0 ? 1 : 0; }, families);
  AddPerRank(
      ranks, "ddp_step", "The last optimizer step that the worker has committed.",
      [](const RankRow& rank) { return static_cast<double>(rank.step); }, families);
  AddPerRank(
      ranks, "ddp_steps_per_second", "Optimizer steps per second, over the last 20 s.",
      [](const RankRow& rank) { return rank.steps_per_second; }, families);
  AddPerRank(
      ranks, "ddp_seconds_since_progress",
      "Time since the worker's last commit, or since its start where it has made none.",
      [](const RankRow& rank) { return rank.pid != 0 ? rank.progress_age_s : -1; }, families);
  AddPerRank(
      ranks, "ddp_straggler_factor",
      "The worker's own time per step, waiting left out, over the median of the job.",
      [](const RankRow& rank) { return rank.straggler_factor; }, families);
  families.Begin(MetricType::Gauge, "ddp_worker_phase", "1 for the phase that the worker is in.");
  for (const RankRow& rank : ranks) {
    if (rank.phase.empty()) continue;
    Labels labels = RankLabels(rank);
    labels.push_back({"phase", Printable(rank.phase)});
    families.Add(1, std::move(labels));
  }
}

}  // namespace

std::string MetricsText(const JobStatus& status) {
  Families families;
  AddJob(status, families);
  AddStore(status, families);
  if (!status.nodes.empty()) {
    AddSaves(status.nodes.front().row, families);
    AddRanks(status.nodes.front().row.ranks, families);
  }
  return families.Text();
}

}  // namespace ddp::launcher
