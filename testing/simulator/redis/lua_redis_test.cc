#include "testing/simulator/redis/lua_redis.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_script.h"
#include "store/redis/wire/redis_reply.h"
#include "testing/redis/redis_fixture.h"
#include "testing/simulator/redis/memory_database.h"

namespace ddp::testing {
namespace {

using store::RedisReply;
using store::RedisScript;
using Words = std::vector<std::string>;

std::string Show(const RedisReply& reply) {
  switch (reply.type()) {
    case RedisReply::Type::kNil:
      return "nil";
    case RedisReply::Type::kStatus:
      return absl::StrCat("+", *reply.AsString());
    case RedisReply::Type::kError:
      return absl::StrCat("-", reply.error_text());
    case RedisReply::Type::kString:
      return absl::StrCat("'", *reply.AsString(), "'");
    case RedisReply::Type::kInteger:
      return absl::StrCat(":", *reply.AsInteger());
    case RedisReply::Type::kArray: {
      Words parts;
      const absl::Span<const RedisReply> elements = *reply.AsArray();
      for (const RedisReply& part : elements) parts.push_back(Show(part));
      return absl::StrCat("[", absl::StrJoin(parts, " "), "]");
    }
  }
  return "?";
}

// Shows a reply; sorts it when Redis promises no order.
std::string ShowSorted(const std::string& command, const RedisReply& reply) {
  const bool pairs = command == "HGETALL";
  if (reply.type() != RedisReply::Type::kArray ||
      (!pairs && command != "HKEYS" && command != "HVALS" && command != "SMEMBERS")) {
    return Show(reply);
  }
  Words parts;
  const absl::Span<const RedisReply> elements = *reply.AsArray();
  for (const RedisReply& part : elements) {
    if (pairs && parts.size() % 2 == 1) absl::StrAppend(&parts.back(), "=", Show(part));
    parts.push_back(Show(part));
  }
  std::sort(parts.begin(), parts.end());
  return absl::StrJoin(parts, " ");
}

class LuaRedisTest : public ::testing::Test {
 protected:
  std::string Run(const std::string& source, const Words& keys = {}, const Words& args = {}) {
    return Show(redis_.Eval(RedisScript(source), keys, args));
  }
  std::string Command(const Words& args) { return Show(redis_.Command(args)); }

  int64_t now_us_ = 1700000000123456;
  Words published_;
  LuaRedis redis_{{.now_us = [this] { return now_us_; },
                   .publish =
                       [this](std::string_view channel, std::string_view message) {
                         published_.push_back(std::string(channel).append(" ").append(message));
                         return int64_t{3};
                       }}};
};

TEST_F(LuaRedisTest, RepliesAreConvertedAsRedisDoes) {
  EXPECT_EQ(Run("return 3.99"), ":3");
  EXPECT_EQ(Run("return {1, 'two', false, true, {}, nil, 'unseen'}"), "[:1 'two' nil :1 []]");
  EXPECT_EQ(Run("return redis.error_reply('MY fault')"), "-MY fault");
  EXPECT_EQ(Run("return redis.status_reply('FINE')"), "+FINE");
  EXPECT_EQ(Run("return redis.call('GET', KEYS[1])", {"k"}), "nil");
  EXPECT_EQ(Run("return redis.call('SET', KEYS[1], ARGV[1])", {"k"}, {"v"}), "+OK");
  EXPECT_EQ(Run("return {redis.call('GET', KEYS[1]), #KEYS, #ARGV}", {"k"}), "['v' :1 :0]");
}

TEST_F(LuaRedisTest, TheClockIsGivenAndKeysExpireByIt) {
  EXPECT_EQ(Run("return redis.call('TIME')"), "['1700000000' '123456']");
  Command({"SET", "k", "v", "PX", "10"});
  now_us_ += 9999;
  EXPECT_EQ(Command({"GET", "k"}), "'v'");
  EXPECT_EQ(Command({"PTTL", "k"}), ":0");
  now_us_ += 1000;
  EXPECT_EQ(Command({"EXISTS", "k"}), ":0");
}

TEST_F(LuaRedisTest, ALeaseIsRenewedByOneCommandWhileItLasts) {
  Command({"SET", "beat", "1", "PX", "10"});
  const MemoryDatabase before = redis_.database();
  now_us_ += 8000;
  EXPECT_EQ(Command({"PEXPIRE", "beat", "10"}), ":1");
  now_us_ += 8000;
  EXPECT_EQ(Command({"PTTL", "beat"}), ":2");
  redis_.database() = before;  // the renewal was among the lost writes
  EXPECT_EQ(Command({"PEXPIRE", "beat", "10"}), ":0");
  EXPECT_EQ(Command({"PTTL", "beat"}), ":-2");
  Command({"SET", "beat", "1", "PX", "10"});
  EXPECT_EQ(Command({"DEL", "beat"}), ":1");
  EXPECT_EQ(Command({"PEXPIRE", "beat", "10"}), ":0");
}

TEST_F(LuaRedisTest, PublishedTextsGoToTheCaller) {
  EXPECT_EQ(Run("return redis.call('PUBLISH', 'news', ARGV[1])", {}, {"text"}), ":3");
  EXPECT_EQ(published_, Words{"news text"});
}

TEST_F(LuaRedisTest, ACopyOfTheDatabaseIsASnapshot) {
  Command({"ZADD", "z", "1", "a"});
  const MemoryDatabase before = redis_.database();
  Command({"ZADD", "z", "2", "b"});
  redis_.database() = before;
  EXPECT_EQ(Command({"ZRANGE", "z", "0", "-1"}), "['a']");
  redis_.database().Clear();
  EXPECT_EQ(Command({"ZRANGE", "z", "0", "-1"}), "[]");
}

TEST_F(LuaRedisTest, AScriptHasNoGlobalsAndNoWorld) {
  EXPECT_TRUE(absl::StartsWith(Run("x = 1"), "-ERR "));
  EXPECT_TRUE(absl::StartsWith(Run("return x"), "-ERR "));
  EXPECT_TRUE(absl::StartsWith(Run("return os.time()"), "-ERR "));
  EXPECT_TRUE(absl::StartsWith(Run("return math.random()"), "-ERR "));
  EXPECT_TRUE(absl::StartsWith(Run("return ("), "-ERR Error compiling script"));
}

// Shapes of commands. k is a key, m a member, v a value, i an integer, s a score, b the bound of
// a range.
constexpr char kCommands[] = R"(
DEL k; EXISTS k k; PERSIST k; RENAME k k; TYPE k; GET k; MGET k k; SET k v; SET k v NX;
SET k v XX; SET k v PX 100000; SET k v PX v; INCR k; DECR k; INCRBY k i; HGET k m;
HMGET k m m m; HSET k m v; HSET k m v m v; HSET k m v m; HMSET k m v; HSETNX k m v; HDEL k m m;
HEXISTS k m; HLEN k; HGETALL k; HKEYS k; HVALS k; HINCRBY k m i; SADD k m m; SREM k m; SCARD k;
SISMEMBER k m; SMEMBERS k; ZADD k s m; ZADD k s m s m; ZADD k NX s m; ZADD k XX CH s m;
ZADD k GT CH s m; ZADD k LT s m; ZADD k s; ZADD k s m s; ZINCRBY k s m; ZREM k m m; ZSCORE k m;
ZCARD k; ZCOUNT k b b; ZRANK k m; ZRANGE k i i; ZRANGE k i i WITHSCORES; ZREVRANGE k i i;
ZRANGEBYSCORE k b b; ZRANGEBYSCORE k b b LIMIT i i;
ZRANGEBYSCORE k -inf b WITHSCORES LIMIT 0 2; ZREVRANGEBYSCORE k b b; ZREMRANGEBYSCORE k b b;
LPUSH k v v; RPUSH k v; LLEN k; LRANGE k i i; LTRIM k i i; PUBLISH c v; PEXPIRE k 100000;
PEXPIRE k -1; EXPIRE k v; GET; HGET k; hget k m; ZCOUNT k v b; LRANGE k v i
)";

// Draws commands on few keys and members, so that commands share them. Some have a wrong type or
// shape.
class RandomCommands {
 public:
  explicit RandomCommands(uint64_t seed) : random_(seed) {}

  Words Next() {
    static const std::vector<std::string> kShapes = absl::StrSplit(kCommands, ';');
    Words words =
        absl::StrSplit(kShapes[Pick(kShapes.size())], absl::ByAnyChar(" \n"), absl::SkipEmpty());
    // Most keys have the command's own type.
    const char own = words[0][0];
    for (size_t i = 1; i < words.size(); ++i) {
      const std::string& shape = words[i];
      if (shape == "k") words[i] = Pick(20) == 0 ? absl::StrCat("k", Pick(3)) : Key(own);
      if (shape == "m") words[i] = absl::StrCat("m", Pick(9));
      if (shape == "v") words[i] = OneOf({"", "v", "0", "-3", "007", "9223372036854775807", "1.5"});
      if (shape == "i") words[i] = absl::StrCat(static_cast<int>(Pick(9)) - 4);
      if (shape == "s") words[i] = OneOf({"0", "1", "-1", "2.5", "1e3", "inf", "0.1", "x"});
      if (shape == "b") words[i] = OneOf({"0", "(0", "1", "(1", "-inf", "+inf", "2.5", "(1000"});
    }
    return words;
  }

 private:
  size_t Pick(size_t size) { return random_() % size; }
  std::string OneOf(const Words& words) { return words[Pick(words.size())]; }
  std::string Key(char type) { return absl::StrCat("key ", std::string(1, type), Pick(2)); }

  std::mt19937_64 random_;
};

// Runs commands in a script, so the test compares the conversions in both directions as well, and
// gets errors unchanged.
TEST_F(LuaRedisTest, RandomCommandsAnswerAsARealRedis) {
  const RedisScript script("return {redis.pcall(unpack(ARGV))}");
  const auto real = RedisFixture::Start();
  const auto connection = real->Connect();
  const auto forget = [](std::string_view, std::string_view) { return int64_t{0}; };
  LuaRedis ours({.now_us = [this] { return now_us_; }, .publish = forget});
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    ASSERT_TRUE(connection->Command({"FLUSHALL"}).ok());
    ours.database().Clear();
    RandomCommands commands(seed);
    for (int i = 0; i < 1500; ++i) {
      const Words words = commands.Next();
      auto theirs = connection->Eval(script, {}, words);
      ASSERT_TRUE(theirs.ok()) << theirs.status();
      const RedisReply mine = ours.Eval(script, {}, words);
      const auto theirs_parts = theirs->AsArray(), my_parts = mine.AsArray();
      ASSERT_TRUE(theirs_parts.ok() && my_parts.ok() && my_parts->size() == 1) << Show(mine);
      ASSERT_EQ(theirs_parts->size(), 1);
      ASSERT_EQ(ShowSorted(words[0], my_parts->front()),
                ShowSorted(words[0], theirs_parts->front()))
          << "command " << i << ": " << absl::StrJoin(words, " ");
    }
  }
}

}  // namespace
}  // namespace ddp::testing
