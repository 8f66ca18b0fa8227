#include "elastic/rendezvous/job_reader.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "store/percent_encoding.h"
#include "store/redis_reply.h"

namespace ddp::elastic {
namespace {

using store::RedisReply;

// How many instances before the newest are looked at for one that runs.
constexpr int64_t kInstancesMax = 32;
// Nodes per command: so many rows hold a server up for a millisecond.
constexpr size_t kBatch = 256;
constexpr size_t kTextBytesMax = 4096;

using Fields = std::map<std::string, std::string>;

absl::Status Bad(const std::string& what) {
  return absl::InternalError(
      absl::StrCat("what the store holds of the job makes no sense: ", what));
}

const store::RedisCallOptions& Reading() {
  static const store::RedisCallOptions options{.idempotent = true};
  return options;
}

absl::StatusOr<Fields> FieldsOf(const RedisReply& reply) {
  DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> parts, reply.AsArray());
  if (parts.size() % 2 != 0) return Bad("a hash of an odd number of parts");
  Fields fields;
  for (size_t i = 0; i < parts.size(); i += 2) {
    DDP_ASSIGN_OR_RETURN(std::string name, parts[i].AsString());
    DDP_ASSIGN_OR_RETURN(fields[std::move(name)], parts[i + 1].AsString());
  }
  return fields;
}

std::string Text(const Fields& fields, const std::string& name) {
  const auto found = fields.find(name);
  return found == fields.end() ? "" : found->second.substr(0, kTextBytesMax);
}

// 0 where there is no such field, or no number in it.
template <typename Integer>
Integer Number(const Fields& fields, const std::string& name) {
  int64_t number = 0;
  const auto found = fields.find(name);
  if (found == fields.end() || !absl::SimpleAtoi(found->second, &number)) return 0;
  const int64_t max = std::min<uint64_t>(std::numeric_limits<Integer>::max(), int64_t{1} << 53);
  return static_cast<Integer>(std::clamp<int64_t>(number, 0, max));
}

// As report_failure.lua writes it: "<server's ms> <cause>".
absl::StatusOr<FailureRecord> ParseFailure(const std::string& rank, const std::string& text) {
  FailureRecord failure;
  double ms = 0;
  const size_t blank = text.find(' ');
  if (blank == std::string::npos || !absl::SimpleAtod(text.substr(0, blank), &ms) ||
      !absl::SimpleAtoi(rank, &failure.rank) || !std::isfinite(ms)) {
    return Bad("a failure");
  }
  failure.unix_time_s = ms * 1e-3;
  failure.cause = text.substr(blank + 1, kTextBytesMax);
  return failure;
}

class Reader {
 public:
  Reader(store::RedisConnection& connection, const std::string& run_id)
      : connection_(connection),
        run_id_(run_id),
        run_prefix_(absl::StrCat("ddp:{", store::EncodeRunIdForKey(run_id), "}:")) {}

  absl::Status ChooseInstance(int64_t wanted);
  absl::Status ReadJob();
  absl::Status ReadNodes(size_t nodes_max);
  JobRecord Take() && { return std::move(job_); }

 private:
  std::string Key(int64_t instance, const char* name) const {
    return absl::StrCat(run_prefix_, "i", instance, ":", name);
  }
  std::string Key(const char* name) const { return Key(job_.instance, name); }
  absl::Status NotFound(const std::string& what) const {
    return absl::NotFoundError(absl::StrCat("there is no job with id ", run_id_, what));
  }
  absl::Status TakeMembers(const RedisReply& reply);
  absl::Status TakeLeases(const RedisReply& reply, size_t nodes_max);
  absl::Status ReadRows(absl::Span<NodeRecord> nodes);

  store::RedisConnection& connection_;
  const std::string run_id_;
  const std::string run_prefix_;
  JobRecord job_;
  std::map<std::string, int> group_ranks_;  // of members
};

absl::Status Reader::ChooseInstance(int64_t wanted) {
  int64_t newest = wanted;
  if (wanted == 0) {
    DDP_ASSIGN_OR_RETURN(const RedisReply reply,
                         connection_.Command({"GET", run_prefix_ + "instance"}, Reading()));
    if (reply.IsNil()) return NotFound("");
    DDP_ASSIGN_OR_RETURN(newest, reply.AsInteger());
    if (newest < 1) return Bad("its newest instance");
  }
  const int64_t oldest = wanted == 0 ? std::max<int64_t>(1, newest - kInstancesMax + 1) : wanted;
  std::vector<std::vector<std::string>> commands;
  for (int64_t instance = newest; instance >= oldest; --instance) {
    commands.push_back({"HMGET", Key(instance, "job"), "state", "token"});
  }
  DDP_ASSIGN_OR_RETURN(const std::vector<RedisReply> replies,
                       connection_.Pipeline(commands, Reading()));
  int64_t newest_there = 0;
  for (size_t i = 0; i < replies.size(); ++i) {
    const int64_t instance = newest - static_cast<int64_t>(i);
    DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> fields, replies[i].AsArray());
    if (fields.size() != 2) return Bad("a job's state");
    if (fields[1].IsNil()) continue;
    if (newest_there == 0) newest_there = instance;
    const std::string state = fields[0].IsNil() ? "forming" : fields[0].AsString().value_or("");
    if (state != "forming" && state != "running") continue;
    if (job_.instance == 0) {
      job_.instance = instance;
    } else {
      job_.other_running.push_back(instance);
    }
  }
  if (job_.instance == 0) job_.instance = newest_there;
  if (job_.instance != 0) return absl::OkStatus();
  return NotFound(wanted == 0 ? "" : absl::StrCat(" and instance ", wanted));
}

absl::Status Reader::ReadJob() {
  DDP_ASSIGN_OR_RETURN(
      const std::vector<RedisReply> replies,
      connection_.Transaction({{"TIME"}, {"HGETALL", Key("job")}, {"HGETALL", Key("failures")}},
                              Reading()));
  if (replies.size() != 3) return Bad("the reply to three commands");
  DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> time, replies[0].AsArray());
  if (time.size() != 2) return Bad("the time");
  DDP_ASSIGN_OR_RETURN(const int64_t seconds, time[0].AsInteger());
  DDP_ASSIGN_OR_RETURN(const int64_t microseconds, time[1].AsInteger());
  job_.unix_time_s = static_cast<double>(seconds) + static_cast<double>(microseconds) * 1e-6;
  DDP_ASSIGN_OR_RETURN(const Fields fields, FieldsOf(replies[1]));
  job_.state = Text(fields, "state");
  if (job_.state.empty()) job_.state = "forming";
  job_.end_reason = Text(fields, "end_reason");
  job_.generation = Number<uint64_t>(fields, "generation");
  job_.nonce = Text(fields, "nonce");
  job_.reason = Text(fields, "reason");
  job_.restarts = Number<int>(fields, "restarts");
  job_.max_restarts = Number<int>(fields, "max_restarts");
  job_.min_nodes = Number<int>(fields, "min_nodes");
  job_.max_nodes = Number<int>(fields, "max_nodes");
  job_.world_size = Number<int>(fields, "world_size");
  DDP_ASSIGN_OR_RETURN(const Fields failures, FieldsOf(replies[2]));
  for (const auto& [rank, text] : failures) {
    DDP_ASSIGN_OR_RETURN(job_.failures.emplace_back(), ParseFailure(rank, text));
    job_.failures.back().generation = job_.generation;
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadNodes(size_t nodes_max) {
  DDP_ASSIGN_OR_RETURN(const RedisReply members,
                       connection_.Command({"HGETALL", Key("ranks")}, Reading()));
  DDP_RETURN_IF_ERROR(TakeMembers(members));
  DDP_ASSIGN_OR_RETURN(
      const RedisReply leases,
      connection_.Command({"ZRANGE", Key("leases"), "0", "-1", "WITHSCORES"}, Reading()));
  DDP_RETURN_IF_ERROR(TakeLeases(leases, nodes_max));
  const absl::Span<NodeRecord> nodes = absl::MakeSpan(job_.nodes);
  for (size_t begin = 0; begin < nodes.size(); begin += kBatch) {
    DDP_RETURN_IF_ERROR(ReadRows(nodes.subspan(begin, kBatch)));
  }
  return absl::OkStatus();
}

absl::Status Reader::TakeMembers(const RedisReply& reply) {
  DDP_ASSIGN_OR_RETURN(const Fields fields, FieldsOf(reply));
  for (const auto& [node, text] : fields) {
    int rank = -1;
    if (!absl::SimpleAtoi(text, &rank) || rank < 0) return Bad("the rank of a node");
    group_ranks_[node] = rank;
  }
  return absl::OkStatus();
}

// The nodes are those that have a lease, also one that ran out, and all members.
absl::Status Reader::TakeLeases(const RedisReply& reply, size_t nodes_max) {
  DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> parts, reply.AsArray());
  if (parts.size() % 2 != 0) return Bad("the leases");
  std::map<std::string, int> without_lease = group_ranks_;
  for (size_t i = 0; i < parts.size(); i += 2) {
    NodeRecord node;
    DDP_ASSIGN_OR_RETURN(node.node, parts[i].AsString());
    DDP_ASSIGN_OR_RETURN(const std::string until, parts[i + 1].AsString());
    double until_ms = 0;
    if (!absl::SimpleAtod(until, &until_ms) || !std::isfinite(until_ms)) return Bad("a lease");
    node.lease_left_s = until_ms * 1e-3 - job_.unix_time_s;
    const auto member = group_ranks_.find(node.node);
    node.is_member = member != group_ranks_.end();
    if (node.is_member) node.group_rank = member->second;
    without_lease.erase(node.node);
    job_.nodes.push_back(std::move(node));
  }
  for (const auto& [name, group_rank] : without_lease) {
    NodeRecord node;
    node.node = name;
    node.is_member = true;
    node.group_rank = group_rank;
    node.has_lease = false;
    job_.nodes.push_back(std::move(node));
  }
  std::sort(job_.nodes.begin(), job_.nodes.end(), [](const NodeRecord& a, const NodeRecord& b) {
    return std::tuple(!a.is_member, a.group_rank, a.node) <
           std::tuple(!b.is_member, b.group_rank, b.node);
  });
  job_.nodes_total = static_cast<int64_t>(job_.nodes.size());
  if (job_.nodes.size() > nodes_max) job_.nodes.resize(nodes_max);
  return absl::OkStatus();
}

absl::Status Reader::ReadRows(absl::Span<NodeRecord> nodes) {
  std::vector<std::string> command = {"HMGET", Key("rows")};
  for (const NodeRecord& node : nodes) command.push_back(node.node);
  DDP_ASSIGN_OR_RETURN(const RedisReply reply, connection_.Command(command, Reading()));
  DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> rows, reply.AsArray());
  if (rows.size() != nodes.size()) return Bad("the rows of its nodes");
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (rows[i].IsNil()) continue;
    DDP_ASSIGN_OR_RETURN(nodes[i].row, rows[i].AsString());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<JobRecord> ReadJob(store::RedisConnection& connection, const std::string& run_id,
                                  int64_t instance, size_t nodes_max) {
  Reader reader(connection, run_id);
  DDP_RETURN_IF_ERROR(reader.ChooseInstance(instance));
  DDP_RETURN_IF_ERROR(reader.ReadJob());
  DDP_RETURN_IF_ERROR(reader.ReadNodes(nodes_max));
  return std::move(reader).Take();
}

}  // namespace ddp::elastic
