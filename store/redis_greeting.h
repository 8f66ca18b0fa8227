// What a client says first on a new connection to Redis. Pure.
#ifndef DDP_STORE_REDIS_GREETING_H_
#define DDP_STORE_REDIS_GREETING_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "store/redis_endpoint.h"
#include "store/redis_reply.h"

namespace ddp::store {

// AUTH and SELECT where they are needed, CLIENT SETNAME unless `client_name` is empty, PING; with
// `resp3`, HELLO 3, whose reply is the first in that protocol. Each brings one reply.
std::vector<std::vector<std::string>> RedisGreeting(const RedisEndpoint& endpoint,
                                                    const std::string& client_name, bool resp3);

// What `reply` to `command` of the greeting means: not OK when we are not welcome.
absl::Status JudgeGreeting(const std::vector<std::string>& command, const RedisReply& reply,
                           const RedisEndpoint& endpoint);

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_GREETING_H_
