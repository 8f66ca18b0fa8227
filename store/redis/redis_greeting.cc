#include "store/redis/redis_greeting.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "glog/logging.h"
#include "store/redis/redis_errors.h"
#include "store/redis/wire/redis_wire.h"

namespace ddp::store {
namespace {

// Returns true when a reply to HELLO, a list of keys and values, names the role of a replica.
bool NamesReplica(const RedisReply& hello) {
  const absl::StatusOr<absl::Span<const RedisReply>> items = hello.AsArray();
  if (!items.ok()) return false;
  for (size_t i = 0; i + 1 < items->size(); i += 2) {
    if ((*items)[i].AsString().value_or("") != "role") continue;
    const std::string role = (*items)[i + 1].AsString().value_or("");
    return role == "replica" || role == "slave";
  }
  return false;
}

}  // namespace

RedisGreeting::RedisGreeting(const RedisEndpoint& endpoint, const std::string& client_name,
                             bool resp3, bool asks_role)
    : endpoint_(endpoint), resp3_(resp3) {
  if (!endpoint.password.empty() && !endpoint.user.empty()) {
    commands_.push_back({"AUTH", endpoint.user, endpoint.password});
  } else if (!endpoint.password.empty()) {
    commands_.push_back({"AUTH", endpoint.password});
  }
  if (endpoint.database != 0) commands_.push_back({"SELECT", absl::StrCat(endpoint.database)});
  if (!client_name.empty()) commands_.push_back({"CLIENT", "SETNAME", client_name});
  // PING shows whether a Redis server answers and accepts the user.
  commands_.push_back({"PING"});
  if (resp3) {
    commands_.push_back(RedisHello());
  } else if (asks_role) {
    commands_.push_back({"HELLO", "2"});
  }
}

std::string RedisGreeting::WireForm() const { return RedisWireForm(commands_); }

absl::Status RedisGreeting::Take(const RedisReply& reply) {
  CHECK(!done());
  const std::string& command = commands_[taken_++].front();
  if (command == "HELLO") {
    is_replica_ = NamesReplica(reply);
    return resp3_ ? JudgeRedisHello(reply, endpoint_) : absl::OkStatus();
  }
  // The name is optional: a user may lack the right to set it.
  if (!reply.IsError() || command == "CLIENT") return absl::OkStatus();
  return StatusOfErrorReply(reply.error_text(), endpoint_);
}

std::vector<std::string> RedisHello() { return {"HELLO", "3"}; }

absl::Status JudgeRedisHello(const RedisReply& reply, const RedisEndpoint& endpoint) {
  if (!reply.IsError()) return absl::OkStatus();
  const std::string& text = reply.error_text();
  if (absl::StartsWith(text, "ERR unknown command") || absl::StartsWith(text, "NOPROTO")) {
    return absl::FailedPreconditionError(
        absl::StrCat("Redis at ", endpoint.DebugString(),
                     " does not speak RESP3; use Redis 6 or newer, or allow HELLO: ", text));
  }
  return StatusOfErrorReply(text, endpoint);
}

}  // namespace ddp::store
