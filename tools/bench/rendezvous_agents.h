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
#include "store/redis_endpoint.h"

namespace ddp::bench {

constexpr int kMostAgents = 20000;

// How long anything may take.
constexpr absl::Duration kPatience = absl::Minutes(5);

// Something that parent and children count, and when the last of it was counted.
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

// What parent and children share.
struct Shared {
  Mark opened;
  Mark joined;  // the generation that is being formed
  Mark told;    // that the generation is over
  Mark silent;  // processes that do not beat, and send PINGs as long as `ping`
  Mark pinged;  // processes that have sent PINGs, and beat again
  std::atomic<bool> ping;
  std::atomic<int> ping_connections;
  std::atomic<int64_t> pings;
  std::atomic<int64_t> instance;
  std::atomic<bool> broken;
  std::atomic<int> out_of_reach;  // how often an agent lost contact
  // Of the newest round: how often each group rank was given.
  std::array<std::atomic<int>, kMostAgents> ranks;
};

// A process full of agents of one job, each a RedisRendezvous with a connection of its own. What
// goes wrong ends the process, with one line.
//
// One thread, which Run() keeps.
class RendezvousAgents {
 public:
  // What the parent writes into the pipe `commands`.
  static constexpr char kJoin = 'j';  // all of them
  static constexpr char kFail = 'f';  // the first one reports a failure
  static constexpr char kPing = 'p';  // stand still, and send PINGs over the same connections

  struct Options {
    store::RedisEndpoint endpoint;
    int first = 0;  // of the job's agents
    int count = 0;  // that are here
    int total = 0;  // of the job
    absl::Duration heartbeat;
    absl::Duration lease;
  };

  // Opens them all, before it returns. `commands` and `shared` are not owned.
  RendezvousAgents(const Options& options, int commands, Shared* shared);

  // Until the pipe is closed.
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
