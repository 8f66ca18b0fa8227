// The first commands of a client on a new connection to Redis. Pure.
#ifndef DDP_STORE_REDIS_REDIS_GREETING_H_
#define DDP_STORE_REDIS_REDIS_GREETING_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/wire/redis_reply.h"

namespace ddp::store {

// The greeting of one connection: AUTH and SELECT where needed, CLIENT SETNAME unless `client_name`
// is empty, PING. With `resp3` also HELLO 3, whose reply is the first in that protocol. Otherwise,
// with `asks_role`, HELLO 2, which a server may refuse.
//
// Thread-compatible.
class RedisGreeting {
 public:
  RedisGreeting(const RedisEndpoint& endpoint, const std::string& client_name, bool resp3,
                bool asks_role = false);

  // Returns all commands, to be sent at once.
  std::string WireForm() const;

  // Takes the next reply. Returns an error when the server refuses the client; the connection is of
  // no use then. The errors are those of RedisCaller. A refused CLIENT SETNAME is OK.
  // kFailedPrecondition: the server does not know HELLO 3. CHECKs that a reply is due.
  absl::Status Take(const RedisReply& reply);

  // Returns true when all replies have been taken.
  bool done() const { return taken_ == commands_.size(); }

  // Returns true when the server has said that it is a replica. HELLO needs no right, unlike ROLE.
  bool is_replica() const { return is_replica_; }

 private:
  const RedisEndpoint endpoint_;
  const bool resp3_;
  bool is_replica_ = false;
  std::vector<std::vector<std::string>> commands_;  // constant after construction
  size_t taken_ = 0;                                // replies
};

// HELLO 3 alone, for a connection that was greeted without it. JudgeRedisHello() returns the error
// of its reply; OK: the server speaks RESP3.
std::vector<std::string> RedisHello();
absl::Status JudgeRedisHello(const RedisReply& reply, const RedisEndpoint& endpoint);

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_REDIS_GREETING_H_
