// Measures what one Redis server spends on the agents of a large job: joining, heartbeats, and the
// notification of a failure.
//
//   bazel run -c opt //tools/bench:rendezvous_benchmark
//   bazel run -c opt //tools/bench:rendezvous_benchmark -- --agents=10000
//
// The agents are real clients (RedisRendezvous) with real TCP connections of their own, thousands
// of them in each of a few processes. Only their workers are missing. Each step shows two times:
// the store's, which is the processor time of redis-server, and the wall time until the last agent.
// In the wall time the clients of all nodes share this machine's cores with the store.
//
// The cost of heartbeats is compared with a floor: as many PINGs per second over the same
// connections, from the same processes and spread as evenly over the interval, while no agent sends
// heartbeats. The two take turns: PINGs before the agents join, then heartbeats, and so on, each
// time in a new round, so that heartbeats are spread as they are in a job. The median of each
// counts.
//
// The benchmark needs as many open files as agents, which is more than a process usually may have.
// The benchmark raises the limit as far as it may (ulimit -Hn). Where that is too low, the
// benchmark measures fewer agents and prints so.

#include <gflags/gflags.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "store/redis/redis_connection.h"
#include "store/redis/wire/redis_reply.h"
#include "testing/redis/redis_fixture.h"
#include "tools/bench/rendezvous_agents.h"

DEFINE_string(agents, "1000,10000", "sizes of the jobs, one after the other");
DEFINE_int32(processes, 2, "that the agents are spread over");
DEFINE_int32(failures, 10, "told to all, one after the other");
DEFINE_int32(heartbeat_seconds, 10, "how long heartbeats are measured each time, and PINGs");
DEFINE_int32(heartbeat_times, 3, "how often");
DEFINE_int32(heartbeat_ms, 1000, "of each agent");
DEFINE_int32(
    lease_ms, 15000,
    "of each agent; longer than ddprun's, since thousands of agents share a core here and "
    "wait for each other. The store's work hardly depends on it: most nodes that wait have "
    "their round before they would say again that they do");
DEFINE_bool(check, false, "end with 1 when a target is missed");

namespace ddp {
namespace {

using bench::kMostAgents;
using bench::kPatience;
using bench::Mark;
using bench::RendezvousAgents;
using bench::Shared;

bool target_missed = false;

[[noreturn]] void Die(const std::string& why) {
  fprintf(stderr, "rendezvous_benchmark: %s\n", why.c_str());
  exit(1);
}

Shared* MapShared() {
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) Die("no memory");
  return new (memory) Shared();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// ---- The job ----------------------------------------------------------------------------------

// The time that redis-server has spent so far.
struct Spent {
  double cpu_s = 0;
  int64_t wall_ns = 0;
};

class Job {
 public:
  explicit Job(int agents) : agents_(agents), shared_(MapShared()) {
    redis_ = testing::RedisFixture::StartTcp();
    // Not over TCP: the processes inherit the connection, and send PINGs over all TCP ones.
    auto connection = store::RedisConnection::Connect(redis_->SocketEndpoint());
    if (!connection.ok()) Die(std::string(connection.status().message()));
    connection_ = *std::move(connection);
    Ask({"CONFIG", "SET", "maxclients", absl::StrCat(agents + 20)});
    for (int i = 0; i < FLAGS_processes; ++i) StartProcess(i);
    Await("connected agents", shared_->opened, agents_);
    AwaitSubscriptions();
    Settle();  // the agents have not received the confirmations yet
  }

  ~Job() {
    commands_.clear();
    for (const pid_t pid : children_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    munmap(shared_, sizeof(Shared));
  }

  void Run() {
    printf("\n%d agents, %.0f connections\n", agents_, Info("clients", "connected_clients"));
    HeartbeatsBesidePings();
    std::vector<double> told, again, store;
    for (int i = 0; i < FLAGS_failures; ++i) {
      told.push_back(Failure());
      const Spent before = Now();
      again.push_back(Join());
      store.push_back(Now().cpu_s - before.cpu_s);
    }
    Print("a failure is known to all", told, 0.5);
    Print("and all have joined again", again, 0);
    Print("  store time of that", store, agents_ <= 1000 ? 0.5 : 3.0);
    const int lost = shared_->out_of_reach;
    if (lost > 0) printf("agents lost contact %d times: this machine is too slow for them\n", lost);
  }

 private:
  void StartProcess(int number) {
    int ends[2];
    if (pipe(ends) != 0) Die("no pipe");
    const int first = static_cast<int>(int64_t{agents_} * number / FLAGS_processes);
    const int end = static_cast<int>(int64_t{agents_} * (number + 1) / FLAGS_processes);
    fflush(stdout);
    const pid_t pid = fork();
    if (pid < 0) Die("no process");
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(ends[1]);
      RendezvousAgents({.endpoint = redis_->endpoint(),
                        .first = first,
                        .count = end - first,
                        .total = agents_,
                        .heartbeat = absl::Milliseconds(FLAGS_heartbeat_ms),
                        .lease = absl::Milliseconds(FLAGS_lease_ms)},
                       ends[0], shared_)
          .Run();
    }
    close(ends[0]);
    commands_.emplace_back(ends[1]);
    children_.push_back(pid);
  }

  void Tell(size_t process, char command) {
    if (write(commands_[process].get(), &command, 1) != 1) Die("a process is gone");
  }

  void Await(const char* what, const Mark& mark, int count) {
    const int64_t deadline = MonotonicNanoseconds() + absl::ToInt64Nanoseconds(kPatience);
    while (mark.count < count) {
      for (const pid_t pid : children_) {
        if (waitpid(pid, nullptr, WNOHANG) != 0 && !shared_->broken) Die("a process has crashed");
      }
      if (shared_->broken) exit(1);  // the process has printed the reason
      if (MonotonicNanoseconds() > deadline) {
        Die(absl::StrCat("only ", mark.count.load(), " of ", count, " ", what));
      }
      poll(nullptr, 0, 2);
    }
  }

  // Blocks until all agents have subscribed, which each does before its first command.
  void AwaitSubscriptions() {
    const std::string channel = absl::StrCat("ddp:{scale}:i", shared_->instance.load(), ":news");
    const int64_t deadline = MonotonicNanoseconds() + absl::ToInt64Nanoseconds(kPatience);
    while (Listeners(channel) < agents_) {
      if (shared_->broken) exit(1);
      if (MonotonicNanoseconds() > deadline) Die("not all agents have subscribed to the news");
      poll(nullptr, 0, 20);
    }
  }

  int64_t Listeners(const std::string& channel) {
    const auto counts = Ask({"PUBSUB", "NUMSUB", channel}).AsArray();
    if (!counts.ok() || counts->size() != 2) Die("PUBSUB NUMSUB does not tell");
    return (*counts)[1].AsInteger().value_or(0);
  }

  // Makes all agents join. Returns the seconds until the last one has its place.
  double Join() {
    shared_->joined.Reset();
    for (auto& given : shared_->ranks) given = 0;
    const int64_t start = MonotonicNanoseconds();
    for (size_t i = 0; i < commands_.size(); ++i) Tell(i, RendezvousAgents::kJoin);
    Await("agents joined", shared_->joined, agents_);
    for (int rank = 0; rank < agents_; ++rank) {
      if (shared_->ranks[rank] != 1) Die(absl::StrCat("rank ", rank, " was not given once"));
    }
    return static_cast<double>(shared_->joined.last_ns - start) / 1e9;
  }

  void Joining(const char* what, double target) {
    Ask({"CONFIG", "RESETSTAT"});
    const Spent before = Now();
    const double wall = Join();
    const double store = Now().cpu_s - before.cpu_s;
    printf("%-28s %.3f s of store time (%s), %.3f s on the wall\n", what, store,
           Verdict(store, target).c_str(), wall);
    PrintScripts();
  }

  // Returns the store's use of one core, in percent, during `seconds`.
  double ShareOfCore(int seconds) {
    const Spent before = Now();
    poll(nullptr, 0, 1000 * seconds);
    const Spent after = Now();
    return 100 * (after.cpu_s - before.cpu_s) * 1e9 /
           static_cast<double>(after.wall_ns - before.wall_ns);
  }

  // Measures PINGs. The agents stand still meanwhile.
  double Pings() {
    shared_->silent.Reset();
    shared_->pinged.Reset();
    shared_->ping_connections = 0;
    shared_->ping = true;
    for (size_t i = 0; i < commands_.size(); ++i) Tell(i, RendezvousAgents::kPing);
    Await("processes silent", shared_->silent, FLAGS_processes);
    const int64_t start = MonotonicNanoseconds();
    const double share = ShareOfCore(FLAGS_heartbeat_seconds);
    shared_->ping = false;
    Await("processes back from PINGs", shared_->pinged, FLAGS_processes);
    const auto wall = static_cast<double>(shared_->pinged.last_ns - start) / 1e9;
    printf("  %.1f %% for %.0f PINGs per second on %d connections\n", share,
           static_cast<double>(shared_->pings.exchange(0)) / wall,
           shared_->ping_connections.load());
    fflush(stdout);
    return share;
  }

  double Heartbeats() {
    Ask({"CONFIG", "RESETSTAT"});
    const double share = ShareOfCore(FLAGS_heartbeat_seconds);
    printf("  %.1f %% for heartbeats each %d ms\n", share, FLAGS_heartbeat_ms);
    PrintScripts();
    return share;
  }

  // Measures PINGs and heartbeats in turns, each time in a new round. Joins the first round.
  void HeartbeatsBesidePings() {
    std::vector<double> pings, beats;
    for (int i = 0; i < FLAGS_heartbeat_times; ++i) {
      pings.push_back(Pings());
      if (i == 0) {
        Joining("joined and running", agents_ <= 1000 ? 0.5 : 3.0);
      } else {
        Settle();  // everything that was delayed is due at once
        Failure();
        Join();
      }
      Settle();
      beats.push_back(Heartbeats());
    }
    const double share = Median(beats);
    printf("%-28s %.1f %% of one core of the store (%s)\n",
           absl::StrCat("heartbeats each ", FLAGS_heartbeat_ms, " ms").c_str(), share,
           agents_ > 1000 ? Verdict(share, 40).c_str() : "no target");
    printf("%-28s %.1f %% of one core of the store\n", "PINGs at the same rate", Median(pings));
    printf("%-28s %.2f times a PING\n", "a heartbeat costs", share / Median(pings));
    fflush(stdout);
  }

  // Waits for as long as a few heartbeats take.
  static void Settle() { poll(nullptr, 0, 4 * FLAGS_heartbeat_ms); }

  // Returns the seconds from the report of a failure until the last agent knows.
  double Failure() {
    shared_->told.Reset();
    const int64_t start = MonotonicNanoseconds();
    Tell(0, RendezvousAgents::kFail);
    Await("agents told of a failure", shared_->told, agents_);
    return static_cast<double>(shared_->told.last_ns - start) / 1e9;
  }

  void Print(const char* what, const std::vector<double>& values, double target) {
    const double worst = *std::max_element(values.begin(), values.end());
    printf("%-28s median %.3f s, worst of %zu %.3f s%s\n", what, Median(values), values.size(),
           worst, target > 0 ? absl::StrCat(" (", Verdict(worst, target), ")").c_str() : "");
    fflush(stdout);
  }

  static std::string Verdict(double value, double target) {
    if (value < target) return absl::StrCat("target under ", target, ": met");
    target_missed = true;
    return absl::StrCat("target under ", target, ": MISSED");
  }

  Spent Now() {
    return {Info("cpu", "used_cpu_user") + Info("cpu", "used_cpu_sys"), MonotonicNanoseconds()};
  }

  store::RedisReply Ask(const std::vector<std::string>& command) {
    auto reply = connection_->Command(command);
    if (!reply.ok()) Die(std::string(reply.status().message()));
    return *std::move(reply);
  }

  std::string InfoText(const std::string& section) {
    auto text = Ask({"INFO", section}).AsString();
    if (!text.ok()) Die(std::string(text.status().message()));
    return *std::move(text);
  }

  double Info(const std::string& section, const std::string& name) {
    const std::string text = InfoText(section);
    for (const auto& line : absl::StrSplit(text, absl::ByAnyChar("\r\n"), absl::SkipEmpty())) {
      const std::pair<std::string, std::string> pair =
          absl::StrSplit(line, absl::MaxSplits(':', 1));
      double value = 0;
      if (pair.first == name && absl::SimpleAtod(pair.second, &value)) return value;
    }
    Die("INFO does not tell " + name);
  }

  // Prints how often scripts were run, and their cost by the server's own clock.
  void PrintScripts() {
    for (const auto& line :
         absl::StrSplit(InfoText("commandstats"), absl::ByAnyChar("\r\n"), absl::SkipEmpty())) {
      int64_t calls = 0, total_us = 0;
      if (sscanf(std::string(line).c_str(), "cmdstat_evalsha:calls=%ld,usec=%ld", &calls,
                 &total_us) == 2) {
        printf("  %ld scripts, %.1f us each by the store's own clock\n", calls,
               static_cast<double>(total_us) / static_cast<double>(std::max<int64_t>(1, calls)));
      }
    }
    fflush(stdout);
  }

  const int agents_;
  Shared* const shared_;
  std::unique_ptr<testing::RedisFixture> redis_;
  std::unique_ptr<store::RedisConnection> connection_;
  std::vector<UniqueFd> commands_;
  std::vector<pid_t> children_;
};

// ---- Main -------------------------------------------------------------------------------------

// Redis keeps this many descriptors for itself, and we are clients too.
constexpr int kFilesOfServer = 100;

// Raises the limit of open files for `agents` agents. Returns for how many there is room.
int MakeRoom(int agents) {
  const rlim_t wanted = static_cast<rlim_t>(agents + kFilesOfServer);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  rlimit more{wanted, std::max(limit.rlim_max, wanted)};
  if (limit.rlim_cur >= wanted || setrlimit(RLIMIT_NOFILE, &more) == 0) return agents;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  const int room = static_cast<int>(limit.rlim_cur) - kFilesOfServer;
  printf("only %d of %d agents: a process may have %lu open files here (ulimit -Hn)\n", room,
         agents, limit.rlim_cur);
  return room;
}

int Run() {
  std::vector<int> sizes;
  for (const auto& text : absl::StrSplit(FLAGS_agents, ',')) {
    int size = 0;
    if (!absl::SimpleAtoi(text, &size) || size < 2 || size > kMostAgents) {
      Die(absl::StrCat("--agents=", FLAGS_agents, ": numbers from 2 to ", kMostAgents));
    }
    sizes.push_back(size);
  }
  for (const auto& [name, value] : {std::pair("processes", FLAGS_processes),
                                    {"failures", FLAGS_failures},
                                    {"heartbeat_seconds", FLAGS_heartbeat_seconds},
                                    {"heartbeat_times", FLAGS_heartbeat_times}}) {
    if (value < 1) Die(absl::StrCat("--", name, "=", value, ": from 1"));
  }
  printf("versions  redis-server %s, %u cores\n",
         testing::RedisFixture::Start()->ServerVersion().c_str(),
         std::thread::hardware_concurrency());
  for (const int size : sizes) Job(MakeRoom(size)).Run();
  return FLAGS_check && target_missed ? 1 : 0;
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  gflags::SetUsageMessage("one Redis server and the agents of a large job");
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  return ddp::Run();
}
