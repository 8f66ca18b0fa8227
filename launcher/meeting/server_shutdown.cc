#include "launcher/meeting/server_shutdown.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "elastic/rendezvous/round.h"
#include "store/redis/redis_connection.h"

namespace ddp::launcher {
namespace {

constexpr size_t kNodesAtATime = 1000;
constexpr absl::Duration kShortestPause = absl::Milliseconds(20);
constexpr absl::Duration kPausePerNode = absl::Milliseconds(1);
constexpr absl::Duration kCloseTimeout = absl::Seconds(2);

// Returns the time in which every live node learns of a change: heartbeats come every sixth of a
// lease, and a node leaves at once.
absl::Duration TimeToHear(absl::Duration lease) { return 2 * lease; }

int64_t LiveNodes(const elastic::JobRecord& job) {
  const int64_t seen = std::count_if(job.nodes.begin(), job.nodes.end(),
                                     [](const auto& node) { return node.lease_left_s > 0; });
  // Nodes beyond kNodesAtATime were not read and count as live.
  return seen + job.nodes_total - static_cast<int64_t>(job.nodes.size());
}

elastic::JobEnd ClosedBecause(const std::string& host) {
  elastic::JobEnd end;
  end.kind = elastic::JobEnd::Kind::kClosed;
  end.reason = absl::StrCat("node ", host,
                            ", which has left, held the rendezvous, and the nodes that are left "
                            "are too few to go on");
  return end;
}

}  // namespace

ServerShutdown DecideServerShutdown(const elastic::JobRecord& job, uint64_t own_generation,
                                    absl::Duration waited, absl::Duration lease,
                                    const elastic::AgentTimes& times) {
  const int64_t live = LiveNodes(job);
  if (live == 0) return ServerShutdown::kEnd;
  const bool goes_on = job.state == "running" || job.state == "draining";
  if (goes_on && job.generation > own_generation) return ServerShutdown::kEnd;
  if (job.state == "draining" || job.state == "forming") {
    // A node that still drains may be saving a checkpoint; a node that forms a round has no
    // workers.
    const absl::Duration limit =
        job.state == "draining" ? times.StopLimit() : times.shutdown_timeout;
    if (waited >= limit + TimeToHear(lease)) return ServerShutdown::kClose;
    return job.state == "forming" && live < job.min_nodes ? ServerShutdown::kClose
                                                          : ServerShutdown::kWait;
  }
  // The others learn that the job has ended; or they continue to work, and this node is done.
  return waited >= TimeToHear(lease) ? ServerShutdown::kEnd : ServerShutdown::kWait;
}

absl::Time ServerShutdownDeadline(absl::Time signalled_at, const elastic::AgentTimes& times) {
  if (times.termination_grace <= absl::ZeroDuration()) return absl::InfiniteFuture();
  return signalled_at + times.WorkersShareOfGrace();
}

absl::Duration PauseBetweenLooks(int64_t nodes) {
  return std::max(kShortestPause, nodes * kPausePerNode);
}

namespace {

// Reads the job again and again until this node may end, and closes it if the others are too few.
class OrderlyShutdown {
 public:
  OrderlyShutdown(const ServerShutdownOptions& options, EventLoop* event_loop,
                  elastic::Rendezvous* rendezvous, const Clock& clock,
                  store::RedisConnection* connection)
      : options_(options),
        event_loop_(*event_loop),
        rendezvous_(*rendezvous),
        clock_(clock),
        connection_(*connection),
        start_(clock.Now()) {}

  void Run() {
    ScheduleLook(absl::ZeroDuration());
    const bool watched =
        options_.hurry_fd >= 0 &&
        event_loop_.Watch(options_.hurry_fd, EPOLLIN, [this](uint32_t) { Hurry(); }).ok();
    (void)event_loop_.Run();
    if (watched) event_loop_.Unwatch(options_.hurry_fd);
    event_loop_.CancelTimer(timer_);
    rendezvous_.Cancel();
  }

 private:
  void ScheduleLook(absl::Duration pause) {
    timer_ = event_loop_.AddTimer(pause, [this] { Look(); });
  }

  void Hurry() {
    event_loop_.Unwatch(options_.hurry_fd);
    hurried_ = true;
  }

  void Look() {
    const absl::StatusOr<elastic::JobRecord> job =
        elastic::ReadJob(connection_, options_.job.run_id, options_.instance, kNodesAtATime);
    if (!job.ok()) return event_loop_.Stop();
    const bool hurries = hurried_ || clock_.Now() >= options_.end_by;
    const absl::Duration waited = hurries ? absl::InfiniteDuration() : clock_.Now() - start_;
    switch (DecideServerShutdown(*job, options_.own_generation, waited, options_.job.rules.lease,
                                 options_.job.times)) {
      case ServerShutdown::kEnd:
        return event_loop_.Stop();
      case ServerShutdown::kWait:
        return ScheduleLook(PauseBetweenLooks(job->nodes_total));
      case ServerShutdown::kClose:
        return Close();
    }
  }

  void Close() {
    if (std::exchange(closed_, true)) return event_loop_.Stop();
    start_ = clock_.Now();
    rendezvous_.Ask(elastic::CloseRequest{ClosedBecause(options_.host)}, kCloseTimeout,
                    [this](const elastic::RendezvousAnswer&) { Look(); });
  }

  const ServerShutdownOptions& options_;
  EventLoop& event_loop_;
  elastic::Rendezvous& rendezvous_;
  const Clock& clock_;
  store::RedisConnection& connection_;
  absl::Time start_;  // start of the present wait
  EventLoop::TimerId timer_ = 0;
  bool hurried_ = false;
  bool closed_ = false;
};

}  // namespace

void AwaitOthers(const ServerShutdownOptions& options, EventLoop* event_loop,
                 elastic::Rendezvous* rendezvous, const Clock& clock) {
  store::RedisConnectionOptions connecting;
  connecting.total_timeout = options.job.rules.lease;
  const auto connection = store::RedisConnection::Connect(options.endpoint, connecting);
  if (!connection.ok()) return;
  OrderlyShutdown(options, event_loop, rendezvous, clock, connection->get()).Run();
}

}  // namespace ddp::launcher
