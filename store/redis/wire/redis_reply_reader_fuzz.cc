// The bytes of a Redis connection. The replies do not depend on the pieces in which their bytes
// came, stay within the limits, and can be written and parsed again.
#include "store/redis/wire/redis_reply_reader.h"

#include <glog/logging.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "store/redis/wire/redis_reply.h"
#include "testing/fuzz_target.h"

namespace ddp::store {
namespace {

// Writes a reply as a server sends it, and counts its values.
std::string Encode(const RedisReply& reply, size_t& elements) {
  ++elements;
  switch (reply.type()) {
    case RedisReply::Type::kNil:
      return "$-1\r\n";
    case RedisReply::Type::kStatus:
      return absl::StrCat("+", *reply.AsString(), "\r\n");
    case RedisReply::Type::kError:
      return absl::StrCat("-", reply.error_text(), "\r\n");
    case RedisReply::Type::kInteger:
      return absl::StrCat(":", *reply.AsInteger(), "\r\n");
    case RedisReply::Type::kString: {
      const std::string text = *reply.AsString();
      return absl::StrCat("$", text.size(), "\r\n", text, "\r\n");
    }
    case RedisReply::Type::kArray:
      break;
  }
  const auto values = *reply.AsArray();
  std::string text = absl::StrCat("*", values.size(), "\r\n");
  for (const RedisReply& value : values) text += Encode(value, elements);
  return text;
}

struct Outcome {
  std::vector<std::string> replies;
  absl::Status status;
};

Outcome Read(const RedisReplyReader::Limits& limits, const std::vector<std::vector<char>>& pieces) {
  RedisReplyReader reader(limits);
  Outcome outcome;
  for (const std::vector<char>& piece : pieces) {
    outcome.status = reader.Feed(piece.data(), piece.size());
    while (outcome.status.ok()) {
      RedisReply reply;
      const absl::StatusOr<bool> complete = reader.Next(reply);
      outcome.status = complete.status();
      if (!complete.ok() || !*complete) break;
      size_t elements = 0;
      outcome.replies.push_back(Encode(reply, elements));
      CHECK_LE(elements, limits.max_reply_elements);
      (void)reply.DebugString();
    }
    if (!outcome.status.ok()) break;
  }
  CHECK(outcome.status.ok() || absl::IsInternal(outcome.status)) << outcome.status;
  return outcome;
}

}  // namespace
}  // namespace ddp::store

namespace ddp::testing {

// Input: a byte that says where the pieces end, a byte that says whether the limits are narrow,
// then the connection's bytes.
void FuzzOne(absl::string_view bytes) {
  FuzzInput input(bytes);
  const uint8_t cuts = input.TakeByte();
  store::RedisReplyReader::Limits limits;
  if (input.TakeByte() % 2 == 1) limits = {.max_reply_bytes = 64, .max_reply_elements = 8};
  const absl::string_view stream = input.rest();
  const store::Outcome whole = store::Read(limits, {{stream.begin(), stream.end()}});
  const store::Outcome cut = store::Read(limits, FuzzPieces(stream, cuts));
  CHECK(whole.replies == cut.replies);
  CHECK_EQ(whole.status.ok(), cut.status.ok()) << whole.status << " in one piece, " << cut.status;
  for (const std::string& text : whole.replies) {
    CHECK_LE(text.size(), stream.size() + 1);  // "*-1" is written as "$-1", ":+1" not at all
    const store::Outcome again = store::Read({}, {{text.begin(), text.end()}});
    CHECK(again.status.ok()) << again.status;
    CHECK(again.replies == std::vector<std::string>{text});
  }
}

std::vector<std::string> FuzzSeeds() {
  const std::string stream =
      "+OK\r\n-ERR "
      "no\r\n:-42\r\n$-1\r\n*-1\r\n$0\r\n\r\n*3\r\n*2\r\n:1\r\n*1\r\n$3\r\nabc\r\n$-1\r\n"
      "-ERR x\r\n*0\r\n";
  const std::string deep = "*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n";
  return {absl::StrCat("a", "b", stream), absl::StrCat("b", "a", stream),
          absl::StrCat("c", "b", deep), absl::StrCat("d", "a", "*8\r\n:1\r\n:2\r\n:3\r\n:4\r\n"),
          absl::StrCat("e", "a", "$70\r\n", std::string(70, 'x'), "\r\n")};
}

}  // namespace ddp::testing
