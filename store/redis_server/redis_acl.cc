#include "store/redis_server/redis_acl.h"

#include "absl/strings/str_cat.h"
#include "store/redis/percent_encoding.h"

namespace ddp::store {
namespace {

constexpr char kCommands[] =
    // Connections.
    "+auth +ping +select +client|setname "
    // Scripts, the commands that they call, and the commands of a store outside scripts.
    "+evalsha +multi +exec +time "
    "+get +set +incr +exists +del +pexpire +rename "
    "+hget +hset +hmget +hmset +hsetnx +hdel +hexists +hlen +hgetall +hkeys +hincrby +hscan "
    "+sadd +scard +srem +sismember +smembers "
    "+zadd +zrem +zscore +zcard +zcount +zrange +zrevrange +zrangebyscore +zrank "
    "+lpush +lpop +rpush +llen +ltrim +lrange "
    // Pushes.
    "+publish +subscribe +unsubscribe "
    // What a fail-over changes, and which keys the server may evict.
    "+info";

std::string Rules(const std::string& pattern, const std::string& more = "") {
  return absl::StrCat("resetkeys resetchannels -@all ~", pattern, " &", pattern, " ", kCommands,
                      more);
}

// Returns a Redis pattern that matches only `text` (and any character for a blank in it).
std::string Glob(const std::string& text) {
  std::string pattern;
  for (const char c : text) {
    if (c == '*' || c == '?' || c == '[' || c == ']' || c == '\\' || c == '^') pattern += '\\';
    pattern += static_cast<unsigned char>(c) <= ' ' ? '?' : c;
  }
  return pattern;
}

}  // namespace

std::string JobAclRules(const std::string& run_id) {
  return Rules(absl::StrCat("ddp:{", Glob(EncodeRunIdForKey(run_id)), "}:*"), " +eval");
}

std::string AllJobsAclRules() { return Rules("ddp:*"); }

}  // namespace ddp::store
