#ifndef DDP_STORE_REDIS_REPLY_READER_H_
#define DDP_STORE_REDIS_REPLY_READER_H_

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "store/redis_reply.h"

struct redisReader;

namespace ddp::store {

// Turns the bytes of a Redis connection (protocol RESP2) into replies. Does no I/O: bytes in,
// replies out. What comes is not trusted: limits hold before memory is taken, whatever lengths are
// announced.
//
// Thread-compatible. After an error it stays in error until Reset().
class RedisReplyReader {
 public:
  struct Limits {
    // Bytes of one reply, with all that is nested in it.
    size_t max_reply_bytes = size_t{512} << 20;
    // Elements of one reply, with all that is nested in it.
    size_t max_reply_elements = size_t{1} << 22;
    // Arrays inside arrays: at most 7, fixed by the parser.
  };

  RedisReplyReader();
  explicit RedisReplyReader(const Limits& limits);
  ~RedisReplyReader();
  RedisReplyReader(const RedisReplyReader&) = delete;
  RedisReplyReader& operator=(const RedisReplyReader&) = delete;

  // Takes bytes as they came from the socket. kInternal: they exceed max_reply_bytes without having
  // ended a reply.
  absl::Status Feed(const char* data, size_t size);

  // Moves the next reply into `reply`, if it has come in full; false: more bytes are needed.
  // kInternal: these bytes are not the protocol, or exceed a limit.
  absl::StatusOr<bool> Next(RedisReply& reply);

  // Forgets everything, for a new connection.
  void Reset();

 private:
  struct Builder;

  const Limits limits_;
  std::unique_ptr<Builder> builder_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_REPLY_READER_H_
