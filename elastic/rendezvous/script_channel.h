#ifndef DDP_ELASTIC_RENDEZVOUS_SCRIPT_CHANNEL_H_
#define DDP_ELASTIC_RENDEZVOUS_SCRIPT_CHANNEL_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "store/redis_connection.h"
#include "store/redis_dialer.h"
#include "store/redis_reply.h"
#include "store/redis_script.h"

namespace ddp::elastic {

// Runs one Redis script or command at a time without making the event loop wait for the answer.
//
// A broken connection fails the call that finds it so, and the next call makes a new one, with one
// try to connect; nothing of it blocks. Nothing is repeated here: a call that failed may have been
// applied.
//
// Thread: that of the event loop.
class ScriptChannel {
 public:
  // `loop` is not owned. `reply_timeout`: from a call to its answer.
  ScriptChannel(std::unique_ptr<store::RedisConnection> connection, EventLoop* loop,
                absl::Duration reply_timeout);
  // Drops the call in flight: its `done` is not called.
  ~ScriptChannel();
  ScriptChannel(const ScriptChannel&) = delete;
  ScriptChannel& operator=(const ScriptChannel&) = delete;

  // While true, Call() must not be called.
  bool busy() const { return done_ != nullptr; }

  // Sends the script; `done` is called from the loop, never from within Call(). Errors: those of
  // RedisConnection. `script` must outlive the call.
  using Done = std::function<void(absl::StatusOr<store::RedisReply>)>;
  void Call(const store::RedisScript& script, std::vector<std::string> keys,
            std::vector<std::string> args, Done done);
  // The same for a command, by its words.
  void Call(std::vector<std::string> words, Done done);

 private:
  void Connect();
  void SendCall();
  void SendScript(const char* command, const std::string& script);
  void Send(std::vector<std::string> words);
  void OnReadable();
  void OnReply(absl::StatusOr<store::RedisReply> reply);
  void Finish(absl::StatusOr<store::RedisReply> reply);
  void FinishSoon(absl::Status status);
  void StopWaiting();

  const std::unique_ptr<store::RedisConnection> connection_;
  EventLoop* const loop_;
  const absl::Duration reply_timeout_;
  store::RedisDialer dialer_;

  // Of the call in flight.
  Done done_;
  const store::RedisScript* script_ = nullptr;  // null: a command
  std::vector<std::string> words_;              // of a command
  std::vector<std::string> rest_of_command_;    // of a script: number of keys, keys, args
  bool source_sent_ = false;
  int watched_fd_ = -1;
  EventLoop::TimerId timer_ = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_SCRIPT_CHANNEL_H_
