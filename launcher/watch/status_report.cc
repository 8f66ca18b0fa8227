#include "launcher/watch/status_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/text/text_table.h"
#include "launcher/output/printable.h"
#include "nlohmann/json.hpp"

namespace ddp::launcher {
namespace {

using elastic::FailureStatus;
using elastic::JobStatus;
using elastic::NodeStatus;
using elastic::RankRow;
using Json = nlohmann::ordered_json;

constexpr double kStillFloorS = 30;
constexpr double kStillSteps = 10;
// Default of the agent's own detector.
constexpr double kStragglerFactor = 1.5;
constexpr size_t kWarningsOfAKindMax = 5;

std::string Fixed(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

// Returns an age as "0.4 s", "95 s", "12 min" or "3.5 h": as exact as a person needs.
std::string Ago(double seconds) {
  if (seconds < 10) return Fixed(seconds, 1) + " s";
  if (seconds < 120) return Fixed(seconds, 0) + " s";
  if (seconds < 7200) return Fixed(seconds / 60, 0) + " min";
  return Fixed(seconds / 3600, 1) + " h";
}

std::string Rate(double per_second) {
  if (per_second < 0) return "-";
  return Fixed(per_second, per_second < 10 ? 2 : 1);
}

std::string OrDash(std::string text) { return text.empty() ? "-" : Printable(std::move(text)); }

template <typename Number>
std::string OrDash(Number number) {
  return number < 0 ? "-" : absl::StrCat(number);
}

std::string Plural(int64_t count, const char* one) {
  return absl::StrCat(count, " ", one, count == 1 ? "" : "s");
}

bool HasEnded(const JobStatus& status) {
  return status.state != "forming" && status.state != "running" && status.state != "draining";
}

double FastestRank(const JobStatus& status) {
  double fastest = -1;
  for (const NodeStatus& node : status.nodes) {
    if (!node.is_member) continue;
    for (const RankRow& rank : node.row.ranks) fastest = std::max(fastest, rank.steps_per_second);
  }
  return fastest;
}

bool IsLost(const NodeStatus& node) { return node.has_lease && node.lease_left_s < 0; }

std::string LeaseLeft(const NodeStatus& node) {
  if (!node.has_lease) return "-";
  return IsLost(node) ? "ran out" : Fixed(node.lease_left_s, 1) + " s";
}

std::string NodeName(const NodeStatus& node) {
  return Printable(node.row.host.empty() ? node.node : node.row.host);
}

// Collects lines of one kind: keeps the first few and counts the rest.
class Lines {
 public:
  void Add(std::string line) {
    if (++count_ <= kWarningsOfAKindMax) lines_.push_back(std::move(line));
  }
  void MoveTo(std::vector<std::string>& all, const char* what) {
    for (std::string& line : lines_) all.push_back(std::move(line));
    if (count_ > kWarningsOfAKindMax) {
      all.push_back(absl::StrCat("and ", count_ - kWarningsOfAKindMax, " more ", what));
    }
  }

 private:
  size_t count_ = 0;
  std::vector<std::string> lines_;
};

void WarnOfNodes(const JobStatus& status, std::vector<std::string>& warnings) {
  Lines lost;
  Lines silent;
  for (const NodeStatus& node : status.nodes) {
    if (IsLost(node)) {
      lost.Add(absl::StrCat("node ", NodeName(node), " has not been heard: its lease ran out ",
                            Ago(-node.lease_left_s), " ago"));
    } else if (!node.row_known) {
      silent.Add(absl::StrCat("node ", NodeName(node), " has not described itself yet"));
    }
  }
  lost.MoveTo(warnings, "nodes that were not heard");
  silent.MoveTo(warnings, "nodes that have not described themselves yet");
}

void WarnOfRanks(const JobStatus& status, std::vector<std::string>& warnings) {
  const double fastest = FastestRank(status);
  Lines still;
  Lines slow;
  for (const NodeStatus& node : status.nodes) {
    if (!node.is_member) continue;
    for (const RankRow& rank : node.row.ranks) {
      const std::string name = absl::StrCat("rank ", rank.rank, " on ", NodeName(node));
      const std::string phase =
          rank.phase.empty() ? "" : absl::StrCat(", in phase ", Printable(rank.phase));
      if (StandsStill(rank, fastest)) {
        still.Add(absl::StrCat(name, " has made no step for ", Ago(rank.progress_age_s), phase));
      } else if (rank.straggler_factor >= kStragglerFactor) {
        slow.Add(absl::StrCat(name, " needs ", Fixed(rank.straggler_factor, 1),
                              " times as long for its own part of a step as the median", phase));
      }
    }
  }
  still.MoveTo(warnings, "ranks without progress");
  slow.MoveTo(warnings, "slow ranks");
}

// Returns the member with most failed saves in a row, then in all; null when none has failed.
const elastic::NodeRow* WorstSaver(const JobStatus& status) {
  const elastic::NodeRow* worst = nullptr;
  const auto order = [](const elastic::NodeRow& row) {
    return std::make_tuple(row.failed_saves_in_a_row, row.failed_saves);
  };
  for (const NodeStatus& node : status.nodes) {
    if (!node.is_member || node.row.failed_saves == 0) continue;
    if (worst == nullptr || order(node.row) > order(*worst)) worst = &node.row;
  }
  return worst;
}

void WarnOfSaves(const JobStatus& status, std::vector<std::string>& warnings) {
  const elastic::NodeRow* worst = WorstSaver(status);
  if (worst == nullptr || worst->failed_saves_in_a_row == 0) return;
  warnings.push_back(
      absl::StrCat("no checkpoint is being saved: ", Plural(worst->failed_saves_in_a_row, "save"),
                   " failed in a row"));
}

std::string Headline(const JobStatus& status) {
  std::string line = absl::StrCat("job ", Printable(status.run_id));
  if (status.instance > 0) absl::StrAppend(&line, " (instance ", status.instance, ")");
  absl::StrAppend(&line, ": ", OrDash(status.state));
  if (HasEnded(status)) {
    if (!status.end_reason.empty()) absl::StrAppend(&line, ": ", Printable(status.end_reason));
    return line + "\n";
  }
  if (status.generation > 0) absl::StrAppend(&line, ", generation ", status.generation);
  const int64_t step = CommonStep(status);
  if (step >= 0) {
    absl::StrAppend(&line, ", step ", step);
    const double speed = CommonStepsPerSecond(status);
    if (speed >= 0) absl::StrAppend(&line, " at ", Rate(speed), " steps/s");
  }
  return line + "\n";
}

std::string NodesLine(const JobStatus& status) {
  if (HasEnded(status)) {
    return absl::StrCat("  last      generation ", status.generation, ", ",
                        Plural(status.world_size, "rank"), "\n");
  }
  const auto members = std::count_if(status.nodes.begin(), status.nodes.end(),
                                     [](const NodeStatus& node) { return node.is_member; });
  std::string line = absl::StrCat("  nodes     ", members, " of ", status.min_nodes);
  if (status.max_nodes != status.min_nodes) absl::StrAppend(&line, ":", status.max_nodes);
  const int64_t waiting = status.nodes_total - members;
  if (waiting > 0) absl::StrAppend(&line, ", ", waiting, waiting == 1 ? " waits" : " wait");
  return absl::StrCat(line, "; ", Plural(status.world_size, "rank"), "\n");
}

std::string Summary(const JobStatus& status) {
  std::string text = absl::StrCat(NodesLine(status), "  restarts  ", status.restarts, " of ",
                                  status.max_restarts, " spent\n");
  if (const elastic::NodeRow* worst = WorstSaver(status); worst != nullptr) {
    absl::StrAppend(&text, "  saves     ", worst->failed_saves,
                    " failed; the newest: ", OrDash(worst->save_error), "\n");
  }
  if (status.reason.empty()) return text;
  const bool is_this = status.state == "forming" || status.state == "draining";
  const uint64_t over = is_this ? status.generation : std::max<uint64_t>(status.generation, 1) - 1;
  absl::StrAppend(&text, status.state == "draining" ? "  draining  " : "  last end  ",
                  "generation ", over, ": ", Printable(status.reason), "\n");
  return text;
}

// Returns all `rows` if they are at most `rows_max`; otherwise that many, the bad ones first.
template <typename Row, typename IsBad>
std::vector<Row> Chosen(std::vector<Row> rows, size_t rows_max, IsBad is_bad) {
  if (rows.size() <= rows_max) return rows;
  std::stable_partition(rows.begin(), rows.end(), is_bad);
  rows.resize(rows_max);
  return rows;
}

std::string More(size_t all, size_t shown, const char* what) {
  if (shown >= all) return "";
  return absl::StrCat("  and ", all - shown, " more ", what, " (--all shows them)\n");
}

std::string RanksOf(const NodeStatus& node) {
  if (node.row.ranks.empty()) return "-";
  const int first = node.row.ranks.front().rank;
  const int last = node.row.ranks.back().rank;
  return first == last ? absl::StrCat(first) : absl::StrCat(first, "-", last);
}

std::string Nodes(const JobStatus& status, size_t rows_max) {
  std::vector<const NodeStatus*> nodes;
  for (const NodeStatus& node : status.nodes) nodes.push_back(&node);
  nodes = Chosen(std::move(nodes), rows_max, [](const NodeStatus* node) {
    return IsLost(*node) || !node->row_known || !node->is_member;
  });
  if (nodes.empty()) return "";
  TextTable table({"NODE", "HOST", "ROLE", "STATE", "LEASE LEFT", "RANKS", "AGENT"});
  for (const NodeStatus* node : nodes) {
    table.Add({node->is_member ? OrDash(node->row.group_rank) : "waits", NodeName(*node),
               OrDash(node->row.role), OrDash(node->row.state), LeaseLeft(*node), RanksOf(*node),
               node->row.agent_pid > 0 ? absl::StrCat(node->row.agent_pid) : "-"});
  }
  return absl::StrCat("\n", table.Text(),
                      More(static_cast<size_t>(status.nodes_total), nodes.size(), "nodes"));
}

std::string Ranks(const JobStatus& status, size_t rows_max) {
  struct Entry {
    const RankRow* rank;
    const NodeStatus* node;
  };
  std::vector<Entry> entries;
  for (const NodeStatus& node : status.nodes) {
    if (!node.is_member) continue;
    for (const RankRow& rank : node.row.ranks) entries.push_back({&rank, &node});
  }
  const size_t all = entries.size();
  const double fastest = FastestRank(status);
  entries = Chosen(std::move(entries), rows_max, [fastest](const Entry& entry) {
    return StandsStill(*entry.rank, fastest) || entry.rank->straggler_factor >= kStragglerFactor ||
           IsLost(*entry.node);
  });
  if (entries.empty()) return "";
  TextTable table(
      {"RANK", "HOST", "LOCAL", "PID", "STEP", "STEPS/S", "PHASE", "LAST STEP", "OWN TIME"});
  for (const Entry& entry : entries) {
    const RankRow& rank = *entry.rank;
    std::string age = "ended";
    if (rank.pid > 0) {
      age = rank.progress_age_s < 0 ? "-"
            : rank.step < 0         ? "none in " + Ago(rank.progress_age_s)
                                    : Ago(rank.progress_age_s) + " ago";
    }
    table.Add({OrDash(rank.rank), NodeName(*entry.node), OrDash(rank.local_rank),
               rank.pid > 0 ? absl::StrCat(rank.pid) : "-", OrDash(rank.step),
               Rate(rank.steps_per_second), OrDash(rank.phase), age,
               rank.straggler_factor < 0 ? "-" : Fixed(rank.straggler_factor, 2) + "x"});
  }
  return absl::StrCat("\n", table.Text(), More(all, entries.size(), "ranks"));
}

std::string Failures(const JobStatus& status) {
  if (status.failures.empty()) return "";
  TextTable table({"LAST FAILURES", "GENERATION", "RANK", "HOST", "CAUSE"});
  for (const FailureStatus& failure : status.failures) {
    const double age = std::max(0.0, status.unix_time_s - failure.unix_time_s);
    table.Add({Ago(age) + " ago", absl::StrCat(failure.generation), OrDash(failure.rank),
               OrDash(failure.host), OrDash(failure.cause)});
  }
  return absl::StrCat("\n", table.Text());
}

Json OrNull(double value) { return std::isfinite(value) && value >= 0 ? Json(value) : Json(); }
Json OrNull(int64_t value) { return value >= 0 ? Json(value) : Json(); }
Json OrNull(const std::string& text) { return text.empty() ? Json() : Json(text); }

Json RankJson(const RankRow& rank) {
  return {{"rank", rank.rank},
          {"local_rank", rank.local_rank},
          {"pid", rank.pid > 0 ? Json(rank.pid) : Json()},
          {"step", OrNull(rank.step)},
          {"steps_per_second", OrNull(rank.steps_per_second)},
          {"phase", OrNull(rank.phase)},
          {"seconds_since_progress", OrNull(rank.progress_age_s)},
          {"straggler_factor", OrNull(rank.straggler_factor)}};
}

Json NodeJson(const NodeStatus& node) {
  Json json = {{"node", node.node},
               {"host", OrNull(node.row.host)},
               {"role", OrNull(node.row.role)},
               {"is_member", node.is_member},
               {"group_rank", OrNull(int64_t{node.row.group_rank})},
               {"generation", node.row.generation},
               {"lease_left_s", node.has_lease ? Json(node.lease_left_s) : Json()},
               {"state", OrNull(node.row.state)},
               {"agent_pid", node.row.agent_pid > 0 ? Json(node.row.agent_pid) : Json()},
               {"failed_saves", node.row.failed_saves},
               {"failed_saves_in_a_row", node.row.failed_saves_in_a_row},
               {"save_error", OrNull(node.row.save_error)},
               {"ranks", Json::array()}};
  for (const RankRow& rank : node.row.ranks) json["ranks"].push_back(RankJson(rank));
  return json;
}

Json FailureJson(const FailureStatus& failure) {
  return {{"unix_time", failure.unix_time_s},
          {"generation", failure.generation},
          {"rank", OrNull(int64_t{failure.rank})},
          {"host", OrNull(failure.host)},
          {"cause", failure.cause},
          {"charged", failure.charged}};
}

Json JobJson(const JobStatus& status) {
  Json json = {{"run_id", status.run_id},
               {"instance", status.instance},
               {"state", status.state},
               {"end_reason", OrNull(status.end_reason)},
               {"generation", status.generation},
               {"nonce", OrNull(status.nonce)},
               {"reason", OrNull(status.reason)},
               {"restarts", status.restarts},
               {"max_restarts", status.max_restarts},
               {"nodes_min", status.min_nodes},
               {"nodes_max", status.max_nodes},
               {"nodes_total", status.nodes_total},
               {"world_size", status.world_size},
               {"step", OrNull(CommonStep(status))},
               {"steps_per_second", OrNull(CommonStepsPerSecond(status))},
               {"unix_time", status.unix_time_s},
               {"warnings", StatusWarnings(status)},
               {"nodes", Json::array()},
               {"failures", Json::array()}};
  for (const NodeStatus& node : status.nodes) json["nodes"].push_back(NodeJson(node));
  for (const FailureStatus& failure : status.failures) {
    json["failures"].push_back(FailureJson(failure));
  }
  return json;
}

}  // namespace

bool StandsStill(const RankRow& rank, double steps_per_second) {
  if (rank.pid == 0 || rank.progress_age_s <= kStillFloorS) return false;
  return steps_per_second <= 0 || rank.progress_age_s * steps_per_second > kStillSteps;
}

std::vector<std::string> StatusWarnings(const JobStatus& status) {
  std::vector<std::string> warnings;
  if (HasEnded(status)) return warnings;
  WarnOfNodes(status, warnings);
  WarnOfRanks(status, warnings);
  WarnOfSaves(status, warnings);
  const auto members = std::count_if(status.nodes.begin(), status.nodes.end(),
                                     [](const NodeStatus& node) { return node.is_member; });
  if (status.state == "forming") {
    warnings.push_back(absl::StrCat("no generation runs: nodes are being waited for, at least ",
                                    status.min_nodes, " are needed"));
  } else if (members < status.max_nodes) {
    warnings.push_back(
        absl::StrCat(Plural(status.max_nodes - members, "node"), " short of ", status.max_nodes));
  }
  if (status.max_restarts > 0 && status.restarts >= status.max_restarts) {
    warnings.push_back("the budget of restarts is spent: the next failure ends the job");
  }
  return warnings;
}

std::string StatusTable(const JobStatus& status, size_t rows_max) {
  std::string text = absl::StrCat(Headline(status), Summary(status));
  for (const std::string& warning : StatusWarnings(status)) {
    absl::StrAppend(&text, "  WARNING   ", warning, "\n");
  }
  absl::StrAppend(&text, Nodes(status, rows_max), Ranks(status, rows_max), Failures(status));
  return text;
}

std::string StatusJson(const std::vector<JobStatus>& jobs) {
  Json json = {{"jobs", Json::array()}};
  for (const JobStatus& job : jobs) json["jobs"].push_back(JobJson(job));
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace ddp::launcher
