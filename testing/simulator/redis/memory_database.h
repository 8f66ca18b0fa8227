#ifndef DDP_TESTING_SIMULATOR_REDIS_MEMORY_DATABASE_H_
#define DDP_TESTING_SIMULATOR_REDIS_MEMORY_DATABASE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>

#include "absl/types/span.h"

namespace ddp::testing {

// Receives the reply of a command: one call for a simple reply, or BeginArray(n) and n calls for an
// array. An array contains no arrays here.
class ReplySink {
 public:
  virtual ~ReplySink() = default;
  virtual void Nil() = 0;
  virtual void Status(std::string_view text) = 0;
  virtual void Error(std::string_view text) = 0;
  virtual void String(std::string_view text) = 0;
  virtual void Integer(int64_t value) = 0;
  virtual void BeginArray(size_t size) = 0;
  // The command was not run: its name is unknown, or the number of arguments is wrong.
  virtual void Refused(bool /*is_unknown*/, std::string_view text) { Error(text); }
};

// The part of Redis 7.0 that this project's scripts use, in memory: strings, hashes, sets, sorted
// sets, lists, expiry, TIME, PUBLISH, and the run_id of INFO. Every command has the replies and
// errors of the real server (see redis-server's documentation; lua_redis_test compares the two).
// Another command gets the error of an unknown command.
//
// Deterministic: equal commands at equal times give equal replies, in equal order. Where Redis
// promises no order (HGETALL, SMEMBERS), the order differs from the real server's.
// A value: a copy is a snapshot. Assigning it back simulates a server that lost its last writes.
//
// Thread-compatible.
class MemoryDatabase {
 public:
  // The outside of the database, for its commands.
  struct World {
    std::function<int64_t()> now_us;  // the server's clock, microseconds of Unix time
    // Returns the number of subscribers to which the message was sent.
    std::function<int64_t(std::string_view channel, std::string_view message)> publish;
    // Returns the number of times that the server has been started: its run_id in INFO.
    std::function<int()> run = [] { return 1; };
  };

  // `args[0]` names the command in any case; at least one argument.
  void Run(absl::Span<const std::string_view> args, const World& world, ReplySink& sink);

  void Clear() { keys_.clear(); }
  size_t size() const { return keys_.size(); }

 private:
  friend struct DatabaseCommands;

  struct TextHash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  template <typename Mapped>
  using TextMap = std::unordered_map<std::string, Mapped, TextHash, std::equal_to<>>;

  using Hash = TextMap<std::string>;
  using Set = std::unordered_set<std::string, TextHash, std::equal_to<>>;
  struct SortedSet {
    TextMap<double> scores;
    std::set<std::pair<double, std::string>> order;
  };
  using List = std::deque<std::string>;
  struct Entry {
    std::variant<std::string, Hash, Set, SortedSet, List> value;
    int64_t expires_at_ms = INT64_MAX;
  };

  TextMap<Entry> keys_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_REDIS_MEMORY_DATABASE_H_
