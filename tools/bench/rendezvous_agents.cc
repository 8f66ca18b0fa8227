#include "tools/bench/rendezvous_agents.h"

#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <variant>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "tools/bench/redis_pinger.h"

namespace ddp::bench {

using elastic::JoinAnswer;
using elastic::News;
using elastic::RedisRendezvous;
using elastic::Rendezvous;
using elastic::Round;

RendezvousAgents::RendezvousAgents(const Options& options, int commands, Shared* shared)
    : given_(options), commands_(commands), shared_(shared) {
  auto loop = EventLoop::Create();
  if (!loop.ok()) Fail(loop.status());
  loop_ = *std::move(loop);
  options_.endpoint = options.endpoint;
  options_.job.run_id = "scale";
  options_.job.limits.max_restarts = 1000000;
  options_.job.rules.no_progress_limit = 0;
  options_.job.rules.quarantine_strikes = 0;
  options_.job.limits.min_nodes = options.total;
  options_.job.limits.max_nodes = options.total;
  options_.job.rules.heartbeat = options.heartbeat;
  options_.job.rules.lease = options.lease;
  // Thousands of agents share a thread here, so an agent may have to wait for its turn.
  options_.first_attempt = absl::Seconds(5);
  options_.reply_timeout = absl::Seconds(10);
  for (int i = 0; i < options.count; ++i) Open(i);
}

void RendezvousAgents::Run() {
  const absl::Status watched = loop_->Watch(commands_, EPOLLIN, [this](uint32_t) { Obey(); });
  if (!watched.ok()) Fail(watched);
  Fail(loop_->Run());
}

void RendezvousAgents::Fail(const absl::Status& status) {
  if (!shared_->broken.exchange(true)) {
    fprintf(stderr, "rendezvous_benchmark: %s\n", std::string(status.message()).c_str());
  }
  _exit(1);
}

void RendezvousAgents::Open(int index) {
  // The first agent of all opens the job; the others wait until it has.
  const bool opens = given_.first == 0 && index == 0;
  while (!opens && shared_->instance == 0) poll(nullptr, 0, 1);
  options_.instance = opens ? 0 : shared_->instance.load();
  auto rendezvous = RedisRendezvous::Open(options_, loop_.get());
  if (!rendezvous.ok()) Fail(rendezvous.status());
  if (opens) shared_->instance = (*rendezvous)->instance();
  agents_.push_back({*std::move(rendezvous), {}});
  agents_.back().rendezvous->Watch([this, index](const News& news) { OnNews(index, news); });
  shared_->opened.Add();
}

void RendezvousAgents::Obey() {
  char command = 0;
  if (read(commands_, &command, 1) != 1) _exit(0);  // the parent has closed the pipe
  if (command == kJoin) {
    for (int i = 0; i < given_.count; ++i) Join(i);
  } else if (command == kFail) {
    ReportFailure();
  } else if (command == kPing) {
    Ping();
  }
}

void RendezvousAgents::Join(int index) {
  const elastic::NodeOffer offer{.nproc = 8,
                                 .role = "default",
                                 .host = absl::StrCat("host-", given_.first + index),
                                 .master_addr = "10.123.231.132",
                                 .master_port = 29500};
  Rendezvous& rendezvous = *agents_[index].rendezvous;
  rendezvous.Join(offer, kPatience, [this, index](const absl::StatusOr<JoinAnswer>& answer) {
    if (!answer.ok()) Fail(answer.status());
    const Round* const round = std::get_if<Round>(&*answer);
    if (round == nullptr) Fail(absl::InternalError("the job has ended"));
    const elastic::NodePlacement& place = round->placement;
    if (place.group_world_size != given_.total || place.world_size != 8 * given_.total ||
        place.first_rank != 8 * place.group_rank) {
      Fail(absl::InternalError(absl::StrCat("a wrong placement: rank ", place.first_rank)));
    }
    agents_[index].generation = round->generation;
    ++shared_->ranks[place.group_rank];
    shared_->joined.Add();
  });
}

// Reports that a worker of the first agent has failed.
void RendezvousAgents::ReportFailure() {
  const Rendezvous::Failure failure{
      .generation = agents_[0].generation, .rank = 0, .cause = "rank 0 was killed by SIGKILL"};
  agents_[0].rendezvous->ReportFailure(
      failure, kPatience, [this](const absl::StatusOr<elastic::FailureVerdict>& verdict) {
        if (!verdict.ok()) Fail(verdict.status());
        if (verdict->decision != elastic::FailureVerdict::Decision::kRestart) {
          Fail(absl::InternalError("the failure was not followed by a restart"));
        }
        if (!agents_[0].generation.nonce.empty()) Told(0);  // the verdict notifies the reporter
      });
}

// Sends PINGs. The loop of all agents does not run until this returns.
void RendezvousAgents::Ping() {
  absl::StatusOr<RedisPinger> pinger = RedisPinger::Create(given_.endpoint.port, given_.heartbeat);
  if (!pinger.ok()) Fail(pinger.status());
  shared_->ping_connections += pinger->connections();
  shared_->silent.Add();
  const absl::StatusOr<int64_t> pings = pinger->Run([this] { return shared_->ping.load(); });
  if (!pings.ok()) Fail(pings.status());
  shared_->pings += *pings;
  shared_->pinged.Add();
}

void RendezvousAgents::OnNews(int index, const News& news) {
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

void RendezvousAgents::Told(int index) {
  agents_[index].generation = {};
  shared_->told.Add();
}

}  // namespace ddp::bench
