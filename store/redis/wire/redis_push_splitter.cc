#include "store/redis/wire/redis_push_splitter.h"

#include <string.h>

#include <algorithm>
#include <charconv>
#include <system_error>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ddp::store {
namespace {

constexpr size_t kMaxHeaderBytes = 24;
// The pushes that this project subscribes to have three elements.
constexpr int64_t kMaxPushItems = 1024;
constexpr int64_t kMaxNumber = int64_t{1} << 31;

// Returns the number of bytes, from `data` on, that are whole items to be passed on unchanged. Most
// items are. Split() handles the others byte by byte.
size_t PassingBytes(const char* data, size_t size) {
  size_t at = 0;
  while (at < size) {
    const char type = data[at];
    if (type != '$' && type != '*' && type != ':' && type != '+' && type != '-') break;
    const auto* const end = static_cast<const char*>(memchr(data + at, '\n', size - at));
    if (end == nullptr || end[-1] != '\r') break;
    size_t next = end + 1 - data;
    if (type == '$' || type == '*') {
      int number = 0;
      const char* const first = data + at + 1;
      // TakeHeader() judges signs and leading zeros.
      if (*first < '0' || *first > '9' || (*first == '0' && first + 1 != end - 1)) break;
      const std::from_chars_result parsed = std::from_chars(first, end - 1, number);
      if (parsed.ec != std::errc() || parsed.ptr != end - 1) break;
      if (type == '$') next += static_cast<size_t>(number) + 2;
    }
    if (next > size) break;
    at = next;
  }
  return at;
}

absl::Status Refuse(const std::string& what) {
  return absl::InternalError(absl::StrCat("what Redis sent is not a reply to be accepted: ", what));
}

}  // namespace

absl::Status RedisPushSplitter::Split(const char* data, size_t size, std::string& replies,
                                      std::string& pushes) {
  for (size_t at = 0; at < size;) {
    if (state_ == State::kPayload) {
      const size_t count = std::min<size_t>(size - at, payload_left_);
      Out(replies, pushes).append(data + at, count);
      at += count;
      payload_left_ -= static_cast<int64_t>(count);
      if (payload_left_ == 0) EndItem(0);
      continue;
    }
    if (state_ == State::kType && push_items_ == 0) {
      const size_t passing = PassingBytes(data + at, size - at);
      replies.append(data + at, passing);
      at += passing;
      if (at == size) break;
    }
    const char byte = data[at++];
    if (state_ == State::kType) {
      const absl::Status taken = TakeType(byte);
      if (!taken.ok()) return taken;
    } else if (state_ == State::kHeader) {
      header_.push_back(byte);
      if (header_.size() > kMaxHeaderBytes) return Refuse("a number of too many digits");
    }
    if (state_ == State::kLine) Out(replies, pushes).push_back(byte);
    const bool ended = line_ends_ && byte == '\n';
    line_ends_ = byte == '\r';
    if (!ended) continue;
    if (state_ == State::kLine) {
      EndItem(0);
    } else {
      const absl::Status taken = TakeHeader(replies, pushes);
      if (!taken.ok()) return taken;
    }
  }
  return absl::OkStatus();
}

absl::Status RedisPushSplitter::TakeType(char type) {
  switch (type) {
    case '+':
    case '-':
    case ':':
      state_ = State::kLine;
      return absl::OkStatus();
    case '>':
      if (push_items_ > 0) return Refuse("a push in a push");
      [[fallthrough]];
    case '$':
    case '*':
    case '%':
    case '_':
      state_ = State::kHeader;
      header_.assign(1, type);
      return absl::OkStatus();
    default:
      return Refuse(absl::StrCat("an item of type '", absl::CEscape(std::string(1, type)), "'"));
  }
}

// Handles the complete line with the type and the number of an item.
absl::Status RedisPushSplitter::TakeHeader(std::string& replies, std::string& pushes) {
  const char type = header_.front();
  const std::string digits = header_.substr(1, header_.size() - 3);
  if (type == '_') {
    if (!digits.empty()) return Refuse("a nil with a value");
    Out(replies, pushes).append("$-1\r\n");
    EndItem(0);
    return absl::OkStatus();
  }
  int64_t number = 0;
  if (!absl::SimpleAtoi(digits, &number) || absl::StrCat(number) != digits || number < -1 ||
      number > kMaxNumber) {
    return Refuse(absl::StrCat("the length '", absl::CEscape(digits), "'"));
  }
  if (type == '>') {
    if (number < 1 || number > kMaxPushItems) return Refuse("a push of such a length");
    push_items_ = number + 1;  // and the push itself, which EndItem() counts below
  } else if (type == '%') {
    if (number < 0 || number > kMaxNumber / 2) return Refuse("a map of such a length");
    number *= 2;
  }
  const bool bytes = type == '$';
  absl::StrAppend(&Out(replies, pushes), bytes ? "$" : "*", number, "\r\n");
  if (bytes && number >= 0) {
    payload_left_ = number + 2;
    state_ = State::kPayload;
    return absl::OkStatus();
  }
  const int64_t nested = bytes || type == '>' ? 0 : std::max<int64_t>(number, 0);
  if (push_items_ > 0 && nested > kMaxPushItems - push_items_) {
    return Refuse("a push of such a length");
  }
  EndItem(nested);
  return absl::OkStatus();
}

// Ends an item. It consists of `nested` more items.
void RedisPushSplitter::EndItem(int64_t nested) {
  state_ = State::kType;
  if (push_items_ > 0) push_items_ += nested - 1;
}

}  // namespace ddp::store
