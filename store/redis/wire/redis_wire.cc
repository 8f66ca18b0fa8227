#include "store/redis/wire/redis_wire.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "absl/types/span.h"
#include "base/status_macros.h"

namespace ddp::store {
namespace {

// Appends a mark, a number and a line end: "$5\r\n".
void AppendHeader(char mark, size_t number, std::string& out) {
  char digits[24];
  const std::to_chars_result end = std::to_chars(digits, digits + sizeof(digits), number);
  out.push_back(mark);
  out.append(digits, end.ptr);
  out.append("\r\n");
}

RedisPush::Kind KindOf(const std::string& word) {
  if (word == "message") return RedisPush::Kind::kMessage;
  if (word == "subscribe") return RedisPush::Kind::kSubscribed;
  if (word == "unsubscribe") return RedisPush::Kind::kUnsubscribed;
  return RedisPush::Kind::kOther;
}

// All pushes that this project uses have three parts: kind, channel, and text or number.
RedisPush ToPush(const RedisReply& reply) {
  const absl::StatusOr<absl::Span<const RedisReply>> parts = reply.AsArray();
  if (!parts.ok() || parts->size() != 3) return {};
  const RedisPush::Kind kind = KindOf((*parts)[0].AsString().value_or(""));
  if (kind == RedisPush::Kind::kOther) return {};
  return {.kind = kind,
          .channel = (*parts)[1].AsString().value_or(""),
          .text = (*parts)[2].AsString().value_or("")};
}

}  // namespace

void AppendRedisCommand(const std::vector<std::string>& words, std::string& out) {
  size_t size = out.size() + 16;
  for (const std::string& word : words) size += word.size() + 16;
  if (size > out.capacity()) out.reserve(std::max(size, 2 * out.capacity()));
  AppendHeader('*', words.size(), out);
  for (const std::string& word : words) {
    AppendHeader('$', word.size(), out);
    out.append(word);
    out.append("\r\n");
  }
}

std::string RedisWireForm(const std::vector<std::vector<std::string>>& commands) {
  std::string out;
  for (const std::vector<std::string>& command : commands) AppendRedisCommand(command, out);
  return out;
}

RedisWire::RedisWire(Pushes pushes, const Limits& limits) : mode_(pushes), replies_(limits) {
  if (mode_ == Pushes::kKept) pushes_.emplace(limits);
}

absl::Status RedisWire::Feed(const char* data, size_t size) {
  if (mode_ == Pushes::kAreReplies) return replies_.Feed(data, size);
  std::string replies;
  std::string pushes;
  DDP_RETURN_IF_ERROR(splitter_.Split(data, size, replies, pushes));
  if (pushes_.has_value() && !pushes.empty()) {
    DDP_RETURN_IF_ERROR(pushes_->Feed(pushes.data(), pushes.size()));
  }
  if (replies.empty()) return absl::OkStatus();
  return replies_.Feed(replies.data(), replies.size());
}

absl::StatusOr<bool> RedisWire::NextReply(RedisReply& reply) { return replies_.Next(reply); }

absl::StatusOr<bool> RedisWire::NextPush(RedisPush& push) {
  if (!pushes_.has_value()) return false;
  RedisReply reply;
  DDP_ASSIGN_OR_RETURN(const bool complete, pushes_->Next(reply));
  if (complete) push = ToPush(reply);
  return complete;
}

void RedisWire::Reset() {
  splitter_.Reset();
  replies_.Reset();
  if (pushes_.has_value()) pushes_->Reset();
}

}  // namespace ddp::store
