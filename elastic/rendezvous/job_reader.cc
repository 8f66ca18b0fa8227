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
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "store/redis/percent_encoding.h"
#include "store/redis/wire/redis_reply.h"

namespace ddp::elastic {
namespace {

using store::RedisReply;

// Number of newest instances that are searched for a running one.
constexpr int64_t kInstancesMax = 32;
// Nodes per command. Reading their rows takes the server about a millisecond.
constexpr size_t kBatch = 256;
constexpr size_t kFailuresMax = 20;
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

// Converts a reply to TIME.
absl::StatusOr<double> SecondsOf(const RedisReply& reply) {
  DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> time, reply.AsArray());
  if (time.size() != 2) return Bad("the time");
  DDP_ASSIGN_OR_RETURN(const int64_t seconds, time[0].AsInteger());
  DDP_ASSIGN_OR_RETURN(const int64_t microseconds, time[1].AsInteger());
  return static_cast<double>(seconds) + static_cast<double>(microseconds) * 1e-6;
}

// Returns the server's time in seconds at which a lease runs out.
absl::StatusOr<double> LeaseEnd(const std::string& text) {
  double ms = 0;
  if (!absl::SimpleAtod(text, &ms) || !std::isfinite(ms)) return Bad("a lease");
  return ms * 1e-3;
}

// Returns the end of the lease that runs longest; 0 where no node has a lease.
absl::StatusOr<double> FreshestLease(const RedisReply& reply) {
  DDP_ASSIGN_OR_RETURN(const Fields leases, FieldsOf(reply));
  if (leases.empty()) return 0.0;
  return LeaseEnd(leases.begin()->second);
}

std::string Text(const Fields& fields, const std::string& name) {
  const auto found = fields.find(name);
  return found == fields.end() ? "" : found->second.substr(0, kTextBytesMax);
}

// Returns 0 where the field is missing or holds no number; clamps to the type and to 2^53.
template <typename Integer>
Integer Number(const Fields& fields, const std::string& name) {
  int64_t number = 0;
  const auto found = fields.find(name);
  if (found == fields.end() || !absl::SimpleAtoi(found->second, &number)) return 0;
  const int64_t max = std::min<uint64_t>(std::numeric_limits<Integer>::max(), int64_t{1} << 53);
  return static_cast<Integer>(std::clamp<int64_t>(number, 0, max));
}

// Parses "server's ms\ngeneration\nrank\ncharged\nhost\ncause", as membership.lua writes it.
absl::StatusOr<FailureRecord> ParseFailure(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, absl::MaxSplits('\n', 5));
  FailureRecord failure;
  double ms = 0;
  if (parts.size() != 6 || !absl::SimpleAtod(parts[0], &ms) || !std::isfinite(ms) ||
      !absl::SimpleAtoi(parts[1], &failure.generation) ||
      !absl::SimpleAtoi(parts[2], &failure.rank)) {
    return Bad("a failure");
  }
  failure.unix_time_s = ms * 1e-3;
  failure.charged = parts[3] == "1";
  failure.host = parts[4].substr(0, kTextBytesMax);
  failure.cause = parts[5].substr(0, kTextBytesMax);
  return failure;
}

// Parses a member's row, "group_rank nodes nproc ...", or an offer, "arrival nproc ...". Both end
// with "\nrole\nhost\naddress". See seats.lua.
absl::StatusOr<NodeRecord> ParseNode(const std::string& name, const std::string& text,
                                     bool is_member) {
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  const std::vector<std::string> numbers = absl::StrSplit(lines[0], ' ');
  const size_t nproc_at = is_member ? 2 : 1;
  NodeRecord node;
  node.node = name;
  node.is_member = is_member;
  if (lines.size() != 4 || numbers.size() <= nproc_at ||
      !absl::SimpleAtoi(numbers[nproc_at], &node.nproc) ||
      (is_member && !absl::SimpleAtoi(numbers[0], &node.group_rank))) {
    return Bad(absl::StrCat("node ", name));
  }
  node.role = lines[1].substr(0, kTextBytesMax);
  node.host = lines[2].substr(0, kTextBytesMax);
  return node;
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
  void TakeState(const Fields& fields);
  absl::Status ReadRows(absl::Span<NodeRecord> nodes);

  store::RedisConnection& connection_;
  const std::string run_id_;
  const std::string run_prefix_;
  JobRecord job_;
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
  std::vector<std::vector<std::string>> commands = {{"TIME"}};
  for (int64_t instance = newest; instance >= oldest; --instance) {
    commands.push_back({"HMGET", Key(instance, "job"), "state", "token"});
    commands.push_back({"ZREVRANGE", Key(instance, "leases"), "0", "0", "WITHSCORES"});
  }
  DDP_ASSIGN_OR_RETURN(const std::vector<RedisReply> replies,
                       connection_.Pipeline(commands, Reading()));
  if (replies.size() != commands.size()) return Bad("the replies about its instances");
  DDP_ASSIGN_OR_RETURN(const double now_s, SecondsOf(replies[0]));
  int64_t newest_there = 0;
  for (size_t i = 1; i < replies.size(); i += 2) {
    const int64_t instance = newest - static_cast<int64_t>(i / 2);
    DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> fields, replies[i].AsArray());
    if (fields.size() != 2) return Bad("a job's state");
    if (fields[1].IsNil()) continue;
    if (newest_there == 0) newest_there = instance;
    const std::string state = fields[0].AsString().value_or("");
    DDP_ASSIGN_OR_RETURN(const double freshest_s, FreshestLease(replies[i + 1]));
    if ((state != "forming" && state != "running") || freshest_s < now_s) continue;
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

void Reader::TakeState(const Fields& fields) {
  job_.state = Text(fields, "state");
  job_.reason = Text(fields, "reason");
  if (job_.state == "ended") {
    job_.state = Text(fields, "end_kind");
    job_.end_reason = Text(fields, "end_reason");
  } else if (job_.state == "forming") {
    const std::string over = Text(fields, "over");
    if (!over.empty()) job_.reason = over;
  } else if (!Text(fields, "drain").empty()) {
    job_.state = "draining";
    job_.reason = Text(fields, "drain");
  }
}

absl::Status Reader::ReadJob() {
  DDP_ASSIGN_OR_RETURN(
      const std::vector<RedisReply> replies,
      connection_.Transaction({{"TIME"},
                               {"HGETALL", Key("job")},
                               {"LRANGE", Key("failures"), "0", absl::StrCat(kFailuresMax - 1)}},
                              Reading()));
  if (replies.size() != 3) return Bad("the reply to three commands");
  DDP_ASSIGN_OR_RETURN(job_.unix_time_s, SecondsOf(replies[0]));
  DDP_ASSIGN_OR_RETURN(const Fields fields, FieldsOf(replies[1]));
  TakeState(fields);
  job_.generation = Number<uint64_t>(fields, "generation");
  job_.nonce = Text(fields, "nonce");
  job_.restarts = Number<int>(fields, "restarts");
  job_.max_restarts = Number<int>(fields, "max_restarts");
  job_.min_nodes = Number<int>(fields, "min_nodes");
  job_.max_nodes = Number<int>(fields, "max_nodes");
  job_.world_size = Number<int>(fields, "world_size");
  DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> failures, replies[2].AsArray());
  for (const RedisReply& failure : failures) {
    DDP_ASSIGN_OR_RETURN(const std::string text, failure.AsString());
    DDP_ASSIGN_OR_RETURN(job_.failures.emplace_back(), ParseFailure(text));
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadNodes(size_t nodes_max) {
  DDP_ASSIGN_OR_RETURN(const std::vector<RedisReply> replies,
                       connection_.Transaction({{"HGETALL", Key("members")},
                                                {"HGETALL", Key("joined")},
                                                {"ZRANGE", Key("leases"), "0", "-1", "WITHSCORES"}},
                                               Reading()));
  if (replies.size() != 3) return Bad("the reply to three commands");
  DDP_ASSIGN_OR_RETURN(const Fields members, FieldsOf(replies[0]));
  DDP_ASSIGN_OR_RETURN(const Fields joined, FieldsOf(replies[1]));
  DDP_ASSIGN_OR_RETURN(const Fields leases, FieldsOf(replies[2]));
  for (const auto& [name, text] : members) {
    DDP_ASSIGN_OR_RETURN(job_.nodes.emplace_back(), ParseNode(name, text, /*is_member=*/true));
  }
  for (const auto& [name, text] : joined) {
    if (members.count(name) > 0) continue;
    DDP_ASSIGN_OR_RETURN(job_.nodes.emplace_back(), ParseNode(name, text, /*is_member=*/false));
  }
  for (NodeRecord& node : job_.nodes) {
    const auto lease = leases.find(node.node);
    node.has_lease = lease != leases.end();
    if (!node.has_lease) continue;
    DDP_ASSIGN_OR_RETURN(const double end_s, LeaseEnd(lease->second));
    node.lease_left_s = end_s - job_.unix_time_s;
  }
  std::sort(job_.nodes.begin(), job_.nodes.end(), [](const NodeRecord& a, const NodeRecord& b) {
    return std::tuple(!a.is_member, a.group_rank, a.node) <
           std::tuple(!b.is_member, b.group_rank, b.node);
  });
  job_.nodes_total = static_cast<int64_t>(job_.nodes.size());
  if (job_.nodes.size() > nodes_max) job_.nodes.resize(nodes_max);
  const absl::Span<NodeRecord> nodes = absl::MakeSpan(job_.nodes);
  for (size_t begin = 0; begin < nodes.size(); begin += kBatch) {
    DDP_RETURN_IF_ERROR(ReadRows(nodes.subspan(begin, kBatch)));
  }
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
