// One Redis server and the agents of a large job: what joining, heartbeats and the news of a
// failure cost.
//
//   bazel run -c opt //tools/bench:rendezvous_benchmark
//   bazel run -c opt //tools/bench:rendezvous_benchmark -- --agents=10000
//
// The agents are real clients (RedisRendezvous) with real TCP connections of their own, thousands
// of them in each of a few processes; their workers alone are left out. Of a step two times are
// shown: the store's, which is the processor time of redis-server, and that on the wall, to the
// last agent, in which the clients of all nodes share this machine's cores with the store.
//
// Needs more open files than a process usually may have, twice the agents, and raises the limit as
// far as it may (ulimit -Hn): where that is too low, fewer agents are measured, and it says so.

#include <gflags/gflags.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "elastic/rendezvous/redis_rendezvous.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"
#include "store/redis_connection.h"
#include "store/redis_reply.h"
#include "testing/redis_fixture.h"

DEFINE_string(agents, "1000,10000", "sizes of the jobs, one after the other");
DEFINE_int32(processes, 2, "that the agents are spread over");
DEFINE_int32(failures, 10, "told to all, one after the other");
DEFINE_int32(heartbeat_seconds, 10, "how long heartbeats are measured");
DEFINE_int32(heartbeat_ms, 500, "of each agent");
DEFINE_int32(lease_ms, 15000,
             "of each agent; longer than ddprun's, since thousands of agents share a core here and "
             "wait for each other. The store's work does not depend on it: of six heartbeats one "
             "is in full here as there");
DEFINE_bool(check, false, "end with 1 when a target is missed");

namespace ddp {
namespace {

using elastic::JoinAnswer;
using elastic::News;
using elastic::RedisRendezvous;
using elastic::Rendezvous;
using elastic::Round;

constexpr int kMostAgents = 20000;
constexpr absl::Duration kPatience = absl::Minutes(5);
// What the parent writes into a child's pipe.
constexpr char kJoin = 'j';
constexpr char kFail = 'f';

bool target_missed = false;

[[noreturn]] void Die(const std::string& why) {
  fprintf(stderr, "rendezvous_benchmark: %s\n", why.c_str());
  exit(1);
}

// What parent and children share: counts, and when the last of them was reached.
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

struct Shared {
  Mark opened;
  Mark joined;  // the generation that is being formed
  Mark told;    // that the generation is over
  std::atomic<int64_t> instance;
  std::atomic<bool> broken;
  std::atomic<int> out_of_reach;  // how often an agent lost contact
  // Of the newest round: how often each group rank was given.
  std::array<std::atomic<int>, kMostAgents> ranks;
};

Shared* MapShared() {
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) Die("no memory");
  return new (memory) Shared();
}

// ---- A process full of agents -----------------------------------------------------------------

class Agents {
 public:
  Agents(const store::RedisEndpoint& endpoint, int first, int count, int total, int commands,
         Shared* shared)
      : first_(first), total_(total), commands_(commands), shared_(shared) {
    auto loop = EventLoop::Create();
    if (!loop.ok()) Fail(loop.status());
    loop_ = *std::move(loop);
    options_.endpoint = endpoint;
    options_.run_id = "scale";
    options_.max_restarts = 1000000;
    options_.no_progress_limit = 0;
    options_.quarantine_strikes = 0;
    options_.min_nodes = total;
    options_.max_nodes = total;
    options_.heartbeat = absl::Milliseconds(FLAGS_heartbeat_ms);
    options_.lease = absl::Milliseconds(FLAGS_lease_ms);
    // Thousands of agents share a thread here: one of them may have to wait for its turn.
    options_.reconnect_timeout = absl::Seconds(5);
    options_.reply_timeout = absl::Seconds(10);
    for (int i = 0; i < count; ++i) Open(i);
  }

  [[noreturn]] void Run() {
    const absl::Status watched = loop_->Watch(commands_, EPOLLIN, [this](uint32_t) { Obey(); });
    if (!watched.ok()) Fail(watched);
    Fail(loop_->Run());
  }

 private:
  struct Agent {
    std::unique_ptr<RedisRendezvous> rendezvous;
    elastic::GenerationId generation;
  };

  [[noreturn]] void Fail(const absl::Status& status) {
    if (!shared_->broken.exchange(true)) {
      fprintf(stderr, "rendezvous_benchmark: %s\n", std::string(status.message()).c_str());
    }
    _exit(1);
  }

  void Open(int index) {
    // The first agent of all opens the job; the others wait until it has.
    const bool opens = first_ == 0 && index == 0;
    while (!opens && shared_->instance == 0) poll(nullptr, 0, 1);
    options_.instance = opens ? 0 : shared_->instance.load();
    auto rendezvous = RedisRendezvous::Open(options_, loop_.get());
    if (!rendezvous.ok()) Fail(rendezvous.status());
    if (opens) shared_->instance = (*rendezvous)->instance();
    agents_.push_back({*std::move(rendezvous), {}});
    agents_.back().rendezvous->Watch([this, index](const News& news) { OnNews(index, news); });
    shared_->opened.Add();
  }

  void Obey() {
    char command = 0;
    if (read(commands_, &command, 1) != 1) _exit(0);  // the parent is done, or gone
    if (command == kJoin) {
      for (int i = 0; i < static_cast<int>(agents_.size()); ++i) Join(i);
    } else if (command == kFail) {
      ReportFailure();
    }
  }

  void Join(int index) {
    const elastic::NodeOffer offer{.nproc = 8,
                                   .role = "default",
                                   .host = absl::StrCat("host-", first_ + index),
                                   .master_addr = "10.123.231.132",
                                   .master_port = 29500};
    Rendezvous& rendezvous = *agents_[index].rendezvous;
    rendezvous.Join(offer, kPatience, [this, index](const absl::StatusOr<JoinAnswer>& answer) {
      if (!answer.ok()) Fail(answer.status());
      const Round* const round = std::get_if<Round>(&*answer);
      if (round == nullptr) Fail(absl::InternalError("the job has ended"));
      const elastic::NodePlacement& place = round->placement;
      if (place.group_world_size != total_ || place.world_size != 8 * total_ ||
          place.first_rank != 8 * place.group_rank) {
        Fail(absl::InternalError(absl::StrCat("a wrong placement: rank ", place.first_rank)));
      }
      agents_[index].generation = round->generation;
      ++shared_->ranks[place.group_rank];
      shared_->joined.Add();
    });
  }

  // A worker of the first agent has failed.
  void ReportFailure() {
    const Rendezvous::Failure failure{
        .generation = agents_[0].generation, .rank = 0, .cause = "rank 0 was killed by SIGKILL"};
    agents_[0].rendezvous->ReportFailure(
        failure, kPatience, [this](const absl::StatusOr<elastic::FailureVerdict>& verdict) {
          if (!verdict.ok()) Fail(verdict.status());
          if (verdict->decision != elastic::FailureVerdict::Decision::kRestart) {
            Fail(absl::InternalError("the failure was not followed by a restart"));
          }
          if (!agents_[0].generation.nonce.empty()) Told(0);  // the verdict is its news
        });
  }

  void OnNews(int index, const News& news) {
    switch (news.kind) {
      case News::Kind::kGenerationOver:
        if (news.generation == agents_[index].generation) Told(index);
        return;
      case News::Kind::kWaiting:
        return;
      case News::Kind::kBackInReach:
        return;
      case News::Kind::kOutOfReach:
        ++shared_->out_of_reach;
        return;
      case News::Kind::kEvicted:
        Fail(absl::InternalError("an agent was evicted: this machine is too slow for so many"));
      default:
        Fail(absl::InternalError(absl::StrCat("unexpected news, number ", int(news.kind))));
    }
  }

  void Told(int index) {
    agents_[index].generation = {};
    shared_->told.Add();
  }

  const int first_;
  const int total_;
  const int commands_;
  Shared* const shared_;
  std::unique_ptr<EventLoop> loop_;
  RedisRendezvous::Options options_;
  std::vector<Agent> agents_;
};

// ---- The job ----------------------------------------------------------------------------------

// What redis-server has spent so far.
struct Spent {
  double cpu_s = 0;
  int64_t wall_ns = 0;
};

class Job {
 public:
  explicit Job(int agents) : agents_(agents), shared_(MapShared()) {
    redis_ = testing::RedisFixture::StartTcp();
    connection_ = redis_->Connect();
    Ask({"CONFIG", "SET", "maxclients", absl::StrCat(2 * agents + 20)});
    for (int i = 0; i < FLAGS_processes; ++i) StartProcess(i);
    Await("connected agents", shared_->opened, agents_);
    AwaitSubscriptions();
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
    Joining("joined and running", agents_ <= 1000 ? 0.5 : 3.0);
    Heartbeats();
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
      Agents(redis_->endpoint(), first, end - first, agents_, ends[0], shared_).Run();
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
      if (shared_->broken) exit(1);  // it has said why
      if (MonotonicNanoseconds() > deadline) {
        Die(absl::StrCat("only ", mark.count.load(), " of ", count, " ", what));
      }
      poll(nullptr, 0, 2);
    }
  }

  // The agents make their second connection on their own. While thousands do so in one thread, none
  // of them does anything else.
  void AwaitSubscriptions() {
    const int64_t deadline = MonotonicNanoseconds() + absl::ToInt64Nanoseconds(kPatience);
    while (Info("clients", "connected_clients") < 2 * agents_ + 1) {
      if (shared_->broken) exit(1);
      if (MonotonicNanoseconds() > deadline) Die("not all agents have subscribed to the news");
      poll(nullptr, 0, 20);
    }
  }

  // All agents join. Returns the seconds until the last one has its place.
  double Join() {
    shared_->joined.Reset();
    for (auto& given : shared_->ranks) given = 0;
    const int64_t start = MonotonicNanoseconds();
    for (size_t i = 0; i < commands_.size(); ++i) Tell(i, kJoin);
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

  void Heartbeats() {
    Ask({"CONFIG", "RESETSTAT"});
    const Spent before = Now();
    poll(nullptr, 0, 1000 * FLAGS_heartbeat_seconds);
    const Spent after = Now();
    const double wall = static_cast<double>(after.wall_ns - before.wall_ns) / 1e9;
    const double share = 100 * (after.cpu_s - before.cpu_s) / wall;
    printf("%-28s %.1f %% of one core of the store (%s)\n",
           absl::StrCat("heartbeats each ", FLAGS_heartbeat_ms, " ms").c_str(), share,
           agents_ > 1000 ? Verdict(share, 40).c_str() : "no target");
    PrintScripts();
  }

  // Returns the seconds from the report of a failure until the last agent knows.
  double Failure() {
    shared_->told.Reset();
    const int64_t start = MonotonicNanoseconds();
    Tell(0, kFail);
    Await("agents told of a failure", shared_->told, agents_);
    return static_cast<double>(shared_->told.last_ns - start) / 1e9;
  }

  void Print(const char* what, std::vector<double> values, double target) {
    std::sort(values.begin(), values.end());
    printf("%-28s median %.3f s, worst of %zu %.3f s%s\n", what, values[values.size() / 2],
           values.size(), values.back(),
           target > 0 ? absl::StrCat(" (", Verdict(values.back(), target), ")").c_str() : "");
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

  // How often scripts were run, and what they cost by the server's own clock.
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

// Makes room for so many agents with two connections each; returns for how many there is room.
int MakeRoom(int agents) {
  const rlim_t wanted = static_cast<rlim_t>(2 * agents + kFilesOfServer);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  rlimit more{wanted, std::max(limit.rlim_max, wanted)};
  if (limit.rlim_cur >= wanted || setrlimit(RLIMIT_NOFILE, &more) == 0) return agents;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  const int room = (static_cast<int>(limit.rlim_cur) - kFilesOfServer) / 2;
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
