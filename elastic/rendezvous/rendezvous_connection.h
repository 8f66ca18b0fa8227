#ifndef DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_CONNECTION_H_
#define DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_CONNECTION_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "store/redis_caller.h"
#include "store/redis_dialer.h"
#include "store/redis_endpoint.h"
#include "store/redis_push_splitter.h"
#include "store/redis_reply.h"
#include "store/redis_reply_reader.h"
#include "store/redis_script.h"

namespace ddp::elastic {

// The one connection of an agent to Redis: runs one script or command at a time, and hears what is
// published in one channel meanwhile (protocol RESP3, so Redis 6 or newer). Nothing of it makes the
// event loop wait.
//
// The connection breaks as a whole: the call in flight fails and the subscription ends, both at
// once, also where the server was silent for too long, lest a late reply be taken for that of
// another call, and where it refuses to write because it is a replica (now). The next Call() or
// Listen() makes a new one, with one try to connect; both made together share it. Nothing is
// repeated here: a call that failed may have been applied, and what was published while there was
// no subscription is never seen.
//
// A call's reply is delivered before the messages that came just before it: its own script may have
// published them.
//
// Thread: that of the event loop. All callbacks come from the loop, never from within a method, and
// must not destroy this object; they may use it.
class RendezvousConnection {
 public:
  struct Callbacks {
    std::function<void()> on_subscribed;
    std::function<void(std::string text)> on_push;
    // Once per subscription. kUnavailable, kDeadlineExceeded, kInternal: the connection broke, or
    // there was none. Else the server refused us, or the channel: its text, as of RedisCaller.
    std::function<void(absl::Status why)> on_end;
  };

  // `loop` is not owned and must outlive this. Of `options`: connect_timeout, for one try to
  // connect; command_timeout, from a call to its answer and from Listen() to
  // the server's word; limits; client_name. Connects with the
  // first Call() or Listen().
  RendezvousConnection(const store::RedisEndpoint& endpoint,
                       const store::RedisConnectionOptions& options, EventLoop* loop,
                       Callbacks callbacks);
  // Drops the call in flight: its `done` is not called.
  ~RendezvousConnection();
  RendezvousConnection(const RendezvousConnection&) = delete;
  RendezvousConnection& operator=(const RendezvousConnection&) = delete;

  // Goes on with a socket that was greeted in RESP3 and of which every reply was read (that of
  // RedisConnection::Release()). Only while there is no connection.
  void Adopt(UniqueFd fd);

  // While true, Call() must not be called.
  bool busy() const { return call_.has_value(); }

  // Sends the script. Errors: those of RedisCaller. `script` must outlive the call.
  using Done = std::function<void(absl::StatusOr<store::RedisReply>)>;
  void Call(const store::RedisScript& script, const std::vector<std::string>& keys,
            const std::vector<std::string>& args, Done done);
  // The same for a command, by its words.
  void Call(std::vector<std::string> words, Done done);

  // Listens to `channel`, and to no other any more: nothing is heard until the server has said so.
  // Where there is a connection, the server is asked for it before anything that is sent later.
  void Listen(const std::string& channel);

 private:
  struct PendingCall {
    Done done;
    const store::RedisScript* script;  // null: a command
    std::vector<std::string> words;    // of a script: what follows its name
    bool source_sent = false;
  };
  // What the server has still to answer. A call brings a reply; the others a push, or an error.
  struct Awaited {
    enum class Kind { kCall, kSubscribe, kUnsubscribe };
    Kind kind;
    std::string channel;
  };

  bool Ready();
  void SendCall();
  void AskForChannel();
  void Send(Awaited awaited, std::vector<std::string> words);
  void Flush();
  void WatchFor(uint32_t events);

  void OnEvents(uint32_t events);
  absl::Status Read();
  void TakeTurn();
  absl::StatusOr<bool> TakeNext();
  absl::StatusOr<bool> Next(store::RedisReplyReader& reader, store::RedisReply& next);
  absl::Status TakeReply(store::RedisReply reply);
  void OnReply(store::RedisReply reply);
  void TakePush(const store::RedisReply& push);
  bool Awaits(Awaited::Kind kind, const std::string& channel) const;
  void EndSubscription(const absl::Status& why);

  void Break(const absl::Status& why);
  void BreakSoon(const absl::Status& why);
  void Close();

  const store::RedisEndpoint endpoint_;
  const store::RedisConnectionOptions options_;
  EventLoop* const loop_;
  const Callbacks callbacks_;

  store::RedisDialer dialer_;
  bool dialing_ = false;

  // Of the connection.
  UniqueFd fd_;
  uint32_t watched_events_ = 0;
  std::string out_;  // what the socket has not taken yet
  std::deque<Awaited> awaited_;
  store::RedisPushSplitter splitter_;
  store::RedisReplyReader replies_;
  store::RedisReplyReader pushes_;
  EventLoop::TimerId turn_timer_ = 0;   // there is more to take
  EventLoop::TimerId break_timer_ = 0;  // it is broken, which is about to be told

  std::optional<PendingCall> call_;  // sent, or waiting for the connection
  EventLoop::TimerId reply_timer_ = 0;

  std::string channel_;     // that is listened to; empty: none
  bool listening_ = false;  // the server has said so
  EventLoop::TimerId confirm_timer_ = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_CONNECTION_H_
