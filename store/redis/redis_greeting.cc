#include "store/redis/redis_greeting.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "store/redis/redis_errors.h"

namespace ddp::store {

std::vector<std::vector<std::string>> RedisGreeting(const RedisEndpoint& endpoint,
                                                    const std::string& client_name, bool resp3) {
  std::vector<std::vector<std::string>> commands;
  if (!endpoint.password.empty() && !endpoint.user.empty()) {
    commands.push_back({"AUTH", endpoint.user, endpoint.password});
  } else if (!endpoint.password.empty()) {
    commands.push_back({"AUTH", endpoint.password});
  }
  if (endpoint.database != 0) commands.push_back({"SELECT", absl::StrCat(endpoint.database)});
  if (!client_name.empty()) commands.push_back({"CLIENT", "SETNAME", client_name});
  // PING shows whether a Redis server answers and accepts the user.
  commands.push_back({"PING"});
  if (resp3) commands.push_back({"HELLO", "3"});
  return commands;
}

absl::Status JudgeGreeting(const std::vector<std::string>& command, const RedisReply& reply,
                           const RedisEndpoint& endpoint) {
  // The name is optional: a user may lack the right to set it.
  if (!reply.IsError() || command[0] == "CLIENT") return absl::OkStatus();
  const std::string& text = reply.error_text();
  if (command[0] == "HELLO" &&
      (absl::StartsWith(text, "ERR unknown command") || absl::StartsWith(text, "NOPROTO"))) {
    return absl::FailedPreconditionError(
        absl::StrCat("Redis at ", endpoint.DebugString(),
                     " does not speak RESP3; use Redis 6 or newer, or allow HELLO: ", text));
  }
  return StatusOfErrorReply(text, endpoint);
}

}  // namespace ddp::store
