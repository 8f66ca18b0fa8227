#ifndef DDP_TOOLS_BENCH_RENDEZVOUS_AGENTS_H_
#define DDP_TOOLS_BENCH_RENDEZVOUS_AGENTS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "elastic/rendezvous/redis_rendezvous.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::bench {

constexpr int kMostAgents = 20000;

// Limit of every step of the benchmark.
constexpr absl::Duration kPatience = absl::Minutes(5);

// A counter for parent and children, with the time of the last count.
struct Mark {
  std::atomic<int> count;
  std::atomic<int64_t> last_ns;

  void Reset() { count = 0, last_ns = 0; }
  void Add() {
    const int64_t now = MonotonicNanoseconds();
    int64_t last = last_ns;
    while (last < now && !last_ns.compare_exchange_weak(last, now)) {
    }
    ++count;
  }
};

// The memory that parent and children share.
struct Shared {
  Mark opened;
  Mark joined;  // agents that joined the generation being formed
  Mark told;    // agents that know that the generation is over
  Mark silent;  // processes that send PINGs instead of heartbeats, as long as `ping` is set
  Mark pinged;  // processes that have sent PINGs and send heartbeats again
  std::atomic<bool> ping;
  std::atomic<int> ping_connections;
  std::atomic<int64_t> pings;
  std::atomic<int64_t> instance;
  std::atomic<bool> broken;
  std::atomic<int> out_of_reach;  // how often an agent lost contact with the server
  // How often each group rank was given in the newest round.
  std::array<std::atomic<int>, kMostAgents> ranks;
};

// Many agents of one job in one process. Each is a RedisRendezvous with a connection of its own.
// Any error ends the process. The first error of all processes prints one line on stderr.
//
// Thread: one, in which Run() stays.
class RendezvousAgents {
 public:
  // The commands that the parent writes into the pipe `commands`.
  static constexpr char kJoin = 'j';  // all agents join
  static constexpr char kFail = 'f';  // the first agent reports a failure
  static constexpr char kPing = 'p';  // all agents pause; PINGs go over their connections

  struct Options {
    store::RedisEndpoint endpoint;
    int first = 0;  // index of the first agent here, among the job's agents
    int count = 0;  // agents here
    int total = 0;  // agents of the job
    absl::Duration heartbeat;
    absl::Duration lease;
  };

  // Opens all agents before it returns. Blocks until the job's first agent has opened the job.
  // `commands` and `shared` are not owned.
  RendezvousAgents(const Options& options, int commands, Shared* shared);

  // Runs the agents until the pipe is closed, and then ends the process.
  [[noreturn]] void Run();

 private:
  struct Agent {
    std::unique_ptr<elastic::RedisRendezvous> rendezvous;
    elastic::GenerationId generation;
  };

  [[noreturn]] void Fail(const absl::Status& status);
  void Open(int index);
  void Obey();
  void Join(int index);
  void ReportFailure();
  void Ping();
  void OnNews(int index, const elastic::News& news);
  void Told(int index);

  const Options given_;
  const int commands_;
  Shared* const shared_;
  std::unique_ptr<EventLoop> loop_;
  elastic::RedisRendezvous::Options options_;
  std::vector<Agent> agents_;
};

}  // namespace ddp::bench

#endif  // DDP_TOOLS_BENCH_RENDEZVOUS_AGENTS_H_
