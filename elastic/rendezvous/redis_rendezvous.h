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
#include "elastic/job/job_spec.h"
#include "elastic/rendezvous/rendezvous.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::elastic {

// The Rendezvous of one agent through Redis 6 or newer: each request is one Lua script. ddprun owns
// it. All requests and notifications use one connection, which the agent's event loop watches.
//
// All keys begin with `ddp:{RUN_ID}:`, so they live in one hash slot. Those of a job's state begin
// with `ddp:{RUN_ID}:i<instance>:`, and expire about a day after the last script that any agent of
// the job sent. A lease runs by the server's clock. By default, a member of a round renews its
// lease six times in the lease's duration.
//
// When the server cannot be reached, requests and heartbeats are retried with growing pauses. Only
// Open() blocks. Later, connecting and looking up the server's name do not block the event loop.
//
// Thread: the event loop's.
class RedisRendezvous final : public Rendezvous {
 public:
  struct Options {
    JobSpec job;
    store::RedisEndpoint endpoint;

    // Time for Open() to reach the server.
    absl::Duration connect_timeout = absl::Seconds(30);
    // Time for the first attempt to connect, once the addresses of the server are known. Each
    // attempt that is too short doubles the time of the next one, up to 4 seconds.
    absl::Duration first_attempt = absl::Milliseconds(250);
    // Time for one later script. After it the connection counts as broken.
    absl::Duration reply_timeout = absl::Seconds(2);
    // The longest pause before a failed script is sent again; see RendezvousCore::Options.
    absl::Duration retry_pause_max = absl::InfiniteDuration();

    // Joins this instance of the run, which must exist; 0: chosen by the rules.
    int64_t instance = 0;
  };

  // Connects and opens an instance of the run. Blocks for at most connect_timeout. `loop` is not
  // owned and must outlive the rendezvous. Errors: kUnavailable (says where, how long and why),
  // kUnauthenticated, kPermissionDenied, kFailedPrecondition (a server before Redis 6), kNotFound
  // (Options::instance does not exist), kInternal.
  static absl::StatusOr<std::unique_ptr<RedisRendezvous>> Open(const Options& options,
                                                               EventLoop* loop);
  ~RedisRendezvous() override;

  // The number of this job's instance of the run id, from 1.
  int64_t instance() const;
  // The job's limits. Another node may have set them.
  JobLimits limits() const;

  void Ask(const RendezvousRequest& request, absl::Duration timeout, Done done) override;
  void Cancel() override;
  void SetReport(const NodeReport& report) override;
  int64_t median_busy_us() const override;
  std::optional<RankAtWork> at_work() const override;
  void Watch(std::function<void(const News&)> on_news) override;

 private:
  struct State;
  explicit RedisRendezvous(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_REDIS_RENDEZVOUS_H_
