#ifndef DDP_STORE_REDIS_WIRE_REDIS_REPLY_READER_H_
#define DDP_STORE_REDIS_WIRE_REDIS_REPLY_READER_H_

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "store/redis/wire/redis_reply.h"

struct redisReader;

namespace ddp::store {

// Parses the bytes of a Redis connection (protocol RESP2) into replies. Does no I/O: bytes in,
// replies out. The bytes are not trusted: an announced length reserves no memory, and a reply that
// exceeds a limit is an error.
//
// Thread-compatible. After an error the reader stays in error until Reset().
class RedisReplyReader {
 public:
  struct Limits {
    // Bytes of one reply, nested replies included.
    size_t max_reply_bytes = size_t{512} << 20;
    // Elements of one reply, nested elements included.
    size_t max_reply_elements = size_t{1} << 22;
    // The depth of nested arrays is at most 7, fixed by the parser.
  };

  RedisReplyReader();
  explicit RedisReplyReader(const Limits& limits);
  ~RedisReplyReader();
  RedisReplyReader(const RedisReplyReader&) = delete;
  RedisReplyReader& operator=(const RedisReplyReader&) = delete;

  // Adds bytes as they came from the socket. kInternal: the parser is in error or out of memory.
  absl::Status Feed(const char* data, size_t size);

  // Moves the next reply into `reply` and returns true, if the reply is complete. Returns false
  // when more bytes are needed. kInternal: the bytes are not the protocol, or a reply exceeds a
  // limit, be it complete or not.
  absl::StatusOr<bool> Next(RedisReply& reply);

  // Discards all state, for a new connection.
  void Reset();

 private:
  struct Builder;

  const Limits limits_;
  std::unique_ptr<Builder> builder_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_WIRE_REDIS_REPLY_READER_H_
