#ifndef DDP_LAUNCHER_LOG_LINES_H_
#define DDP_LAUNCHER_LOG_LINES_H_

#include <functional>
#include <string>
#include <thread>

#include "glog/logging.h"
#include "launcher/say.h"

namespace ddp::launcher {

// Says what our libraries log as ddprun says everything: at once on stderr, or, while the agent
// runs, by a function that does not wait for stderr.
class LogLines final : public google::LogSink {
 public:
  using google::LogSink::send;

  // From now on lines of the calling thread go to `say`; empty: to stderr again.
  void Route(std::function<void(const std::string& line)> say) {
    thread_ = std::this_thread::get_id();
    say_ = std::move(say);
  }

  void send(google::LogSeverity severity, const char* /*full_filename*/,
            const char* /*base_filename*/, int /*line*/, const google::LogMessageTime& /*time*/,
            const char* message, size_t size) override {
    if (severity >= google::GLOG_FATAL) return;
    const std::string line(message, size);
    // Other threads may wait, and must not use what belongs to the agent's.
    const bool is_routed = std::this_thread::get_id() == thread_ && say_;
    is_routed ? say_(line) : Say(line);
  }

 private:
  std::thread::id thread_;
  std::function<void(const std::string&)> say_;
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_LOG_LINES_H_
