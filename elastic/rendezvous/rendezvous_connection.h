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
#include "store/redis/redis_caller.h"
#include "store/redis/redis_dialer.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_script.h"
#include "store/redis/redis_socket.h"
#include "store/redis/wire/redis_reply.h"
#include "store/redis/wire/redis_wire.h"

namespace ddp::elastic {

// An agent's only connection to Redis (RESP3, so Redis 6 or newer). The object runs one script or
// command at a time and receives the messages of one channel. No method blocks the event loop.
// RedisRendezvous owns it.
//
// The connection breaks as a whole: the call in flight fails, and the subscription ends. A silence
// of command_timeout breaks it, because a late reply could be matched to another call. A refusal to
// write breaks it too: the server is now a replica. The next Call() or Listen() connects again,
// with one try that both share. Nothing is retried here. A failed call may have been applied.
// Messages that are published without a subscription are lost.
//
// A call's reply is delivered before pushes that arrived just before it: the call's own script may
// have published them.
//
// Thread: the event loop's. Callbacks come from the loop, never from within a method. A callback
// may call methods of this object, and must not destroy it.
class RendezvousConnection {
 public:
  struct Callbacks {
    std::function<void()> on_subscribed;
    std::function<void(std::string text)> on_push;
    // The subscription ended; called once for each. kUnavailable, kDeadlineExceeded, kInternal: the
    // connection broke, or none could be made. Other codes: the server refused the user or the
    // channel, with the server's text, mapped as by RedisCaller.
    std::function<void(absl::Status why)> on_end;
  };

  // Does not connect before the first Call() or Listen(). `loop` is not owned and must outlive this
  // object. Used of `options`: first_connect_timeout and connect_timeout
  // (one try to connect); command_timeout (from a call
  // to its reply, and from Listen() to the server's confirmation); limits; client_name.
  RendezvousConnection(const store::RedisEndpoint& endpoint,
                       const store::RedisConnectionOptions& options, EventLoop* loop,
                       Callbacks callbacks);
  // Drops the call in flight: its `done` is not called.
  ~RendezvousConnection();
  RendezvousConnection(const RendezvousConnection&) = delete;
  RendezvousConnection& operator=(const RendezvousConnection&) = delete;

  // Takes over a connected socket from RedisConnection::Release(): RESP3 has been negotiated, and
  // all replies have been read. CHECKs that there is no connection.
  void Adopt(store::RedisSocket socket);

  // Returns true while a call is in flight: Call() must not be called then.
  bool busy() const { return call_.has_value(); }

  // Sends the script. `script` must outlive the call. Errors: those of RedisCaller.
  using Done = std::function<void(absl::StatusOr<store::RedisReply>)>;
  void Call(const store::RedisScript& script, const std::vector<std::string>& keys,
            const std::vector<std::string>& args, Done done);
  // Sends a command, given as its words. Errors: the same.
  void Call(std::vector<std::string> words, Done done);

  // Subscribes to `channel` in place of any other. No message is delivered before the server has
  // confirmed. On an open connection the request precedes anything that is sent later.
  void Listen(const std::string& channel);

 private:
  struct PendingCall {
    Done done;
    const store::RedisScript* script;  // null: a command
    std::vector<std::string> words;    // of a script: all words after EVALSHA and its hash
    bool source_sent = false;
  };
  // An answer that the server owes. A call gets a reply; the other kinds get a push or an error.
  struct Awaited {
    enum class Kind { kCall, kSubscribe, kUnsubscribe };
    Kind kind;
    std::string channel;
  };

  bool Ready();
  void Use(store::RedisSocket socket);
  void SendCall();
  void AskForChannel();
  void Send(Awaited awaited, const std::vector<std::string>& words);
  void Flush();
  void WatchFor(uint32_t events);

  void OnEvents(uint32_t events);
  absl::Status Read();
  void TakeTurn();
  absl::StatusOr<bool> TakeNext();
  absl::StatusOr<bool> TakeNextReply();
  absl::StatusOr<bool> TakeNextPush();
  absl::Status Named(const absl::Status& wire_error) const;
  absl::Status TakeReply(store::RedisReply reply);
  void OnReply(store::RedisReply reply);
  void TakePush(const store::RedisPush& push);
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

  // State of the current connection.
  store::RedisSocket socket_;
  uint32_t watched_events_ = 0;
  std::string out_;  // bytes that the socket has not accepted yet
  std::deque<Awaited> awaited_;
  store::RedisWire wire_;
  EventLoop::TimerId turn_timer_ = 0;   // set while received data waits to be handled
  EventLoop::TimerId break_timer_ = 0;  // set while Break() is scheduled

  std::optional<PendingCall> call_;  // sent, or waiting for the connection
  EventLoop::TimerId reply_timer_ = 0;

  std::string channel_;     // current channel; empty: none
  bool listening_ = false;  // the server has confirmed the channel
  EventLoop::TimerId confirm_timer_ = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_CONNECTION_H_
