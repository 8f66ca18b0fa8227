#ifndef DDP_ELASTIC_RENDEZVOUS_REDIS_RENDEZVOUS_H_
#define DDP_ELASTIC_RENDEZVOUS_REDIS_RENDEZVOUS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "elastic/rendezvous/rendezvous.h"
#include "store/redis_endpoint.h"

namespace ddp::elastic {

// The rendezvous of one agent, in Redis (6 or newer): each request is one Lua script. All of it,
// the news of the other nodes too, travels over one connection that the agent's event loop watches.
//
// A job's keys are all `ddp:{RUN_ID}:i<instance>:...`, so that they live in one hash slot, and
// expire a day after the last agent was heard. While the agent is in a round its lease is renewed
// every sixth of its length, by the server's clock.
//
// Out of reach: requests and heartbeats are tried again with growing pauses. All waiting is done in
// the event loop, that for a connection and for the server's name too; only Open() blocks.
//
// Thread: that of the event loop.
class RedisRendezvous final : public Rendezvous {
 public:
  struct Options {
    store::RedisEndpoint endpoint;
    std::string run_id;
    // Empty: the run id alone says which job this is. Else agents meet by this text as well, and a
    // job that has all its nodes is left alone: what agents without a run id of their own use.
    std::string fingerprint;

    // Of the job; those of the node that opens it count.
    int max_restarts = 0;
    int min_nodes = 1;
    int max_nodes = 1;
    absl::Duration last_call = absl::Seconds(30);  // of the first round, once min_nodes have come
    int no_progress_limit = 3;                     // failures in a row without a step; 0: no limit
    int quarantine_strikes = 3;                    // failures of one machine; 0: no quarantine
    absl::Duration quarantine_cooldown = absl::Seconds(60);

    absl::Duration lease = absl::Seconds(3);
    absl::Duration heartbeat;  // zero: a sixth of the lease

    // How long Open() tries to reach the server.
    absl::Duration connect_timeout = absl::Seconds(30);
    // One try, later on.
    absl::Duration reconnect_timeout = absl::Milliseconds(250);
    // One script, later on: after that the connection counts as broken.
    absl::Duration reply_timeout = absl::Seconds(2);

    // Takes part in this instance of the run, which must be open; 0: chosen by the rules above.
    int64_t instance = 0;
  };

  // Reaches the server and opens an instance of the run. Blocks, at most for connect_timeout.
  // Errors: kUnavailable (says where, how long and why), kUnauthenticated, kPermissionDenied,
  // kFailedPrecondition (a server before Redis 6), kInternal. `loop` is not owned and must outlive
  // the rendezvous.
  static absl::StatusOr<std::unique_ptr<RedisRendezvous>> Open(const Options& options,
                                                               EventLoop* loop);
  ~RedisRendezvous() override;

  // The instance of the run id that this job is, from 1.
  int64_t instance() const;
  // Of the job, which may be another node's.
  JobLimits limits() const;

  void Join(const NodeOffer& offer, absl::Duration timeout, JoinDone done) override;
  void ReportFailure(const Failure& failure, absl::Duration timeout, FailureDone done) override;
  void Complete(const GenerationId& generation, absl::Duration timeout, Done done) override;
  void Drain(const GenerationId& generation, const std::string& cause, absl::Duration timeout,
             Done done) override;
  void TakeBack(const GenerationId& generation, absl::Duration timeout, Done done) override;
  void Leave(absl::Duration timeout, Done done) override;
  void Close(const JobEnd& end, absl::Duration timeout, Done done) override;
  void Cancel() override;
  void SetReport(const NodeReport& report) override;
  int64_t median_busy_us() const override;
  void Watch(std::function<void(const News&)> on_news) override;

 private:
  struct State;
  explicit RedisRendezvous(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_REDIS_RENDEZVOUS_H_
