#ifndef DDP_STORE_REDIS_REDIS_SCRIPT_H_
#define DDP_STORE_REDIS_REDIS_SCRIPT_H_

#include <string>

namespace ddp::store {

// A Lua script for Redis: its source, and the name by which Redis knows it. Immutable, so one
// object may serve any number of threads and connections:
//
//   #include "elastic/rendezvous/scripts.h"    // made from join.lua by ddp_embed()
//   const RedisScript join(ddp::embedded::scripts::kJoin);
//   DDP_ASSIGN_OR_RETURN(RedisReply reply, connection->Eval(join, {key}, {"node-1"}));
//
// RedisCaller::Eval sends the name alone. It sends the source only when the server does not know
// the script (the first time, and after a restart or failover of the server).
class RedisScript {
 public:
  explicit RedisScript(std::string source);

  const std::string& source() const { return source_; }

  // Returns the argument of EVALSHA: 40 lower-case hexadecimal digits.
  const std::string& sha1_hex() const { return sha1_hex_; }

 private:
  std::string source_;
  std::string sha1_hex_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_REDIS_SCRIPT_H_
