// The bytes on a connection to Redis. Requests become bytes; received bytes become replies and
// pushes. Pure: no socket, no clock.
#ifndef DDP_STORE_REDIS_WIRE_REDIS_WIRE_H_
#define DDP_STORE_REDIS_WIRE_REDIS_WIRE_H_

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "store/redis/wire/redis_push_splitter.h"
#include "store/redis/wire/redis_reply.h"
#include "store/redis/wire/redis_reply_reader.h"

namespace ddp::store {

// Appends the wire form of a command to `out`: an array of byte strings.
void AppendRedisCommand(const std::vector<std::string>& words, std::string& out);

// Returns the wire form of `commands`, one after another.
std::string RedisWireForm(const std::vector<std::vector<std::string>>& commands);

// A message that the server sends without a request.
struct RedisPush {
  enum class Kind {
    kMessage,       // a message was published on `channel`
    kSubscribed,    // the server confirms SUBSCRIBE `channel`
    kUnsubscribed,  // the server confirms UNSUBSCRIBE `channel`
    kOther,         // any other push; `channel` and `text` are empty
  };
  Kind kind = Kind::kOther;
  std::string channel{};
  std::string text{};  // of a message
};

// Parses the bytes that one connection receives. The bytes are not trusted: the limits hold for
// each reply and each push.
//
// Replies and pushes come out as two streams. Each stream keeps its order. The order between a
// reply and a push is lost, so the caller chooses the stream that it reads first.
//
// Thread-compatible. After an error, do not use the wire until Reset().
class RedisWire {
 public:
  using Limits = RedisReplyReader::Limits;

  enum class Pushes {
    kAreReplies,  // RESP2: NextReply() returns them
    kDropped,     // RESP3: the wire discards them unparsed
    kKept,        // RESP3: NextPush() returns them
  };

  explicit RedisWire(Pushes pushes, const Limits& limits = {});

  // Adds bytes as they came from the socket. kInternal: the bytes are not the protocol.
  absl::Status Feed(const char* data, size_t size);

  // Moves the next reply into `reply` and returns true, if the reply is complete. Error replies are
  // replies. Returns false when more bytes are needed. kInternal: the bytes are not the protocol,
  // or the reply exceeds a limit.
  absl::StatusOr<bool> NextReply(RedisReply& reply);

  // The same for the next push. Returns false unless pushes are kept.
  absl::StatusOr<bool> NextPush(RedisPush& push);

  // Discards all state, for a new connection.
  void Reset();

 private:
  const Pushes mode_;
  RedisPushSplitter splitter_;  // of RESP3
  RedisReplyReader replies_;
  std::optional<RedisReplyReader> pushes_;  // present if pushes are kept
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_WIRE_REDIS_WIRE_H_
