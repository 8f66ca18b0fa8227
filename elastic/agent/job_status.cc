#include "elastic/agent/job_status.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

using Json = nlohmann::ordered_json;

// Bounds on the values in a row: above any machine, below any overflow.
constexpr int64_t kRankMax = 1 << 24;
constexpr int64_t kPidMax = 1 << 22;
constexpr int64_t kStepMax = int64_t{1} << 53;
constexpr double kNumberMax = 1e12;
constexpr size_t kPhaseBytesMax = 32;

// A rank's row is a list: field names would be longer than the values.
enum RankField : size_t {
  kRank,
  kLocalRank,
  kPid,
  kStep,
  kStepsPerSecond,
  kPhase,
  kProgressAge,
  kStragglerFactor,
  kRankFields,
};

absl::Status Bad(const std::string& what) {
  return absl::InternalError(absl::StrCat("the status of a node ", what));
}

std::string Cut(const std::string& text, size_t bytes_max) { return text.substr(0, bytes_max); }

// Rounds, because digits that are never read cost the store bytes.
double Rounded(double value, double unit) {
  if (!std::isfinite(value) || value < 0) return -1;
  return std::round(std::min(value, kNumberMax) / unit) * unit;
}

Json FormatRank(const RankRow& row) {
  return Json::array({row.rank, row.local_rank, row.pid, row.step,
                      Rounded(row.steps_per_second, 1.0 / 1024), Cut(row.phase, kPhaseBytesMax),
                      Rounded(row.progress_age_s, 1.0 / 8),
                      Rounded(row.straggler_factor, 1.0 / 64)});
}

template <typename Integer>
absl::Status ReadInteger(const Json& json, const char* name, int64_t min, int64_t max,
                         Integer& value) {
  const bool fits = json.is_number_integer() &&
                    !(json.is_number_unsigned() && json.get<uint64_t>() > uint64_t(max));
  if (!fits || json.get<int64_t>() < min || json.get<int64_t>() > max) {
    return Bad(absl::StrCat("has no ", name, " between ", min, " and ", max));
  }
  value = static_cast<Integer>(json.get<int64_t>());
  return absl::OkStatus();
}

absl::Status ReadNumber(const Json& json, const char* name, double& value) {
  if (!json.is_number()) return Bad(absl::StrCat("has no ", name));
  value = json.get<double>();
  if (!std::isfinite(value) || value < -1 || value > kNumberMax) {
    return Bad(absl::StrCat("has a ", name, " out of range"));
  }
  return absl::OkStatus();
}

absl::Status ReadText(const Json& json, const char* name, std::string& value) {
  if (!json.is_string()) return Bad(absl::StrCat("has no ", name));
  value = json.get<std::string>();
  // The writer replaced each invalid byte by three.
  if (value.size() > 3 * kTextBytesMax) return Bad(absl::StrCat("has a ", name, " too long"));
  return absl::OkStatus();
}

absl::StatusOr<RankRow> ParseRank(const Json& json) {
  if (!json.is_array() || json.size() < kRankFields) return Bad("has a rank of another shape");
  RankRow row;
  DDP_RETURN_IF_ERROR(ReadInteger(json[kRank], "rank", 0, kRankMax, row.rank));
  DDP_RETURN_IF_ERROR(ReadInteger(json[kLocalRank], "local rank", 0, kRankMax, row.local_rank));
  DDP_RETURN_IF_ERROR(ReadInteger(json[kPid], "pid", 0, kPidMax, row.pid));
  DDP_RETURN_IF_ERROR(ReadInteger(json[kStep], "step", -1, kStepMax, row.step));
  DDP_RETURN_IF_ERROR(ReadNumber(json[kStepsPerSecond], "speed", row.steps_per_second));
  DDP_RETURN_IF_ERROR(ReadText(json[kPhase], "phase", row.phase));
  DDP_RETURN_IF_ERROR(ReadNumber(json[kProgressAge], "age of its progress", row.progress_age_s));
  DDP_RETURN_IF_ERROR(
      ReadNumber(json[kStragglerFactor], "factor to the median", row.straggler_factor));
  return row;
}

}  // namespace

std::string FormatNodeRow(const NodeRow& row) {
  Json json;
  json["host"] = Cut(row.host, kTextBytesMax);
  json["role"] = Cut(row.role, kTextBytesMax);
  json["group_rank"] = row.group_rank;
  json["pid"] = row.agent_pid;
  json["generation"] = row.generation;
  json["state"] = Cut(row.state, kTextBytesMax);
  if (row.failed_saves > 0) {
    json["failed_saves"] = row.failed_saves;
    json["failed_saves_in_a_row"] = row.failed_saves_in_a_row;
    json["save_error"] = Cut(row.save_error, kTextBytesMax);
  }
  json["ranks"] = Json::array();
  for (size_t i = 0; i < std::min(row.ranks.size(), kRanksOfNodeMax); ++i) {
    json["ranks"].push_back(FormatRank(row.ranks[i]));
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::StatusOr<NodeRow> ParseNodeRow(const std::string& text) {
  if (text.size() > kNodeRowBytesMax) return Bad(absl::StrCat("has ", text.size(), " bytes"));
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Bad("is no JSON object");
  // A missing field reads as null, which has no expected type.
  const auto field = [&json](const char* name) { return json.value(name, Json()); };
  NodeRow row;
  DDP_RETURN_IF_ERROR(ReadText(field("host"), "host", row.host));
  DDP_RETURN_IF_ERROR(ReadText(field("role"), "role", row.role));
  DDP_RETURN_IF_ERROR(ReadInteger(field("group_rank"), "group rank", -1, kRankMax, row.group_rank));
  DDP_RETURN_IF_ERROR(ReadInteger(field("pid"), "pid", 0, kPidMax, row.agent_pid));
  DDP_RETURN_IF_ERROR(ReadInteger(field("generation"), "generation", 0, kStepMax, row.generation));
  DDP_RETURN_IF_ERROR(ReadText(field("state"), "state", row.state));
  if (json.contains("failed_saves")) {
    DDP_RETURN_IF_ERROR(
        ReadInteger(field("failed_saves"), "failed saves", 0, kStepMax, row.failed_saves));
    DDP_RETURN_IF_ERROR(ReadInteger(field("failed_saves_in_a_row"), "failed saves in a row", 0,
                                    kStepMax, row.failed_saves_in_a_row));
    DDP_RETURN_IF_ERROR(ReadText(field("save_error"), "error of a save", row.save_error));
  }
  const auto ranks = json.find("ranks");
  if (ranks == json.end() || !ranks->is_array()) return Bad("has no ranks");
  if (ranks->size() > kRanksOfNodeMax) return Bad(absl::StrCat("has ", ranks->size(), " ranks"));
  for (const Json& rank : *ranks) {
    DDP_ASSIGN_OR_RETURN(row.ranks.emplace_back(), ParseRank(rank));
  }
  return row;
}

int64_t CommonStep(const JobStatus& status) {
  int64_t lowest = std::numeric_limits<int64_t>::max();
  int64_t ranks = 0;
  for (const NodeStatus& node : status.nodes) {
    if (!node.is_member) continue;
    for (const RankRow& rank : node.row.ranks) {
      lowest = std::min(lowest, rank.step);
      ++ranks;
    }
  }
  return ranks > 0 && ranks >= status.world_size ? lowest : -1;
}

double CommonStepsPerSecond(const JobStatus& status) {
  double slowest = -1;
  for (const NodeStatus& node : status.nodes) {
    if (!node.is_member) continue;
    for (const RankRow& rank : node.row.ranks) {
      if (rank.steps_per_second < 0) continue;
      slowest = slowest < 0 ? rank.steps_per_second : std::min(slowest, rank.steps_per_second);
    }
  }
  return slowest;
}

double NodeRowPeriodSeconds(int nodes) { return std::max(1.0, nodes / 500.0); }

}  // namespace ddp::elastic
