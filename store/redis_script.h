#ifndef DDP_STORE_REDIS_SCRIPT_H_
#define DDP_STORE_REDIS_SCRIPT_H_

#include <string>

namespace ddp::store {

// The source of a Lua script for Redis and the name that Redis knows it by. Immutable, so one
// object may serve any number of threads and connections:
//
//   #include "elastic/rendezvous/scripts.h"    // made from join.lua by ddp_embed()
//   const RedisScript join(ddp::embedded::scripts::kJoin);
//   DDP_ASSIGN_OR_RETURN(RedisReply reply, connection->Eval(join, {key}, {"node-1"}));
//
// RedisConnection::Eval sends the name alone; the source travels only when the server does not know
// it (the first time, and after a restart or failover of the server).
class RedisScript {
 public:
  explicit RedisScript(std::string source);

  const std::string& source() const { return source_; }

  // 40 lower-case hexadecimal digits, the argument of EVALSHA.
  const std::string& sha1_hex() const { return sha1_hex_; }

 private:
  std::string source_;
  std::string sha1_hex_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_SCRIPT_H_
