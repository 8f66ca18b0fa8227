// RedisStore beside LibTorch's TCPStore: the program of the report's section on stores.
//
//   tools/bench/report --only=store
//
// Three subjects take turns in every round, so that a slower machine is slower for all of them:
// TCPStore (libuv, its server in a process of its own), RedisStore over TCP, RedisStore over the
// unix socket of the same redis-server. Prints a line of JSON for each operation: its name, and for
// each subject the microseconds of each round. The last line has "polls": the server's commands in
// a second of eight blocked waits. TCPStore does not wait for the reply to a set, so the benchmark
// measures a set followed by a get.

#include <gflags/gflags.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
#include "c10/util/Exception.h"
#include "nlohmann/json.hpp"
#include "store/redis/redis_endpoint.h"
#include "store/redis_store/redis_store.h"
#include "testing/redis/redis_fixture.h"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

DEFINE_int32(rounds, 15, "rounds of every measurement");
DEFINE_int32(calls, 200, "calls per round of the small operations");
DEFINE_int32(members, 256, "clients that join and read each other's addresses");
DEFINE_int32(join_rounds, 5,
             "rounds of the joining, which makes `members` threads and connections");

namespace ddp {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Bytes = std::vector<uint8_t>;
using Json = nlohmann::ordered_json;

constexpr int kManyKeys = 1024;
constexpr char kAddress[] = "10.123.231.132:54321#rank007";

struct Subject {
  std::string name;
  std::function<StorePtr()> open;
  StorePtr store;
};

// Starts TCPStore's server in a process that ends with this one. Returns its port.
uint16_t StartTcpServer() {
  int ends[2];
  TORCH_CHECK(pipe(ends) == 0);
  const UniqueFd from(ends[0]);
  const UniqueFd to(ends[1]);
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  if (fork() == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const c10d::TCPStore server("127.0.0.1", options);
    TORCH_CHECK(server.isLibUvBackend());
    const uint16_t port = server.getPort();
    TORCH_CHECK(write(to.get(), &port, sizeof(port)) == sizeof(port));
    while (true) pause();
  }
  uint16_t port = 0;
  TORCH_CHECK(read(from.get(), &port, sizeof(port)) == sizeof(port), "no TCPStore server");
  return port;
}

StorePtr OpenTcpStore(uint16_t port) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double MicrosecondsOf(const std::function<void()>& work) {
  const int64_t start = MonotonicNanoseconds();
  work();
  return static_cast<double>(MonotonicNanoseconds() - start) / 1000.0;
}

void PauseMilliseconds(int milliseconds) { poll(nullptr, 0, milliseconds); }

// Measures `once`, which returns microseconds, for each subject in each round, and prints it.
void Compare(const std::vector<Subject>& subjects, const std::string& what, int rounds,
             const std::function<double(const Subject&)>& once) {
  Json figures;
  for (const Subject& subject : subjects) figures[subject.name] = Json::array();
  for (int round = -1; round < rounds; ++round) {  // the first round warms up
    for (size_t i = 0; i < subjects.size(); ++i) {
      const Subject& subject = subjects[(i + round + 1) % subjects.size()];
      const double figure = once(subject);
      if (round >= 0) figures[subject.name].push_back(figure);
    }
  }
  std::cout << Json{{"operation", what}, {"us", figures}} << std::endl;
}

// Returns the median time of one call in a batch. The scheduler delays a few calls.
std::function<double(const Subject&)> Each(std::function<void(c10d::Store&, int)> call) {
  return [call = std::move(call)](const Subject& subject) {
    std::vector<double> times;
    for (int i = 0; i < FLAGS_calls; ++i) {
      times.push_back(MicrosecondsOf([&] { call(*subject.store, i); }));
    }
    return Median(std::move(times));
  };
}

void CompareSmallOperations(const std::vector<Subject>& subjects) {
  const Bytes value(kAddress, kAddress + sizeof(kAddress) - 1);
  for (const Subject& subject : subjects) subject.store->set("present", value);
  Compare(subjects, "set, then get", FLAGS_rounds, Each([&](c10d::Store& store, int i) {
            const std::string key = "k" + std::to_string(i);
            store.set(key, value);
            store.get(key);
          }));
  Compare(subjects, "get", FLAGS_rounds,
          Each([](c10d::Store& store, int) { store.get("present"); }));
  Compare(subjects, "add", FLAGS_rounds,
          Each([](c10d::Store& store, int) { store.add("counter", 1); }));
}

// Measures the best of five calls. One call is so long that the scheduler interrupts most of them.
void CompareMultiGet(const std::vector<Subject>& subjects) {
  std::vector<std::string> keys;
  const std::vector<Bytes> values(kManyKeys, Bytes(kAddress, kAddress + sizeof(kAddress) - 1));
  for (int i = 0; i < kManyKeys; ++i) keys.push_back("address/" + std::to_string(i));
  for (const Subject& subject : subjects) subject.store->multiSet(keys, values);
  Compare(subjects, "multiGet of 1,024 keys", FLAGS_rounds, [&](const Subject& subject) {
    double best = 0;
    for (int i = 0; i < 5; ++i) {
      const double time = MicrosecondsOf([&] { subject.store->multiGet(keys); });
      best = i == 0 ? time : std::min(best, time);
    }
    return best;
  });
}

// Measures from just before the set until the get that waited for it returns.
void CompareWake(const std::vector<Subject>& subjects) {
  int turn = 0;
  Compare(subjects, "get, woken by a set", FLAGS_rounds, [&](const Subject& subject) {
    const std::string key = "wake/" + std::to_string(turn++);
    const StorePtr waiting = subject.open();
    std::atomic<int64_t> woken{0};
    std::thread waiter([&] {
      waiting->get(key);
      woken = MonotonicNanoseconds();
    });
    PauseMilliseconds(20);  // the get waits by now; TCPStore cannot be asked
    const int64_t start = MonotonicNanoseconds();
    subject.store->set(key, "v");
    waiter.join();
    return static_cast<double>(woken - start) / 1000.0;
  });
}

// Counts the server's commands during a second in which eight clients wait.
void CountPolls(const Subject& subject, const testing::RedisFixture& redis) {
  constexpr int kWaiters = 8;
  std::vector<std::thread> waiters;
  waiters.reserve(kWaiters);
  for (int i = 0; i < kWaiters; ++i) {
    waiters.emplace_back([store = subject.open()] { store->get("polling"); });
  }
  PauseMilliseconds(300);
  const auto total = [&] {
    int64_t sum = 0;
    for (const auto& [command, calls] : redis.CommandCalls()) {
      if (command != "info" && command != "ping" && command != "auth") sum += calls;
    }
    return sum;
  };
  const int64_t before = total();
  PauseMilliseconds(1000);
  const int64_t asked = total() - before;
  subject.store->set("polling", "v");
  for (std::thread& waiter : waiters) waiter.join();
  std::cout << Json{{"polls", asked}} << std::endl;
}

// Opens `count` clients, all at the same time.
std::vector<StorePtr> OpenMany(const Subject& subject, int count) {
  std::vector<StorePtr> stores(count);
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (StorePtr& store : stores) threads.emplace_back([&] { store = subject.open(); });
  for (std::thread& thread : threads) thread.join();
  return stores;
}

// Each member sets its address and reads the addresses of all. The members connect before:
// TCPStore's client looks up a host name for its log, which takes as long as the machine's name
// service needs.
void CompareJoining(const std::vector<Subject>& subjects) {
  std::map<std::string, std::vector<StorePtr>> stores;
  for (const Subject& subject : subjects) {
    stores[subject.name] = OpenMany(subject, FLAGS_members);
  }
  int turn = 0;
  const std::string what = std::to_string(FLAGS_members) + " clients join";
  Compare(subjects, what, FLAGS_join_rounds, [&](const Subject& subject) {
    const std::string prefix = "join/" + std::to_string(turn++) + "/";
    std::vector<std::string> keys;
    for (int m = 0; m < FLAGS_members; ++m) keys.push_back(prefix + std::to_string(m));
    return MicrosecondsOf([&] {
      std::vector<std::thread> threads;
      threads.reserve(keys.size());
      for (size_t m = 0; m < keys.size(); ++m) {
        threads.emplace_back([&, m, store = stores[subject.name][m]] {
          store->set(keys[m], kAddress);
          const std::vector<Bytes> addresses = store->multiGet(keys);
          TORCH_CHECK(addresses.size() == keys.size());
          TORCH_CHECK(addresses[m].size() + 1 == sizeof(kAddress));
        });
      }
      for (std::thread& thread : threads) thread.join();
    });
  });
}

void Run() {
  const uint16_t tcp_port = StartTcpServer();  // forked while this process has one thread
  const auto redis = testing::RedisFixture::StartTcp();
  store::StoreAddress by_tcp = redis->Address();
  store::StoreAddress by_socket = by_tcp;
  by_socket.endpoint = redis->SocketEndpoint();
  const auto redis_at = [](const store::StoreAddress& address) {
    return [address]() -> StorePtr { return c10::make_intrusive<store::RedisStore>(address); };
  };
  std::vector<Subject> subjects = {{"TCPStore", [&] { return OpenTcpStore(tcp_port); }, nullptr},
                                   {"RedisStore TCP", redis_at(by_tcp), nullptr},
                                   {"RedisStore socket", redis_at(by_socket), nullptr}};
  for (Subject& subject : subjects) subject.store = subject.open();
  CompareSmallOperations(subjects);
  CompareMultiGet(subjects);
  CompareWake(subjects);
  CompareJoining(subjects);
  CountPolls(subjects.back(), *redis);
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  gflags::SetUsageMessage("RedisStore beside LibTorch's TCPStore, in one run");
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  ddp::Run();
  return 0;
}
