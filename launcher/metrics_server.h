#ifndef DDP_LAUNCHER_METRICS_SERVER_H_
#define DDP_LAUNCHER_METRICS_SERVER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "elastic/agent/job_status.h"

namespace ddp::launcher {

// Answers Prometheus: `GET /metrics` over HTTP, from the agent's own event loop.
//
//   DDP_ASSIGN_OR_RETURN(auto metrics, MetricsServer::Listen(loop, {.port = 9400}, [&] {
//     return tracker.Status(clock.Now());
//   }));
//
// No thread of its own: whoever looks sees the job as it is at that moment, the agent pays nothing
// while nobody looks, and its end waits for nothing. (prometheus-cpp makes the text. Its own server
// brings three threads, and stopping them takes up to two seconds.)
//
// It listens on all addresses, of IPv4 and of IPv6, since Prometheus is elsewhere as a rule:
// whoever reaches the port can read run id, host name, steps and speeds, and can change nothing.
// What comes over the wire is bounded in size, time and number of connections, and never waited
// for.
//
// Thread: that of the event loop.
class MetricsServer {
 public:
  struct Options {
    int port = 0;  // 0: any free one

    // A connection that has not got its answer within that time is closed.
    absl::Duration connection_timeout = absl::Seconds(5);
    // Connections beyond these are closed unheard.
    int connections_max = 32;
  };

  // Makes the snapshot that is served.
  using Source = std::function<elastic::JobStatus()>;

  // `loop` is not owned and must outlive the server. Errors: kFailedPrecondition (the port is
  // taken: names it and the flag), kPermissionDenied (a port below 1024), kInternal.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Listen(EventLoop* loop,
                                                               const Options& options,
                                                               Source source);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  int port() const { return port_; }

 private:
  struct Connection {
    UniqueFd fd;
    EventLoop::TimerId timer = 0;
    std::string request;
    std::string response;  // not empty: being sent
    size_t sent = 0;
  };

  MetricsServer(EventLoop* loop, const Options& options, Source source, UniqueFd listener,
                int port);

  absl::Status StartAccepting();
  void PauseAccepting();
  void Accept();
  void OnReady(int fd, uint32_t events);
  bool Receive(Connection& connection);
  bool Send(Connection& connection);
  bool WatchFor(Connection& connection, uint32_t events);
  void Close(int fd);
  std::string Answer(const std::string& request) const;

  EventLoop* const loop_;
  const Options options_;
  const Source source_;
  const UniqueFd listener_;
  const int port_;
  EventLoop::TimerId pause_timer_ = 0;
  std::map<int, Connection> connections_;  // by descriptor
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_METRICS_SERVER_H_
