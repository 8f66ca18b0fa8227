#include "store/redis/wire/redis_reply.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ddp::store {
namespace {

constexpr size_t kShownBytes = 80;

const char* TypeName(RedisReply::Type type) {
  switch (type) {
    case RedisReply::Type::kNil:
      return "nil";
    case RedisReply::Type::kStatus:
      return "status";
    case RedisReply::Type::kError:
      return "error";
    case RedisReply::Type::kString:
      return "string";
    case RedisReply::Type::kInteger:
      return "integer";
    case RedisReply::Type::kArray:
      return "array";
  }
  return "unknown";
}

absl::Status Unexpected(const char* wanted, const RedisReply& reply) {
  return absl::InternalError(
      absl::StrCat("Redis answered ", reply.DebugString(), " where ", wanted, " is expected"));
}

}  // namespace

RedisReply RedisReply::Integer(int64_t value) {
  RedisReply reply(Type::kInteger, "");
  reply.integer_ = value;
  return reply;
}

RedisReply RedisReply::Array(std::vector<RedisReply> elements) {
  RedisReply reply(Type::kArray, "");
  reply.elements_ = std::move(elements);
  return reply;
}

absl::StatusOr<std::string> RedisReply::AsString() const& {
  if (type_ == Type::kString || type_ == Type::kStatus) return text_;
  return Unexpected("a string", *this);
}

absl::StatusOr<std::string> RedisReply::AsString() && {
  if (type_ == Type::kString || type_ == Type::kStatus) return std::move(text_);
  return Unexpected("a string", *this);
}

absl::StatusOr<int64_t> RedisReply::AsInteger() const {
  if (type_ == Type::kInteger) return integer_;
  int64_t value = 0;
  if (type_ == Type::kString && absl::SimpleAtoi(text_, &value) && absl::StrCat(value) == text_) {
    return value;
  }
  return Unexpected("an integer", *this);
}

absl::StatusOr<absl::Span<const RedisReply>> RedisReply::AsArray() const& {
  if (type_ == Type::kArray) return absl::MakeConstSpan(elements_);
  return Unexpected("an array", *this);
}

absl::StatusOr<std::vector<RedisReply>> RedisReply::AsArray() && {
  if (type_ == Type::kArray) return std::move(elements_);
  return Unexpected("an array", *this);
}

const std::string& RedisReply::error_text() const {
  static const std::string* const kNone = new std::string;
  return IsError() ? text_ : *kNone;
}

std::string RedisReply::DebugString() const {
  switch (type_) {
    case Type::kNil:
      return "nil";
    case Type::kInteger:
      return absl::StrCat("integer ", integer_);
    case Type::kArray:
      return absl::StrCat("array of ", elements_.size());
    default:
      return absl::StrCat(TypeName(type_), " '", absl::CEscape(text_.substr(0, kShownBytes)),
                          text_.size() > kShownBytes ? "...'" : "'");
  }
}

}  // namespace ddp::store
