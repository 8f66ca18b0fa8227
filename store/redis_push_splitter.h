#ifndef DDP_STORE_REDIS_PUSH_SPLITTER_H_
#define DDP_STORE_REDIS_PUSH_SPLITTER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace ddp::store {

// Takes the bytes of a Redis connection in protocol RESP3 apart: the replies to commands, and the
// messages that the server pushes between them. Both come out in RESP2, for a RedisReplyReader
// each. In RESP2 alone a subscribed connection can run no commands; this is what lets one
// connection do both.
//
// A message may come in the middle of a reply: Redis up to 7.0 does so to a client that publishes,
// in a transaction, on a channel to which it is subscribed itself.
//
// Of RESP3's other types it knows what a server says to the commands of this project: nil, and maps
// (which become arrays of keys and values). Does no I/O and keeps no more than one line.
//
// Thread-compatible. After an error it is of no use until Reset().
class RedisPushSplitter {
 public:
  // Takes bytes as they came from the socket, and appends each to what it belongs to. kInternal:
  // they are not the protocol.
  absl::Status Split(const char* data, size_t size, std::string& replies, std::string& pushes);

  // Forgets everything, for a new connection.
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
  std::string header_;        // of the item that begins: its type and number, without line end
  bool line_ends_ = false;    // the last byte of a line was '\r'
  int64_t payload_left_ = 0;  // bytes, with the line end
  int64_t push_items_ = 0;    // of a push, that are still to come; 0: this is no push
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_PUSH_SPLITTER_H_
