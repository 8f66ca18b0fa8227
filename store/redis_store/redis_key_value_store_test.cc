#include "store/redis_store/redis_key_value_store.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "gtest/gtest.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_script.h"
#include "store/redis/wire/redis_reply.h"
#include "store/redis_server/redis_acl.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::store {
namespace {

using ::ddp::testing::RedisFixture;

constexpr absl::Duration kLong = absl::Seconds(30);
constexpr absl::Duration kShort = absl::Milliseconds(30);

class RedisKeyValueStoreTest : public ::testing::Test {
 protected:
  std::unique_ptr<RedisKeyValueStore> Open(const RedisKeyValueStore::Options& options = {}) {
    auto store = RedisKeyValueStore::Connect(redis_->Address(), options);
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  }

  // Blocks until `count` clients of the server have subscribed, so that their waits are blocked.
  void AwaitSubscribers(int64_t count) {
    const auto connection = redis_->Connect();
    const MonotonicClock clock;
    const absl::Time deadline = clock.Now() + kLong;
    while (clock.Now() < deadline) {
      const auto reply = connection->Command({"PUBSUB", "CHANNELS"});
      std::vector<std::string> ask = {"PUBSUB", "NUMSUB"};
      const auto channels = *reply->AsArray();
      for (const RedisReply& channel : channels) ask.push_back(*channel.AsString());
      const auto counts = connection->Command(ask);
      int64_t sum = 0;
      const auto pairs = *counts->AsArray();
      for (size_t i = 1; i < pairs.size(); i += 2) sum += *pairs[i].AsInteger();
      if (sum >= count) return;
      std::this_thread::yield();
    }
    ADD_FAILURE() << "nobody waits";
  }

  std::map<std::string, int64_t> CallsDuring(const std::function<void()>& work) {
    const std::map<std::string, int64_t> before = redis_->CommandCalls();
    work();
    std::map<std::string, int64_t> calls;
    for (const auto& [command, count] : redis_->CommandCalls()) {
      const auto old = before.find(command);
      const int64_t more = count - (old == before.end() ? 0 : old->second);
      // Without the commands of the count itself.
      if (more > 0 && command != "info" && command != "ping") calls[command] = more;
    }
    return calls;
  }

  const std::unique_ptr<RedisFixture> redis_ = RedisFixture::Start();
  const std::unique_ptr<RedisKeyValueStore> store_ = Open();
};

// The flush stands for a restart of the server, or for a replica that has become the master.
TEST_F(RedisKeyValueStoreTest, AServerThatForgetsItsScriptsLearnsThemAgain) {
  const auto connection = redis_->Connect();
  const auto flush = [&] { EXPECT_TRUE(connection->Command({"SCRIPT", "FLUSH"}).ok()); };
  absl::Status waited = absl::UnknownError("not ended");
  std::thread waiter([&] { waited = store_->Wait({"a", "b"}, kLong); });
  AwaitSubscribers(1);
  flush();  // while the wait is blocked
  EXPECT_TRUE(Open()->MultiSet({"a", "b"}, {"1", "2"}, kLong).ok());
  waiter.join();
  EXPECT_TRUE(waited.ok()) << waited;
  flush();
  EXPECT_TRUE(*store_->Check({"a"}, kLong));
  flush();
  EXPECT_EQ(*store_->CompareSet("a", "1", "3", kLong), "3");
  for (const RedisScript& script : KeyValueScripts()) {
    const auto loaded = connection->Command({"SCRIPT", "LOAD", script.source()});
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(*loaded->AsString(), script.sha1_hex());
  }
}

TEST_F(RedisKeyValueStoreTest, NumbersKeepAll64Bits) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(*store_->Add("n", kMax - 1, kLong), kMax - 1);
  EXPECT_EQ(*store_->Add("n", 1, kLong), kMax);
  EXPECT_EQ(*store_->Get("n", kLong), absl::StrCat(kMax));
  EXPECT_EQ(store_->Add("n", 1, kLong).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(*store_->Get("n", kLong), absl::StrCat(kMax));
  EXPECT_EQ(*store_->Add("m", std::numeric_limits<int64_t>::min(), kLong),
            std::numeric_limits<int64_t>::min());
}

TEST_F(RedisKeyValueStoreTest, EveryKeyOfTheStoreHasATimeToLive) {
  ASSERT_TRUE(store_->Set("a", "1", kLong).ok());
  ASSERT_TRUE(store_->QueuePush("q", "1", kLong).ok());
  const auto connection = redis_->Connect();
  const auto keys = connection->Command({"KEYS", "*"});
  EXPECT_EQ(keys->AsArray()->size(), 2);
  const auto elements = *keys->AsArray();
  for (const RedisReply& key : elements) {
    EXPECT_TRUE(absl::StartsWith(*key.AsString(), store_->address().prefix)) << *key.AsString();
    EXPECT_GT(*connection->Command({"TTL", *key.AsString()})->AsInteger(), 24 * 3600);
  }
}

TEST_F(RedisKeyValueStoreTest, RefreshRenewsTheTimeToLive) {
  RedisKeyValueStore::Options options;
  options.key_ttl = absl::Minutes(10);
  ASSERT_TRUE(Open(options)->Set("a", "1", kLong).ok());
  const auto connection = redis_->Connect();
  const std::vector<std::string> ask = {"TTL", store_->address().prefix + "values"};
  EXPECT_LE(*connection->Command(ask)->AsInteger(), 600);
  ASSERT_TRUE(store_->RefreshTtl(kLong).ok());
  EXPECT_GT(*connection->Command(ask)->AsInteger(), 600);
}

TEST_F(RedisKeyValueStoreTest, ReadsRenewTheTimeToLive) {
  RedisKeyValueStore::Options options;
  options.key_ttl = absl::Milliseconds(200);
  const auto reader = Open(options);
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + kLong;
  // A renewal is due after 1% of the time to live. Without a write, only a read can have made it.
  while (redis_->CommandCalls().count("pexpire") == 0 && clock.Now() < deadline) {
    ASSERT_TRUE(reader->Check({"a"}, kLong).ok());
  }
  EXPECT_LT(clock.Now(), deadline);
}

TEST_F(RedisKeyValueStoreTest, StoresOfOtherGenerationsDoNotMeet) {
  ASSERT_TRUE(store_->Set("a", "1", kLong).ok());
  auto other = RedisKeyValueStore::Connect(redis_->Address("other"), {});
  ASSERT_TRUE(other.ok());
  EXPECT_FALSE(*(*other)->Check({"a"}, kLong));
  EXPECT_EQ(*(*other)->NumKeys(kLong), 0);
  EXPECT_EQ(*store_->NumKeys(kLong), 1);
}

TEST_F(RedisKeyValueStoreTest, ListsManyKeysInPages) {
  std::vector<std::string> keys;
  std::vector<std::string> values;
  for (int i = 0; i < 5000; ++i) {
    keys.push_back(absl::StrCat("key-", 10000 + i));
    values.push_back("v");
  }
  ASSERT_TRUE(store_->MultiSet(keys, values, kLong).ok());
  EXPECT_EQ(*store_->ListKeys(kLong), keys);
  EXPECT_EQ(*store_->NumKeys(kLong), 5000);
  EXPECT_EQ(redis_->CommandCalls().count("keys"), 0);
}

TEST_F(RedisKeyValueStoreTest, ManyValuesAreOneRoundTrip) {
  std::vector<std::string> keys;
  std::vector<std::string> values;
  for (int i = 0; i < 1024; ++i) {
    keys.push_back(absl::StrCat("k", i));
    values.push_back(absl::StrCat("v", i));
  }
  ASSERT_TRUE(store_->MultiSet(keys, values, kLong).ok());
  const auto calls = CallsDuring([&] { EXPECT_EQ(*store_->MultiGet(keys, kLong), values); });
  EXPECT_EQ(calls, (std::map<std::string, int64_t>{{"hmget", 1}}));
}

// Redis drops a client that waits for pushes when it sends more than 32 MB to it at once.
TEST_F(RedisKeyValueStoreTest, MuchMoreIsFetchedInPiecesAlsoWhileAnotherWaits) {
  constexpr int kKeys = 2500;
  std::vector<std::string> keys;
  std::vector<std::string> values;
  for (int i = 0; i < kKeys; ++i) {
    keys.push_back(absl::StrCat("k", i));
    values.push_back(std::string(20'000, static_cast<char>('a' + i % 26)));
  }
  ASSERT_TRUE(store_->MultiSet(keys, values, kLong).ok());
  std::thread waiter([&] { EXPECT_EQ(*store_->Get("late", kLong), "v"); });
  AwaitSubscribers(1);
  const auto calls = CallsDuring([&] { EXPECT_TRUE(*store_->MultiGet(keys, kLong) == values); });
  EXPECT_EQ(calls.at("hmget"), 3);
  EXPECT_EQ(calls.count("subscribe"), 0) << "the waiter did not have to begin again";
  EXPECT_TRUE(store_->Set("late", "v", kLong).ok());
  waiter.join();
}

TEST_F(RedisKeyValueStoreTest, AWriteIsOneTransaction) {
  using Calls = std::map<std::string, int64_t>;
  ASSERT_TRUE(store_->Set("a", "1", kLong).ok());
  ASSERT_TRUE(store_->Add("n", 1, kLong).ok());
  EXPECT_EQ(CallsDuring([&] { EXPECT_TRUE(store_->Set("a", "2", kLong).ok()); }),
            (Calls{{"multi", 1}, {"hset", 1}, {"pexpire", 1}, {"publish", 1}, {"exec", 1}}));
  EXPECT_EQ(CallsDuring([&] { EXPECT_TRUE(store_->Add("n", 1, kLong).ok()); }),
            (Calls{{"multi", 1}, {"hincrby", 1}, {"pexpire", 1}, {"publish", 1}, {"exec", 1}}));
}

TEST_F(RedisKeyValueStoreTest, TimeoutNamesWhatIsMissingAndWhere) {
  ASSERT_TRUE(store_->Set("here", "1", kLong).ok());
  const absl::Status status = store_->Wait({"here", "rank1", "rank2"}, kShort);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(absl::StrContains(status.message(), "missing keys: rank1, rank2 (")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), redis_->endpoint().unix_path)) << status;
  std::vector<std::string> many;
  for (int i = 0; i < 20; ++i) many.push_back(absl::StrCat("k", i));
  EXPECT_TRUE(absl::StrContains(store_->Wait(many, kShort).message(), "and 12 more"));
  EXPECT_EQ(store_->Get("gone", kShort).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(store_->QueuePop("gone", kShort).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(store_->MultiGet({"here", "gone"}, kShort).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(*store_->Get("here", kLong), "1") << "the connection is in step after timeouts";
}

// Proves that a blocked wait does not poll: however long it lasts, the server sees only these
// commands.
TEST_F(RedisKeyValueStoreTest, BlockedGetCostsTheServerNothing) {
  const auto setter = Open();
  const auto calls = CallsDuring([&] {
    std::thread waiter([&] { EXPECT_EQ(*store_->Get("late", kLong), "v"); });
    AwaitSubscribers(1);
    EXPECT_TRUE(setter->Set("late", "v", kLong).ok());
    waiter.join();
  });
  EXPECT_EQ(calls.at("hget"), 3) << "at first, when subscribing, and after the push";
  EXPECT_EQ(calls.at("subscribe"), 1);
  EXPECT_EQ(calls.at("unsubscribe"), 1);
  EXPECT_EQ(calls.at("publish"), 1);
}

TEST_F(RedisKeyValueStoreTest, EveryKindOfChangeWakesAWaiter) {
  const auto setter = Open();
  const std::vector<std::function<absl::Status()>> changes = {
      [&] { return setter->Set("k0", "v", kLong); },
      [&] { return setter->Add("k1", 1, kLong).status(); },
      [&] { return setter->Append("k2", "v", kLong); },
      [&] { return setter->CompareSet("k3", "", "v", kLong).status(); },
      [&] {
        return setter->MultiSet({"x", "k4"}, {"v", "v"}, kLong);
      },
      [&] { return setter->QueuePush("k5", "v", kLong); },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    absl::Status waited;
    std::thread waiter([&] { waited = store_->Wait({absl::StrCat("k", i)}, kLong); });
    AwaitSubscribers(1);
    EXPECT_TRUE(changes[i]().ok());
    waiter.join();
    EXPECT_TRUE(waited.ok()) << i << ": " << waited;
  }
}

TEST_F(RedisKeyValueStoreTest, BlockedWaitHoldsUpNoOtherThread) {
  std::thread waiter([&] { EXPECT_EQ(*store_->Get("late", kLong), "v"); });
  AwaitSubscribers(1);
  EXPECT_TRUE(store_->Set("other", "1", kLong).ok());
  EXPECT_EQ(*store_->Add("n", 1, kLong), 1);
  EXPECT_TRUE(store_->Set("late", "v", kLong).ok()) << "through the very object that waits";
  waiter.join();
}

TEST_F(RedisKeyValueStoreTest, AStoreIsOneClientWhateverItsThreadsDo) {
  const auto count = [&] {
    const auto list = redis_->Connect()->Command({"CLIENT", "LIST"});
    const std::string text = list->AsString().value();  // outlives the loop over it
    int lines = 0;
    for (const char character : text) lines += character == '\n';
    return lines - 1;  // without the connection that asks
  };
  EXPECT_EQ(count(), 1);
  std::thread waiter([&] { EXPECT_EQ(*store_->Get("late", kLong), "v"); });
  AwaitSubscribers(1);
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(store_->Set("a", "1", kLong).ok());
    EXPECT_EQ(store_->Get("missing", absl::ZeroDuration()).status().code(),
              absl::StatusCode::kDeadlineExceeded);
  }
  EXPECT_EQ(count(), 1);
  EXPECT_TRUE(store_->Set("late", "v", kLong).ok());
  waiter.join();
  EXPECT_EQ(count(), 1);
}

TEST_F(RedisKeyValueStoreTest, WaitsForAllKeysInAnyOrderOfArrival) {
  constexpr int kKeys = 64;
  std::vector<std::string> keys;
  for (int i = 0; i < kKeys; ++i) keys.push_back(absl::StrCat("k", i));
  const auto setter = Open();
  std::thread waiter([&] {
    const auto values = store_->MultiGet(keys, kLong);
    ASSERT_TRUE(values.ok()) << values.status();
    EXPECT_EQ(*values, keys);
  });
  AwaitSubscribers(1);
  for (int i = 0; i < kKeys; ++i) {
    const std::string& key = keys[(i * 37) % kKeys];
    EXPECT_TRUE(setter->Set(key, key, kLong).ok());
  }
  waiter.join();
}

TEST_F(RedisKeyValueStoreTest, QueueElementsGoToOneTakerEachInOrder) {
  constexpr int kTakers = 4;
  constexpr int kElements = 100;
  std::vector<std::vector<int>> taken(kTakers);
  std::vector<std::thread> takers;
  takers.reserve(kTakers);
  for (int t = 0; t < kTakers; ++t) {
    takers.emplace_back([&, t] {
      while (true) {
        const std::string element = *store_->QueuePop("q", kLong);
        if (element == "end") return;
        taken[t].push_back(std::stoi(element));
      }
    });
  }
  const auto pusher = Open();
  for (int i = 0; i < kElements; ++i) {
    ASSERT_TRUE(pusher->QueuePush("q", absl::StrCat(i), kLong).ok());
  }
  for (int t = 0; t < kTakers; ++t) ASSERT_TRUE(pusher->QueuePush("q", "end", kLong).ok());
  for (std::thread& taker : takers) taker.join();
  std::vector<bool> seen(kElements);
  for (const std::vector<int>& list : taken) {
    for (size_t i = 0; i < list.size(); ++i) {
      EXPECT_FALSE(seen[list[i]]) << list[i] << " was taken twice";
      seen[list[i]] = true;
      EXPECT_TRUE(i == 0 || list[i] > list[i - 1]);
    }
  }
  for (int i = 0; i < kElements; ++i) EXPECT_TRUE(seen[i]) << i << " was lost";
  EXPECT_EQ(*pusher->QueueLength("q", kLong), 0);
}

TEST_F(RedisKeyValueStoreTest, ManyThreadsOnOneObject) {
  constexpr int kThreads = 8;
  constexpr int kRounds = 50;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kRounds; ++i) {
        EXPECT_TRUE(store_->Add("sum", 1, kLong).ok());
        EXPECT_TRUE(store_->Set(absl::StrCat("t", t, "/", i), "v", kLong).ok());
        // Each thread waits for its neighbour, so it is blocked and blocks another.
        EXPECT_EQ(*store_->Get(absl::StrCat("t", (t + 1) % kThreads, "/", i), kLong), "v");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(*store_->Get("sum", kLong), absl::StrCat(kThreads * kRounds));
}

TEST_F(RedisKeyValueStoreTest, WaiterSurvivesTheLossOfTheServer) {
  std::thread waiter([&] {
    const auto value = store_->Get("late", kLong);
    EXPECT_TRUE(value.ok()) << value.status();
  });
  AwaitSubscribers(1);
  redis_->Restart();
  AwaitSubscribers(1);
  EXPECT_TRUE(Open()->Set("late", "v", kLong).ok());
  waiter.join();
}

// No unanswered LPOP was sent, so no element can have been taken.
TEST_F(RedisKeyValueStoreTest, BlockedPopSurvivesTheLossOfTheServer) {
  std::thread waiter([&] {
    const auto value = store_->QueuePop("q", kLong);
    ASSERT_TRUE(value.ok()) << value.status();
    EXPECT_EQ(*value, "v");
  });
  AwaitSubscribers(1);
  redis_->Restart();
  AwaitSubscribers(1);
  EXPECT_TRUE(Open()->QueuePush("q", "v", kLong).ok());
  waiter.join();
}

// A wait ends at its own deadline, not at the timeout of one question.
TEST_F(RedisKeyValueStoreTest, WaiterSurvivesASilentServer) {
  RedisKeyValueStore::Options options;
  options.connection.command_timeout = absl::Milliseconds(100);
  std::vector<std::unique_ptr<RedisKeyValueStore>> stores;
  for (int i = 0; i < 3; ++i) stores.push_back(Open(options));
  std::vector<std::thread> waiters;
  waiters.emplace_back([&] { EXPECT_TRUE(stores[0]->Get("late", kLong).ok()); });
  waiters.emplace_back([&] { EXPECT_TRUE(stores[1]->MultiGet({"late"}, kLong).ok()); });
  waiters.emplace_back([&] { EXPECT_TRUE(stores[2]->Wait({"late"}, kLong).ok()); });
  AwaitSubscribers(3);
  // Wakes all waiters, and answers no question for a second.
  const std::string channel = store_->address().prefix + "changed:late";
  const auto silenced = redis_->Connect()->Transaction(
      {{"CLIENT", "PAUSE", "1000", "ALL"}, {"PUBLISH", channel, ""}});
  ASSERT_TRUE(silenced.ok()) << silenced.status();
  EXPECT_TRUE(store_->Set("late", "v", kLong).ok());
  for (std::thread& waiter : waiters) waiter.join();
}

TEST_F(RedisKeyValueStoreTest, LostServerIsUnavailableWithinTheTimeout) {
  redis_->Kill();
  const absl::Status status = store_->Set("a", "1", kShort);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), redis_->endpoint().unix_path)) << status;
  EXPECT_EQ(store_->Get("a", kShort).status().code(), absl::StatusCode::kUnavailable);
  redis_->Restart();
  EXPECT_TRUE(store_->Set("a", "1", kLong).ok()) << "and mends itself";
}

TEST_F(RedisKeyValueStoreTest, WorksWithTheRightsThatTheHeaderNames) {
  const auto redis = RedisFixture::StartTcp("root");
  ASSERT_TRUE(
      redis->Connect()
          ->Command({"ACL",        "SETUSER",  "job",      "on",       ">secret",    "~ddp:{j}:*",
                     "&ddp:{j}:*", "-@all",    "+hget",    "+hmget",   "+hset",      "+hdel",
                     "+hlen",      "+hexists", "+hscan",   "+hincrby", "+exists",    "+lpop",
                     "+llen",      "+rpush",   "+pexpire", "+publish", "+subscribe", "+unsubscribe",
                     "+multi",     "+exec",    "+eval",    "+evalsha", "+ping",      "+select"})
          .ok());
  StoreAddress address = redis->Address("j");
  address.endpoint.user = "job";
  address.endpoint.password = "secret";
  const auto store = RedisKeyValueStore::Connect(address, {});
  ASSERT_TRUE(store.ok()) << store.status();
  RedisKeyValueStore& s = **store;
  EXPECT_TRUE(s.Set("a", "1", kLong).ok());
  EXPECT_TRUE(s.Append("a", "2", kLong).ok());
  EXPECT_TRUE(s.Add("n", 1, kLong).ok());
  EXPECT_TRUE(s.CompareSet("c", "", "1", kLong).ok());
  EXPECT_TRUE(s.MultiSet({"x", "y"}, {"1", "2"}, kLong).ok());
  EXPECT_TRUE(s.MultiGet({"x", "y"}, kLong).ok());
  EXPECT_TRUE(s.Check({"a", "b"}, kLong).ok());
  EXPECT_TRUE(s.Delete("a", kLong).ok());
  EXPECT_TRUE(s.NumKeys(kLong).ok());
  EXPECT_TRUE(s.ListKeys(kLong).ok());
  EXPECT_TRUE(s.RefreshTtl(kLong).ok());
  EXPECT_TRUE(s.QueuePush("q", "1", kLong).ok());
  EXPECT_TRUE(s.QueueLength("q", kLong).ok());
  EXPECT_TRUE(s.QueueTryPop("q", kLong).ok());
  EXPECT_EQ(s.Wait({"later"}, kShort).code(), absl::StatusCode::kDeadlineExceeded);
  address.prefix = "ddp:{other}:";
  EXPECT_EQ((*RedisKeyValueStore::Connect(address, {}))->Set("a", "1", kLong).code(),
            absl::StatusCode::kPermissionDenied);
}

// A change that the server would refuse in part is not started.
TEST(RedisKeyValueStoreAclTest, ARefusedChangeHasChangedNothing) {
  const auto redis = RedisFixture::Start();
  const auto root = redis->Connect();
  const auto rules = [&](const std::vector<std::string>& more) {
    std::vector<std::string> command = {"ACL", "SETUSER", "job", "reset", "on", ">secret"};
    for (const auto& rule : absl::StrSplit(JobAclRules("j"), ' ')) command.emplace_back(rule);
    command.insert(command.end(), more.begin(), more.end());
    ASSERT_TRUE(root->Command(command).ok());
  };
  StoreAddress address = redis->Address("j");
  address.endpoint.user = "job";
  address.endpoint.password = "secret";
  for (const char* missing : {"-hset", "-pexpire", "-publish", "resetchannels"}) {
    rules({});
    ASSERT_TRUE(root->Command({"FLUSHALL"}).ok());
    const auto store = *RedisKeyValueStore::Connect(address, {});
    ASSERT_TRUE(store->Set("there", "1", kLong).ok());
    const std::string values = absl::StrCat(address.prefix, "values");
    const auto before = root->Command({"DUMP", values})->AsString();
    rules({missing});
    for (const char* key : {"there", "new"}) {
      SCOPED_TRACE(absl::StrCat(missing, ", key ", key));
      for (const absl::Status& status :
           {store->Set(key, "2", kLong), store->MultiSet({key, "other"}, {"2", "2"}, kLong),
            store->Append(key, "2", kLong),
            store->CompareSet(key, key == std::string("there") ? "1" : "", "2", kLong).status()}) {
        EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
        EXPECT_EQ(root->Command({"DUMP", values})->AsString(), before);
      }
    }
  }
}

}  // namespace
}  // namespace ddp::store
