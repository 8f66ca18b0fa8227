#ifndef DDP_STORE_REDIS_WIRE_REDIS_PUSH_SPLITTER_H_
#define DDP_STORE_REDIS_WIRE_REDIS_PUSH_SPLITTER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace ddp::store {

// Splits the bytes of a Redis connection in protocol RESP3 into two streams: the replies to
// commands, and the messages that the server pushes between them. Both streams are RESP2, each for
// a RedisReplyReader. A RESP2 connection that is subscribed can run no commands; with the splitter,
// one connection can do both.
//
// A message may come in the middle of a reply: Redis up to 7.0 does so to a client that publishes,
// in a transaction, on a channel to which that client is subscribed.
//
// Of RESP3's other types the splitter knows only those that a server sends to this project's
// commands: nil, and maps (which become arrays of keys and values). It does no I/O and keeps no
// more than one line.
//
// Thread-compatible. After an error, do not use it until Reset().
class RedisPushSplitter {
 public:
  // Takes bytes as they came from the socket. Appends the bytes of replies to `replies` and those
  // of messages to `pushes`. kInternal: the bytes are not the protocol, or of an unknown type.
  absl::Status Split(const char* data, size_t size, std::string& replies, std::string& pushes);

  // Discards all state, for a new connection.
  void Reset() { *this = RedisPushSplitter(); }

 private:
  enum class State { kType, kHeader, kLine, kPayload };

  absl::Status TakeType(char type);
  absl::Status TakeHeader(std::string& replies, std::string& pushes);
  void EndItem(int64_t nested);
  std::string& Out(std::string& replies, std::string& pushes) const {
    return push_items_ > 0 ? pushes : replies;
  }

  State state_ = State::kType;
  std::string header_;        // of the item that begins: its type and number, up to the line end
  bool line_ends_ = false;    // the last byte was '\r'
  int64_t payload_left_ = 0;  // bytes, with the line end
  int64_t push_items_ = 0;    // items of a push that are still to come; 0: not in a push
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_WIRE_REDIS_PUSH_SPLITTER_H_
