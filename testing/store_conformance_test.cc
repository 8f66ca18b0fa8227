// The conformance tests of every c10d::Store. They run on LibTorch's own stores, on LibTorch's
// TCPStore client with our server, and on RedisStore, each also behind a PrefixStore. So our stores
// must behave as LibTorch's, and LibTorch's as we describe them.
//
// The stores differ in a few points, which `StoreKind` lists. All other tests must pass for all
// stores.
//
// Length: one contract. Every case runs on every store, so all cases belong to one parameterized
// suite.

#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "c10/util/Exception.h"
#include "ddp/comm/backend/gloo_backend.h"
#include "gtest/gtest.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis_store/redis_store.h"
#include "store/tcp_store/tcp_store_server.h"
#include "testing/error_of.h"
#include "testing/redis/redis_fixture.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/FileStore.hpp"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace ddp::testing {
namespace {

using Bytes = std::vector<uint8_t>;
using Milliseconds = std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr Milliseconds kLong = std::chrono::seconds(60);
constexpr Milliseconds kShort{40};

Bytes B(const std::string& text) { return Bytes(text.begin(), text.end()); }
std::string S(const Bytes& bytes) { return std::string(bytes.begin(), bytes.end()); }

// A thread whose exceptions fail the test instead of ending the process.
std::thread Go(std::function<void()> work) {
  return std::thread([work = std::move(work)] {
    try {
      work();
    } catch (const c10::Error& error) {
      ADD_FAILURE() << error.what_without_backtrace();
    }
  });
}

// A store that any number of clients open.
class StoreWorld {
 public:
  virtual ~StoreWorld() = default;
  virtual StorePtr Open() = 0;
};

class HashWorld final : public StoreWorld {
 public:
  StorePtr Open() override { return store_; }

 private:
  const StorePtr store_ = c10::make_intrusive<c10d::HashStore>();
};

class FileWorld final : public StoreWorld {
 public:
  FileWorld() { TORCH_CHECK(mkdtemp(folder_) != nullptr); }
  ~FileWorld() override {
    unlink(Path().c_str());
    rmdir(folder_);
  }
  StorePtr Open() override { return c10::make_intrusive<c10d::FileStore>(Path(), kClients); }

 private:
  static constexpr int kClients = 1000;  // FileStore removes its file after this number have left
  std::string Path() const { return std::string(folder_) + "/store"; }

  char folder_[32] = "/tmp/ddp-test-XXXXXX";
};

class TcpWorld final : public StoreWorld {
 public:
  TcpWorld() {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    server_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }
  StorePtr Open() override {
    c10d::TCPStoreOptions options;
    options.port = server_->getPort();
    options.waitWorkers = false;
    return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }

 private:
  c10::intrusive_ptr<c10d::TCPStore> server_;
};

// Our server with LibTorch's clients.
class OurTcpWorld final : public StoreWorld {
 public:
  explicit OurTcpWorld(bool use_libuv) : use_libuv_(use_libuv) {
    stop_.reset(eventfd(0, EFD_CLOEXEC));
    TORCH_CHECK(
        event_loop_->Watch(stop_.get(), EPOLLIN, [this](uint32_t) { event_loop_->Stop(); }).ok());
    thread_ = std::thread([this] { TORCH_CHECK(event_loop_->Run().ok()); });
  }
  ~OurTcpWorld() override {
    const uint64_t one = 1;
    TORCH_CHECK(write(stop_.get(), &one, sizeof(one)) == sizeof(one));
    thread_.join();
  }
  StorePtr Open() override {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(server_->port());
    options.waitWorkers = false;
    options.useLibUV = use_libuv_;
    return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }

 private:
  const bool use_libuv_;
  const std::unique_ptr<EventLoop> event_loop_ = *EventLoop::Create();
  const std::unique_ptr<store::TcpStoreServer> server_ =
      *store::TcpStoreServer::Listen(event_loop_.get(), "127.0.0.1", 0);
  UniqueFd stop_;
  std::thread thread_;
};

class RedisWorld final : public StoreWorld {
 public:
  StorePtr Open() override { return c10::make_intrusive<store::RedisStore>(redis_->Address()); }

 private:
  const std::unique_ptr<RedisFixture> redis_ = RedisFixture::Start();
};

class PrefixWorld final : public StoreWorld {
 public:
  explicit PrefixWorld(std::unique_ptr<StoreWorld> inner) : inner_(std::move(inner)) {}
  StorePtr Open() override { return c10::make_intrusive<c10d::PrefixStore>("p", inner_->Open()); }

 private:
  const std::unique_ptr<StoreWorld> inner_;
};

std::unique_ptr<StoreWorld> MakeOurTcp() { return std::make_unique<OurTcpWorld>(true); }
std::unique_ptr<StoreWorld> MakeOurTcpForLegacyClients() {
  return std::make_unique<OurTcpWorld>(false);
}
std::unique_ptr<StoreWorld> MakeOurTcpPrefixed() {
  return std::make_unique<PrefixWorld>(MakeOurTcp());
}

template <typename World>
std::unique_ptr<StoreWorld> Make() {
  return std::make_unique<World>();
}

template <typename World>
std::unique_ptr<StoreWorld> MakePrefixed() {
  return std::make_unique<PrefixWorld>(std::make_unique<World>());
}

struct StoreKind {
  const char* name;
  std::unique_ptr<StoreWorld> (*make)();
  // FileStore throws the base class, knows no queues or extended calls, answers deleteKey with true
  // for a key that is not there, and gives its clone the default timeout.
  bool is_file = false;
  // LibTorch's client, with its server or ours. TCPStore holds its only connection, and a lock,
  // while it waits, and does not know kNoTimeout.
  bool is_tcp = false;
  // A PrefixStore also lists and counts keys under other prefixes.
  bool prefixed = false;
};

void PrintTo(const StoreKind& kind, std::ostream* out) { *out << kind.name; }

class StoreConformanceTest : public ::testing::TestWithParam<StoreKind> {
 protected:
  StorePtr Open() {
    StorePtr store = world_->Open();
    store->setTimeout(kLong);
    return store;
  }

  // Expects from `work` the error that this store throws for a timeout.
  void ExpectTimeout(const std::function<void()>& work) {
    if (GetParam().is_file) {
      EXPECT_THROW(work(), c10::Error);
    } else {
      EXPECT_THROW(work(), c10::DistStoreError);
    }
  }

  const std::unique_ptr<StoreWorld> world_ = GetParam().make();
  const StorePtr store_ = Open();
};

// Tests of stores with the extended API.
class ExtendedConformanceTest : public StoreConformanceTest {};

TEST_P(StoreConformanceTest, GetReturnsWhatWasSetByAnyClient) {
  const StorePtr other = Open();
  store_->set("a", "1");
  EXPECT_EQ(other->get_to_str("a"), "1");
  other->set("a", "22");
  // TCPStore's set returns before the server applies it. Later commands on the same connection are
  // applied after it.
  EXPECT_EQ(other->get_to_str("a"), "22");
  EXPECT_EQ(store_->get_to_str("a"), "22");
}

TEST_P(StoreConformanceTest, ValuesAndKeysHoldAnyBytes) {
  Bytes all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<uint8_t>(byte));
  store_->set("binary", all);
  EXPECT_EQ(store_->get("binary"), all);
  store_->set("empty", "");
  EXPECT_EQ(store_->get_to_str("empty"), "");
  EXPECT_TRUE(store_->check({"empty"}));
  for (const std::string& key :
       {std::string(""), std::string("a b/c:{d}*?[e]"), std::string("\xc3\xa4\n\0z", 5)}) {
    store_->set(key, "v" + key);
    EXPECT_EQ(store_->get_to_str(key), "v" + key);
  }
}

TEST_P(StoreConformanceTest, LargeValues) {
  Bytes large(4 << 20);
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<uint8_t>(i * 2654435761U >> 24);
  store_->set("large", large);
  EXPECT_EQ(Open()->get("large"), large);
}

TEST_P(StoreConformanceTest, GetWaitsForTheKey) {
  const StorePtr other = Open();
  std::string got;
  std::thread waiter = Go([&] { got = other->get_to_str("late"); });
  store_->set("unrelated", "x");
  store_->set("late", "v");
  waiter.join();
  EXPECT_EQ(got, "v");
}

TEST_P(StoreConformanceTest, GetTimesOut) {
  store_->setTimeout(kShort);
  ExpectTimeout([&] { store_->get("never"); });
  store_->set("a", "1");
  EXPECT_EQ(store_->get_to_str("a"), "1") << "usable after a timeout";
}

TEST_P(StoreConformanceTest, WaitReturnsWhenAllAreThere) {
  const StorePtr other = Open();
  store_->set("a", "1");
  store_->wait({"a"});
  store_->wait({});
  std::thread waiter = Go([&] { other->wait({"a", "b", "c"}, kLong); });
  store_->set("c", "1");
  store_->add("b", 1);
  waiter.join();
  EXPECT_TRUE(store_->check({"a", "b", "c"}));
}

TEST_P(StoreConformanceTest, WaitWithoutTimeoutWaits) {
  if (GetParam().is_tcp) {
    // TCPStore treats a timeout of 0 as expired.
    ExpectTimeout([&] { store_->wait({"late"}, c10d::Store::kNoTimeout); });
    return;
  }
  const StorePtr other = Open();
  std::thread waiter = Go([&] { other->wait({"late"}, c10d::Store::kNoTimeout); });
  store_->set("late", "v");
  waiter.join();
}

TEST_P(StoreConformanceTest, WaitTimesOutAlthoughSomeAreThere) {
  store_->set("a", "1");
  ExpectTimeout([&] { store_->wait({"a", "never"}, kShort); });
  store_->setTimeout(kShort);
  ExpectTimeout([&] { store_->wait({"never"}); });
}

TEST_P(StoreConformanceTest, CheckDoesNotWait) {
  EXPECT_TRUE(store_->check({}));
  EXPECT_FALSE(store_->check({"a"}));
  store_->set("a", "1");
  EXPECT_TRUE(store_->check({"a"}));
  EXPECT_FALSE(store_->check({"a", "b"}));
}

TEST_P(StoreConformanceTest, AddCountsInDecimalText) {
  EXPECT_EQ(store_->add("n", 5), 5);
  EXPECT_EQ(store_->get_to_str("n"), "5");
  EXPECT_EQ(store_->add("n", -7), -2);
  EXPECT_EQ(store_->get_to_str("n"), "-2");
  EXPECT_EQ(store_->add("n", 0), -2);
  store_->set("text", "40");
  EXPECT_EQ(store_->add("text", 2), 42);
  constexpr int64_t kLarge = std::numeric_limits<int64_t>::max() - 1;
  EXPECT_EQ(store_->add("large", kLarge), kLarge);
  EXPECT_EQ(store_->add("large", 1), kLarge + 1);
}

TEST_P(StoreConformanceTest, AddsOfManyClientsAllCount) {
  constexpr int kClients = 4;
  constexpr int kAdds = 25;
  std::vector<std::thread> threads;
  std::vector<std::set<int64_t>> seen(kClients);
  threads.reserve(kClients);
  for (int c = 0; c < kClients; ++c) {
    threads.push_back(Go([&, c, store = Open()] {
      for (int i = 0; i < kAdds; ++i) seen[c].insert(store->add("n", 1));
    }));
  }
  for (std::thread& thread : threads) thread.join();
  std::set<int64_t> all;
  for (const std::set<int64_t>& values : seen) all.insert(values.begin(), values.end());
  EXPECT_EQ(all.size(), kClients * kAdds) << "each sum is seen once";
  EXPECT_EQ(store_->get_to_str("n"), std::to_string(kClients * kAdds));
}

TEST_P(StoreConformanceTest, CompareSetHasFourCases) {
  // The key is missing, and a value is expected: nothing is set.
  EXPECT_EQ(store_->compareSet("k", std::string("x"), std::string("new")), "x");
  EXPECT_FALSE(store_->check({"k"}));
  // The key is missing, and nothing is expected: the value is set.
  EXPECT_EQ(store_->compareSet("k", std::string(""), std::string("one")), "one");
  EXPECT_EQ(store_->get_to_str("k"), "one");
  // The value differs from the expected one: the present value is returned.
  EXPECT_EQ(store_->compareSet("k", std::string("x"), std::string("two")), "one");
  EXPECT_EQ(store_->compareSet("k", std::string(""), std::string("two")), "one");
  EXPECT_EQ(store_->get_to_str("k"), "one");
  // The value is the expected one: it is replaced.
  EXPECT_EQ(store_->compareSet("k", std::string("one"), std::string("two")), "two");
  EXPECT_EQ(store_->get_to_str("k"), "two");
  // An empty expected value means that nothing is expected, and matches an empty value.
  store_->set("empty", "");
  EXPECT_EQ(store_->compareSet("empty", std::string(""), std::string("v")), "v");
}

TEST_P(StoreConformanceTest, CompareSetHasOneWinner) {
  constexpr int kClients = 4;
  std::vector<std::string> results(kClients);
  std::vector<std::thread> threads;
  threads.reserve(kClients);
  for (int c = 0; c < kClients; ++c) {
    threads.push_back(Go([&, c, store = Open()] {
      results[c] = store->compareSet("leader", std::string(""), std::to_string(c));
    }));
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& result : results) EXPECT_EQ(result, store_->get_to_str("leader"));
}

TEST_P(StoreConformanceTest, CompareSetWakesAWaiter) {
  const StorePtr other = Open();
  std::thread waiter = Go([&] { EXPECT_EQ(other->get_to_str("late"), "v"); });
  store_->compareSet("late", std::string(""), std::string("v"));
  waiter.join();
}

TEST_P(StoreConformanceTest, DeletedKeysAreGone) {
  const int64_t before = store_->getNumKeys();
  store_->set("a", "1");
  EXPECT_EQ(store_->getNumKeys(), before + 1);
  EXPECT_TRUE(store_->deleteKey("a"));
  EXPECT_FALSE(store_->check({"a"}));
  EXPECT_EQ(store_->getNumKeys(), before);
  EXPECT_EQ(store_->deleteKey("a"), GetParam().is_file);
  store_->set("a", "2");
  EXPECT_EQ(store_->get_to_str("a"), "2");
}

TEST_P(StoreConformanceTest, KeysAreCounted) {
  const int64_t before = store_->getNumKeys();
  for (const char* key : {"a", "b", "a"}) store_->set(key, "1");
  store_->add("c", 1);
  EXPECT_EQ(store_->getNumKeys(), before + 3);
  EXPECT_EQ(Open()->getNumKeys() >= before + 3, true);
}

TEST_P(StoreConformanceTest, KeysAreListed) {
  store_->set("a", "1");
  store_->set("b", "1");
  store_->deleteKey("a");
  const std::vector<std::string> keys = store_->listKeys();
  const auto has = [&](const std::string& key) {
    return std::any_of(keys.begin(), keys.end(), [&](const std::string& listed) {
      return GetParam().prefixed
                 ? listed.size() >= key.size() && listed.substr(listed.size() - key.size()) == key
                 : listed == key;
    });
  };
  EXPECT_TRUE(has("b"));
  EXPECT_FALSE(has("a"));
}

TEST_P(StoreConformanceTest, CloneSharesTheKeys) {
  const StorePtr clone = store_->clone();
  store_->set("a", "1");
  EXPECT_EQ(clone->get_to_str("a"), "1");
  clone->set("b", "2");
  EXPECT_EQ(store_->get_to_str("b"), "2");
  const Milliseconds expected = GetParam().is_file ? c10d::Store::kDefaultTimeout : kLong;
  EXPECT_EQ(clone->getTimeout(), expected);
}

TEST_P(StoreConformanceTest, TimeoutIsKept) {
  store_->setTimeout(Milliseconds(1234));
  EXPECT_EQ(store_->getTimeout(), Milliseconds(1234));
  {
    const c10d::StoreTimeoutGuard guard(*store_, kShort);
    ExpectTimeout([&] { store_->get("never"); });
  }
  EXPECT_EQ(store_->getTimeout(), Milliseconds(1234));
}

TEST_P(StoreConformanceTest, MembersReadEachOthersAddresses) {
  constexpr int kMembers = 8;
  std::vector<std::thread> threads;
  threads.reserve(kMembers);
  for (int m = 0; m < kMembers; ++m) {
    threads.push_back(Go([m, store = Open()] {
      store->set("address/" + std::to_string(m), "host-" + std::to_string(m));
      for (int peer = 0; peer < kMembers; ++peer) {
        EXPECT_EQ(store->get_to_str("address/" + std::to_string(peer)),
                  "host-" + std::to_string(peer));
      }
    }));
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(StoreConformanceTest, PrefixesSeparate) {
  const auto one = c10::make_intrusive<c10d::PrefixStore>("one", store_);
  const auto two = c10::make_intrusive<c10d::PrefixStore>("two", store_);
  one->set("k", "1");
  EXPECT_FALSE(two->check({"k"}));
  two->set("k", "2");
  EXPECT_EQ(one->get_to_str("k"), "1");
}

TEST_P(StoreConformanceTest, AppendAndMultiCallsWorkOnEveryStore) {
  store_->append("log", B("a"));
  store_->append("log", B("b"));
  EXPECT_EQ(store_->get_to_str("log"), "ab");
  store_->multiSet({"x", "y"}, {B("1"), B("2")});
  const std::vector<Bytes> values = store_->multiGet({"y", "x", "y"});
  ASSERT_EQ(values.size(), 3);
  EXPECT_EQ(S(values[0]) + S(values[1]) + S(values[2]), "212");
  EXPECT_TRUE(store_->multiGet({}).empty());
  store_->multiSet({}, {});
  EXPECT_EQ(store_->hasExtendedApi(), !GetParam().is_file);
}

TEST_P(StoreConformanceTest, MultiGetWaitsForAllAndTimesOut) {
  store_->set("here", "1");
  store_->setTimeout(kShort);
  ExpectTimeout([&] { store_->multiGet({"here", "never"}); });
  store_->setTimeout(kLong);
  const StorePtr other = Open();
  std::thread waiter = Go([&] {
    const std::vector<Bytes> values = other->multiGet({"here", "late"});
    EXPECT_EQ(S(values[0]) + S(values[1]), "12");
  });
  store_->multiSet({"late"}, {B("2")});
  waiter.join();
}

TEST_P(ExtendedConformanceTest, AppendsOfManyClientsAllArrive) {
  constexpr int kClients = 4;
  constexpr int kAppends = 20;
  std::vector<std::thread> threads;
  threads.reserve(kClients);
  for (int c = 0; c < kClients; ++c) {
    threads.push_back(Go([c, store = Open()] {
      for (int i = 0; i < kAppends; ++i) store->append("log", B(std::string(1, 'a' + c)));
    }));
  }
  for (std::thread& thread : threads) thread.join();
  const std::string log = store_->get_to_str("log");
  EXPECT_EQ(log.size(), kClients * kAppends);
  for (int c = 0; c < kClients; ++c) {
    EXPECT_EQ(std::count(log.begin(), log.end(), 'a' + c), kAppends);
  }
}

TEST_P(ExtendedConformanceTest, AnotherThreadOfTheSameObjectSetsWhileOneWaits) {
  if (GetParam().is_tcp) {
    // On one TCPStore the two threads deadlock until the timeout, so each has its own client.
    const StorePtr other = Open();
    std::thread waiter = Go([&] { store_->get("late"); });
    other->set("late", "v");
    waiter.join();
    return;
  }
  std::thread waiter = Go([&] { store_->get("late"); });
  store_->set("late", "v");
  waiter.join();
}

TEST_P(ExtendedConformanceTest, QueuesAreFirstInFirstOut) {
  const StorePtr other = Open();
  EXPECT_EQ(store_->queueLen("q"), 0);
  store_->queuePush("q", B("a"));
  store_->queuePush("q", B(""));
  EXPECT_EQ(store_->queueLen("q"), 2);
  other->queuePush("q", B("c"));
  EXPECT_EQ(other->queueLen("q"), 3);
  EXPECT_EQ(S(other->queuePop("q", true)), "a");
  EXPECT_EQ(S(store_->queuePop("q", false)), "");
  EXPECT_EQ(S(store_->queuePop("q", true)), "c");
  EXPECT_EQ(other->queueLen("q"), 0);
}

TEST_P(ExtendedConformanceTest, EmptyQueues) {
  EXPECT_THROW(store_->queuePop("q", false), c10::DistQueueEmptyError);
  store_->setTimeout(kShort);
  ExpectTimeout([&] { store_->queuePop("q", true); });
  store_->setTimeout(kLong);
  const StorePtr other = Open();
  std::thread waiter = Go([&] { EXPECT_EQ(S(other->queuePop("q", true)), "v"); });
  store_->queuePush("q", B("v"));
  waiter.join();
}

TEST_P(ExtendedConformanceTest, QueuesArePresentButNotKeys) {
  const int64_t before = store_->getNumKeys();
  EXPECT_FALSE(store_->check({"q"}));
  store_->queuePush("q", B("v"));
  EXPECT_TRUE(store_->check({"q"}));
  store_->wait({"q"}, kShort);
  EXPECT_EQ(store_->getNumKeys(), before);
  EXPECT_FALSE(store_->deleteKey("q"));
  EXPECT_EQ(store_->queueLen("q"), 1) << "deleteKey removes values";
  store_->set("q", "value");
  EXPECT_EQ(store_->get_to_str("q"), "value") << "a value and a queue of one name do not meet";
  EXPECT_EQ(S(store_->queuePop("q", true)), "v");
}

const StoreKind kHash{"Hash", &Make<HashWorld>};
const StoreKind kFile{"File", &Make<FileWorld>, /*is_file=*/true};
const StoreKind kTcp{"Tcp", &Make<TcpWorld>, false, /*is_tcp=*/true};
const StoreKind kOurTcp{"OurTcp", &MakeOurTcp, false, /*is_tcp=*/true};
// A client without queues.
const StoreKind kOurLegacyTcp{"OurLegacyTcp", &MakeOurTcpForLegacyClients, false, true};
const StoreKind kRedis{"Redis", &Make<RedisWorld>};
const StoreKind kPrefixHash{"PrefixHash", &MakePrefixed<HashWorld>, false, false, true};
const StoreKind kPrefixFile{"PrefixFile", &MakePrefixed<FileWorld>, true, false, true};
const StoreKind kPrefixTcp{"PrefixTcp", &MakePrefixed<TcpWorld>, false, true, true};
const StoreKind kPrefixOurTcp{"PrefixOurTcp", &MakeOurTcpPrefixed, false, true, true};
const StoreKind kPrefixRedis{"PrefixRedis", &MakePrefixed<RedisWorld>, false, false, true};

std::string NameOf(const ::testing::TestParamInfo<StoreKind>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Stores, StoreConformanceTest,
                         ::testing::Values(kHash, kFile, kTcp, kOurTcp, kOurLegacyTcp, kRedis,
                                           kPrefixHash, kPrefixFile, kPrefixTcp, kPrefixOurTcp,
                                           kPrefixRedis),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Stores, ExtendedConformanceTest,
                         ::testing::Values(kHash, kTcp, kOurTcp, kRedis, kPrefixHash, kPrefixTcp,
                                           kPrefixOurTcp, kPrefixRedis),
                         NameOf);

// Tests of RedisStore alone.
// --------------------------------------------------------------------------------

class RedisStoreTest : public ::testing::Test {
 protected:
  const std::unique_ptr<RedisFixture> redis_ = RedisFixture::Start();
};

TEST_F(RedisStoreTest, TimeoutSaysWhatIsMissingAndForHowLong) {
  const auto store = c10::make_intrusive<store::RedisStore>(redis_->Address());
  try {
    store->wait({"rank7"}, kShort);
    FAIL() << "no error";
  } catch (const c10::DistStoreError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("wait timeout after "), std::string::npos) << text;
    EXPECT_NE(text.find("missing keys: rank7"), std::string::npos) << text;
  }
}

TEST_F(RedisStoreTest, MistakesAreErrorsOfTheirKind) {
  const auto store = c10::make_intrusive<store::RedisStore>(redis_->Address());
  store->set("text", "abc");
  EXPECT_THROW(store->add("text", 1), c10::DistStoreError);
  EXPECT_EQ(store->get_to_str("text"), "abc") << "and nothing is broken by it";
  EXPECT_THROW(store->multiSet({"a", "b"}, {B("1")}), c10::ValueError);
  EXPECT_THROW(store::RedisStore::connect("not an address"), c10::ValueError);
  redis_->Kill();
  store->setTimeout(kShort);
  const std::string gone = ErrorOf<c10::DistNetworkError>([&] { store->set("a", "1"); });
  EXPECT_NE(gone.find("cannot reach Redis"), std::string::npos) << gone;
  EXPECT_EQ(gone.find('\n'), std::string::npos) << "one line, without a stack trace: " << gone;
  EXPECT_THROW(store::RedisStore(redis_->Address(), kShort), c10::DistNetworkError);
}

TEST_F(RedisStoreTest, ConnectsByUrlWithThePasswordOfTheEnvironment) {
  const auto redis = RedisFixture::StartTcp("open-sesame");
  const std::string url = store::FormatStoreAddress(redis->Address());
  EXPECT_EQ(url.find("sesame"), std::string::npos);
  EXPECT_THROW(store::RedisStore::connect(url), c10::DistStoreError);
  setenv("DDP_REDIS_PASSWORD", "open-sesame", 1);
  const auto store = store::RedisStore::connect(url);
  unsetenv("DDP_REDIS_PASSWORD");
  store->set("a", "1");
  EXPECT_EQ(store->clone()->get_to_str("a"), "1") << "a clone keeps the password";
}

TEST_F(RedisStoreTest, GlooMeetsOverIt) {
  constexpr int kRanks = 3;
  std::vector<std::thread> ranks;
  ranks.reserve(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(Go([&, rank] {
      const auto redis = c10::make_intrusive<store::RedisStore>(redis_->Address());
      const auto backend = internal::MakeGlooBackend(
          c10::make_intrusive<c10d::PrefixStore>("gloo", redis),
          {.rank = rank, .size = kRanks, .timeout = absl::Seconds(60), .single_host = true});
      std::vector<at::Tensor> tensors = {at::full({4}, rank + 1.0)};
      backend->allreduce(tensors)->wait();
      EXPECT_TRUE(tensors[0].equal(at::full({4}, 6.0)));
    }));
  }
  for (std::thread& thread : ranks) thread.join();
}

}  // namespace
}  // namespace ddp::testing
