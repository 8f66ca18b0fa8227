#ifndef DDP_STORE_REDIS_WIRE_REDIS_REPLY_H_
#define DDP_STORE_REDIS_WIRE_REDIS_REPLY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ddp::store {

// A reply of a Redis server: a value type that owns all its data. Copy and move it freely.
// Thread-compatible.
//
// Replies are not trusted to have the type that the caller expects. Each accessor checks the type
// and returns kInternal, naming both types, when the reply has another one:
//
//   DDP_ASSIGN_OR_RETURN(RedisReply reply, connection->Command({"HMGET", key, "a", "b"}));
//   DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> values, std::move(reply).AsArray());
//   if (values.size() != 2) return absl::InternalError(...);
//   if (!values[0].IsNil()) { DDP_ASSIGN_OR_RETURN(std::string a, values[0].AsString()); ... }
class RedisReply {
 public:
  enum class Type {
    kNil,      // nothing: a missing key, an expired wait
    kStatus,   // "OK"
    kError,    // "ERR ..."; RedisCaller's methods return it as a Status instead
    kString,   // bytes
    kInteger,  // 64 bits
    kArray,    // replies
  };

  RedisReply() = default;  // nil
  static RedisReply Status(std::string text) { return RedisReply(Type::kStatus, std::move(text)); }
  static RedisReply Error(std::string text) { return RedisReply(Type::kError, std::move(text)); }
  static RedisReply String(std::string text) { return RedisReply(Type::kString, std::move(text)); }
  static RedisReply Integer(int64_t value);
  static RedisReply Array(std::vector<RedisReply> elements);

  Type type() const { return type_; }
  bool IsNil() const { return type_ == Type::kNil; }
  bool IsError() const { return type_ == Type::kError; }

  // Returns the bytes of a string or a status.
  absl::StatusOr<std::string> AsString() const&;
  absl::StatusOr<std::string> AsString() &&;

  // Returns the value of an integer, or of a string that is exactly a decimal integer. (Redis
  // returns a number that is stored as a value in this form.)
  absl::StatusOr<int64_t> AsInteger() const;

  // Returns the elements of an array. The span is valid as long as this reply.
  absl::StatusOr<absl::Span<const RedisReply>> AsArray() const&;
  absl::StatusOr<std::vector<RedisReply>> AsArray() &&;

  // Returns the text of an error, or an empty string for any other type.
  const std::string& error_text() const;

  // Returns the type and the start of the content, for messages.
  std::string DebugString() const;

 private:
  friend class RedisReplyReader;

  RedisReply(Type type, std::string text) : type_(type), text_(std::move(text)) {}

  Type type_ = Type::kNil;
  int64_t integer_ = 0;
  std::string text_;                  // kStatus, kError, kString
  std::vector<RedisReply> elements_;  // kArray
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_WIRE_REDIS_REPLY_H_
