#ifndef DDP_TESTING_SIMULATOR_REDIS_LUA_REDIS_H_
#define DDP_TESTING_SIMULATOR_REDIS_LUA_REDIS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/redis/redis_script.h"
#include "store/redis/wire/redis_reply.h"
#include "testing/simulator/redis/memory_database.h"

namespace ddp::testing {

// A Redis in memory that runs the project's Lua scripts like the real server. KEYS, ARGV and
// redis.call work on a MemoryDatabase. Replies are converted as by Redis: numbers lose their
// fraction, nil and false are nil, a table ends at its first nil. A script that makes or reads
// a global variable fails, as on the server. Scripts have no I/O, no clock but World's, and no
// randomness.
//
// A script is compiled once. One call costs some microseconds, so a story of thousands of clients
// takes seconds.
//
// Thread-compatible; several may live in one process.
class LuaRedis {
 public:
  // The clock must stand still during a call; `publish` must not call back into this object.
  explicit LuaRedis(MemoryDatabase::World world);
  ~LuaRedis();
  LuaRedis(const LuaRedis&) = delete;
  LuaRedis& operator=(const LuaRedis&) = delete;

  // Return the reply of the server. Errors, a script's own included, are replies of type kError.
  // The end of their text differs from the real server's: it names no line of the script's digest.
  store::RedisReply Command(const std::vector<std::string>& args);
  store::RedisReply Eval(const store::RedisScript& script, const std::vector<std::string>& keys,
                         const std::vector<std::string>& args);

  // The data of the server. A copy is a snapshot; assigning the copy loses all later writes.
  MemoryDatabase& database() { return database_; }

  // The number of scripts that were run.
  uint64_t evals() const { return evals_; }

 private:
  struct Interpreter;
  int FunctionOf(const store::RedisScript& script, std::string& error);

  const MemoryDatabase::World world_;
  MemoryDatabase database_;
  std::unique_ptr<Interpreter> interpreter_;
  std::unordered_map<std::string, int> functions_;  // by digest: a reference in the interpreter
  uint64_t evals_ = 0;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_REDIS_LUA_REDIS_H_
