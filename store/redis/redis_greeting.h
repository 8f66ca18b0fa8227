// The first commands of a client on a new connection to Redis. Pure.
#ifndef DDP_STORE_REDIS_REDIS_GREETING_H_
#define DDP_STORE_REDIS_REDIS_GREETING_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/wire/redis_reply.h"

namespace ddp::store {

// Returns AUTH and SELECT where needed, CLIENT SETNAME unless `client_name` is empty, PING. With
// `resp3` also HELLO 3, whose reply is the first in that protocol. Each brings one reply.
std::vector<std::vector<std::string>> RedisGreeting(const RedisEndpoint& endpoint,
                                                    const std::string& client_name, bool resp3);

// Checks `reply` to one `command` of the greeting. Returns an error when the server refuses us. A
// refused CLIENT SETNAME is OK. kFailedPrecondition: the server does not know HELLO 3.
absl::Status JudgeGreeting(const std::vector<std::string>& command, const RedisReply& reply,
                           const RedisEndpoint& endpoint);

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_REDIS_GREETING_H_
