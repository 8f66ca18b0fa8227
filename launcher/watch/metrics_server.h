#ifndef DDP_LAUNCHER_WATCH_METRICS_SERVER_H_
#define DDP_LAUNCHER_WATCH_METRICS_SERVER_H_

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

// Serves the job's metrics to Prometheus: `GET /metrics` over HTTP, from the agent's own event
// loop.
//
//   DDP_ASSIGN_OR_RETURN(auto metrics, MetricsServer::Listen(loop, {.port = 9400}, [&] {
//     return tracker.Status(clock.Now());
//   }));
//
// The server has no thread of its own. Each answer shows the job at that moment. Between requests
// the server costs nothing, and its destructor does not wait. (prometheus-cpp makes the text. Its
// own server has three threads, and stopping them takes up to two seconds.)
//
// The server listens on all addresses, IPv4 and IPv6, since Prometheus usually runs on another
// host. Any client that reaches the port can read run id, host name, steps and speeds, and can
// change nothing. Size, time and number of connections are bounded, and the server never blocks on
// one.
//
// Thread: that of the event loop.
class MetricsServer {
 public:
  struct Options {
    int port = 0;  // TCP port; 0: any free one

    // Maximum life of a connection; then it is closed, answered or not.
    absl::Duration connection_timeout = absl::Seconds(5);
    // Maximum of open connections; further ones are closed at once.
    int connections_max = 32;
  };

  // Function that makes the snapshot to serve.
  using Source = std::function<elastic::JobStatus()>;

  // Starts listening. `loop` is not owned and must outlive the server.
  //
  // Errors: kFailedPrecondition (the port is taken; names it and the flag), kPermissionDenied (a
  // port below 1024), kInternal.
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
    std::string response;  // sent from here; empty: still receiving
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
  std::map<int, Connection> connections_;  // connections by descriptor
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_WATCH_METRICS_SERVER_H_
