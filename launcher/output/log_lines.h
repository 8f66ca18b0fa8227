#ifndef DDP_LAUNCHER_OUTPUT_LOG_LINES_H_
#define DDP_LAUNCHER_OUTPUT_LOG_LINES_H_

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "glog/logging.h"
#include "launcher/output/say.h"

namespace ddp::launcher {

// Log sink that prints our libraries' log lines as ddprun's own: at once on stderr, or, while the
// agent runs, by a function that does not block on stderr. main() owns it. Route() binds that
// function to the agent's thread; lines of other threads always go to stderr. glog itself prints
// the lines of fatal errors. send() may run in any thread. Route() runs in one thread, the same at
// each call.
class LogLines final : public google::LogSink {
 public:
  using google::LogSink::send;

  // Sends lines of the calling thread to `say` from now on; empty: to stderr again.
  void Route(std::function<void(const std::string& line)> say) {
    say_ = std::move(say);
    thread_ = std::this_thread::get_id();
  }

  void send(google::LogSeverity severity, const char* /*full_filename*/,
            const char* /*base_filename*/, int /*line*/, const google::LogMessageTime& /*time*/,
            const char* message, size_t size) override {
    if (severity >= google::GLOG_FATAL) return;
    const std::string line(message, size);
    // Other threads may block on stderr, and must not use the agent's LogRouter.
    const bool is_routed = std::this_thread::get_id() == thread_ && say_;
    is_routed ? say_(line) : Say(line);
  }

 private:
  std::atomic<std::thread::id> thread_;
  std::function<void(const std::string&)> say_;  // used by that thread only
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OUTPUT_LOG_LINES_H_
