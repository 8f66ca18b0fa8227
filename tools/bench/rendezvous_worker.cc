// Agents of a large job, for the report's section on the rendezvous: what one Redis server spends.
//
// The agents are real clients (RedisRendezvous) with TCP connections of their own, thousands of
// them in each of a few of these processes. Only their workers are missing. The processes read
// requests from stdin and answer each with a line of JSON. All times are CLOCK_MONOTONIC.
//
//   (start)  {"instance": n} when the job is open, {"agents": n} when all agents here are
//   j        all agents join: {"last_ns": when the last one had its place, "ranks": [...]}
//   f        the first agent reports a failure; as w
//   w        {"last_ns": when the last agent knew of the failure, "out_of_reach": n}
//   p        the agents pause, and PINGs go over their connections, at the rate of heartbeats:
//            {"connections": n}
//   s        the PINGs end, and the agents continue: {"pings": n}
//
// Any error ends the process, with a line on stderr.

#include <gflags/gflags.h>
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "elastic/rendezvous/redis_rendezvous.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"
#include "nlohmann/json.hpp"
#include "tools/bench/redis_pinger.h"

DEFINE_int32(port, 6379, "of the Redis server on this host");
DEFINE_int32(first, 0, "number of the first agent here, among the job's agents");
DEFINE_int32(count, 1, "agents here");
DEFINE_int32(total, 1, "agents of the job");
DEFINE_int32(instance, 0, "of the job; 0: the first agent here opens the job");
DEFINE_int32(heartbeat_ms, 1000, "of each agent");
DEFINE_int32(
    lease_ms, 15000,
    "of each agent; longer than ddprun's, since thousands of agents share a core here and "
    "wait for each other. The store's work hardly depends on it: most nodes that wait have "
    "their round before they would say again that they do");

namespace ddp::bench {
namespace {

using elastic::FailureVerdict;
using elastic::News;
using elastic::RedisRendezvous;
using elastic::RendezvousAnswer;
using Json = nlohmann::json;

constexpr absl::Duration kPatience = absl::Minutes(5);

void Print(const Json& line) { std::cout << line << std::endl; }

[[noreturn]] void Fail(const absl::Status& status) {
  std::cerr << "rendezvous_worker: " << status.message() << std::endl;
  _exit(1);
}
[[noreturn]] void Fail(const std::string& why) { Fail(absl::InternalError(why)); }

// Thread: one, in which Run() stays.
class Agents {
 public:
  Agents() {
    auto loop = EventLoop::Create();
    if (!loop.ok()) Fail(loop.status());
    loop_ = *std::move(loop);
    for (int i = 0; i < FLAGS_count; ++i) Open(i);
    Print({{"agents", FLAGS_count}});
  }

  [[noreturn]] void Run() {
    const absl::Status watched = loop_->Watch(STDIN_FILENO, EPOLLIN, [this](uint32_t) { Obey(); });
    if (!watched.ok()) Fail(watched);
    Fail(loop_->Run());
  }

 private:
  struct Agent {
    std::unique_ptr<RedisRendezvous> rendezvous;
    elastic::GenerationId generation;
  };

  void Open(int index) {
    RedisRendezvous::Options options;
    options.endpoint.host = "127.0.0.1";
    options.endpoint.port = FLAGS_port;
    options.instance = FLAGS_instance;
    options.job.run_id = "scale";
    options.job.limits.max_restarts = 1000000;
    options.job.rules.no_progress_limit = 0;
    options.job.rules.quarantine_strikes = 0;
    options.job.limits.min_nodes = FLAGS_total;
    options.job.limits.max_nodes = FLAGS_total;
    options.job.rules.heartbeat = absl::Milliseconds(FLAGS_heartbeat_ms);
    options.job.rules.lease = absl::Milliseconds(FLAGS_lease_ms);
    // Thousands of agents share a thread here, so an agent may have to wait for its turn.
    options.first_attempt = absl::Seconds(5);
    options.reply_timeout = absl::Seconds(10);
    auto rendezvous = RedisRendezvous::Open(options, loop_.get());
    if (!rendezvous.ok()) Fail(rendezvous.status());
    if (index == 0) {
      FLAGS_instance = static_cast<int>((*rendezvous)->instance());
      Print({{"instance", FLAGS_instance}});
    }
    agents_.push_back({*std::move(rendezvous), {}});
    agents_.back().rendezvous->Watch([this, index](const News& news) { OnNews(index, news); });
  }

  void Obey() {
    char request = 0;
    if (read(STDIN_FILENO, &request, 1) != 1) _exit(0);
    if (request == 'j') {
      told_ = 0;
      ranks_.clear();
      for (int i = 0; i < FLAGS_count; ++i) Join(i);
    } else if (request == 'f' || request == 'w') {
      if (request == 'f') ReportFailure();
      is_asked_ = true;
      AnswerWhenAllKnow();
    } else if (request == 'p') {
      Ping();
    }
  }

  void Join(int index) {
    const elastic::NodeOffer offer{.nproc = 8,
                                   .role = "default",
                                   .host = absl::StrCat("host-", FLAGS_first + index),
                                   .master_addr = "10.123.231.132",
                                   .master_port = 29500};
    const auto done = [this, index](const RendezvousAnswer& answer) {
      if (!answer.ok()) Fail(answer.status());
      const elastic::Round* const round = std::get_if<elastic::Round>(&*answer);
      if (round == nullptr) Fail("the job has ended");
      const elastic::NodePlacement& place = round->placement;
      if (place.group_world_size != FLAGS_total || place.world_size != 8 * FLAGS_total ||
          place.first_rank != 8 * place.group_rank) {
        Fail(absl::StrCat("a wrong placement: rank ", place.first_rank));
      }
      agents_[index].generation = round->generation;
      ranks_.push_back(place.group_rank);
      if (static_cast<int>(ranks_.size()) < FLAGS_count) return;
      Print({{"last_ns", MonotonicNanoseconds()}, {"ranks", ranks_}});
    };
    agents_[index].rendezvous->Ask(elastic::JoinRequest{offer}, kPatience, done);
  }

  // Reports that a worker of the first agent has failed.
  void ReportFailure() {
    const elastic::FailureRequest failure{
        .generation = agents_[0].generation, .rank = 0, .cause = "rank 0 was killed by SIGKILL"};
    const auto done = [this](const RendezvousAnswer& answer) {
      const absl::StatusOr<FailureVerdict> verdict = elastic::AnswerAs<FailureVerdict>(answer);
      if (!verdict.ok()) Fail(verdict.status());
      if (verdict->decision != FailureVerdict::Decision::kRestart) {
        Fail("the failure was not followed by a restart");
      }
      if (!agents_[0].generation.nonce.empty()) Told(0);  // the verdict notifies the reporter
    };
    agents_[0].rendezvous->Ask(failure, kPatience, done);
  }

  void OnNews(int index, const News& news) {
    switch (news.kind) {
      case News::Kind::kGenerationOver:
        if (news.generation == agents_[index].generation) Told(index);
        return;
      case News::Kind::kWaiting:
      case News::Kind::kBackInReach:
        return;
      case News::Kind::kOutOfReach:
        ++out_of_reach_;
        return;
      case News::Kind::kEvicted:
        Fail("an agent was evicted: this machine is too slow for so many");
      default:
        Fail(absl::StrCat("unexpected news, number ", static_cast<int>(news.kind)));
    }
  }

  void Told(int index) {
    agents_[index].generation = {};
    ++told_;
    told_ns_ = MonotonicNanoseconds();
    AnswerWhenAllKnow();
  }

  void AnswerWhenAllKnow() {
    if (!is_asked_ || told_ < FLAGS_count) return;
    is_asked_ = false;
    Print({{"last_ns", told_ns_}, {"out_of_reach", out_of_reach_}});
  }

  // Sends PINGs until the next request. The agents' loop does not run until then.
  static void Ping() {
    RedisPinger pinger(FLAGS_port, absl::Milliseconds(FLAGS_heartbeat_ms));
    char request = 0;
    const auto goes_on = [&request] {
      pollfd input = {.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
      while (request != 's' && poll(&input, 1, 0) > 0) {
        if (read(STDIN_FILENO, &request, 1) != 1) _exit(0);
      }
      return request != 's';
    };
    Print({{"connections", pinger.connections()}});
    const absl::StatusOr<int64_t> pings = pinger.Run(goes_on);
    if (!pings.ok()) Fail(pings.status());
    Print({{"pings", *pings}});
  }

  std::unique_ptr<EventLoop> loop_;
  std::vector<Agent> agents_;
  std::vector<int> ranks_;  // group ranks given in the newest round
  int told_ = 0;            // agents that know that the generation is over
  int64_t told_ns_ = 0;
  bool is_asked_ = false;  // an answer about the failure is due
  int out_of_reach_ = 0;   // how often an agent lost contact with the server
};

}  // namespace
}  // namespace ddp::bench

int main(int argc, char** argv) {
  gflags::SetUsageMessage("agents of the section rendezvous of tools/bench/report");
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  ddp::bench::Agents().Run();
}
