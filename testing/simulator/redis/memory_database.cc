#include "testing/simulator/redis/memory_database.h"

#include <algorithm>
#include <array>

#include "testing/simulator/redis/command_words.h"
#include "testing/simulator/redis/database_commands.h"

namespace ddp::testing {

const std::unordered_map<std::string_view, DatabaseCommands::Command>& DatabaseCommands::Table() {
  using C = DatabaseCommands;
  static const auto* const kTable = new std::unordered_map<std::string_view, Command>{
      {"DEL", {&C::Del, -2}},
      {"UNLINK", {&C::Del, -2}},
      {"EXISTS", {&C::Exists, -2}},
      {"EXPIRE", {&C::Expire, 3}},
      {"PEXPIRE", {&C::PExpire, 3}},
      {"PERSIST", {&C::Persist, 2}},
      {"PTTL", {&C::Pttl, 2}},
      {"RENAME", {&C::Rename, 3}},
      {"TYPE", {&C::Type, 2}},
      {"GET", {&C::Get, 2}},
      {"MGET", {&C::MGet, -2}},
      {"SET", {&C::SetString, -3}},
      {"INCR", {&C::Incr, 2}},
      {"DECR", {&C::Decr, 2}},
      {"INCRBY", {&C::IncrBy, 3}},
      {"HGET", {&C::HGet, 3}},
      {"HMGET", {&C::HMGet, -3}},
      {"HSET", {&C::HSet, -4}},
      {"HMSET", {&C::HMSet, -4}},
      {"HSETNX", {&C::HSetNx, 4}},
      {"HDEL", {&C::HDel, -3}},
      {"HEXISTS", {&C::HExists, 3}},
      {"HLEN", {&C::HLen, 2}},
      {"HGETALL", {&C::HGetAll, 2}},
      {"HKEYS", {&C::HKeys, 2}},
      {"HVALS", {&C::HVals, 2}},
      {"HINCRBY", {&C::HIncrBy, 4}},
      {"SADD", {&C::SAdd, -3}},
      {"SREM", {&C::SRem, -3}},
      {"SCARD", {&C::SCard, 2}},
      {"SISMEMBER", {&C::SIsMember, 3}},
      {"SMEMBERS", {&C::SMembers, 2}},
      {"ZADD", {&C::ZAdd, -4}},
      {"ZINCRBY", {&C::ZIncrBy, 4}},
      {"ZREM", {&C::ZRem, -3}},
      {"ZSCORE", {&C::ZScore, 3}},
      {"ZCARD", {&C::ZCard, 2}},
      {"ZCOUNT", {&C::ZCount, 4}},
      {"ZRANK", {&C::ZRank, 3}},
      {"ZRANGE", {&C::ZRange, -4}},
      {"ZREVRANGE", {&C::ZRevRange, -4}},
      {"ZRANGEBYSCORE", {&C::ZRangeByScore, -4}},
      {"ZREVRANGEBYSCORE", {&C::ZRevRangeByScore, -4}},
      {"ZREMRANGEBYSCORE", {&C::ZRemRangeByScore, 4}},
      {"LPUSH", {&C::LPush, -3}},
      {"RPUSH", {&C::RPush, -3}},
      {"LLEN", {&C::LLen, 2}},
      {"LRANGE", {&C::LRange, 4}},
      {"LTRIM", {&C::LTrim, 4}},
      {"PUBLISH", {&C::Publish, 3}},
      {"TIME", {&C::Time, 1}},
      {"INFO", {&C::Info, 2}},
  };
  return *kTable;
}

void MemoryDatabase::Run(absl::Span<const std::string_view> args, const World& world,
                         ReplySink& sink) {
  const std::unordered_map<std::string_view, DatabaseCommands::Command>& table =
      DatabaseCommands::Table();
  std::array<char, 24> name{};
  const size_t size = std::min(args[0].size(), name.size());
  std::transform(args[0].begin(), args[0].begin() + size, name.begin(), Upper);
  const auto found = table.find(std::string_view(name.data(), size));
  if (found == table.end()) {
    return sink.Refused(true, "ERR unknown command '" + std::string(args[0]) + "'");
  }
  const int wanted = found->second.arguments;
  const int given = static_cast<int>(args.size());
  if (wanted >= 0 ? given != wanted : given < -wanted) {
    std::transform(args[0].begin(), args[0].end(), name.begin(), Lower);
    return sink.Refused(false, "ERR wrong number of arguments for '" +
                                   std::string(name.data(), size) + "' command");
  }
  DatabaseCommands commands{*this, args, world, sink};
  (commands.*found->second.run)();
}

}  // namespace ddp::testing
