#include "store/redis/wire/redis_reply_reader.h"

#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "store/redis/wire/redis_reply.h"

namespace ddp::store {
namespace {

absl::StatusOr<std::optional<RedisReply>> Next(RedisReplyReader& reader) {
  RedisReply reply;
  const absl::StatusOr<bool> complete = reader.Next(reply);
  if (!complete.ok()) return complete.status();
  return *complete ? std::make_optional(std::move(reply)) : std::nullopt;
}

absl::StatusOr<std::optional<RedisReply>> Parse(RedisReplyReader& reader,
                                                const std::string& bytes) {
  const absl::Status fed = reader.Feed(bytes.data(), bytes.size());
  if (!fed.ok()) return fed;
  return Next(reader);
}

RedisReply MustParse(const std::string& bytes) {
  RedisReplyReader reader;
  absl::StatusOr<std::optional<RedisReply>> reply = Parse(reader, bytes);
  EXPECT_TRUE(reply.ok() && reply->has_value()) << bytes;
  return reply.ok() && reply->has_value() ? **reply : RedisReply();
}

TEST(RedisReplyReaderTest, ReadsEveryType) {
  EXPECT_EQ(*MustParse("+OK\r\n").AsString(), "OK");
  EXPECT_EQ(MustParse("+OK\r\n").type(), RedisReply::Type::kStatus);
  EXPECT_EQ(MustParse("-ERR no\r\n").error_text(), "ERR no");
  EXPECT_EQ(*MustParse(":-42\r\n").AsInteger(), -42);
  EXPECT_TRUE(MustParse("$-1\r\n").IsNil());
  EXPECT_TRUE(MustParse("*-1\r\n").IsNil());
  EXPECT_EQ(*MustParse("$0\r\n\r\n").AsString(), "");
  const std::string zero("a\0\r\n", 4);
  EXPECT_EQ(*MustParse(absl::StrCat("$4\r\n", zero, "\r\n")).AsString(), zero);
  EXPECT_EQ(MustParse("*0\r\n").AsArray()->size(), 0);
}

TEST(RedisReplyReaderTest, ReadsNestedArrays) {
  const RedisReply reply = MustParse("*3\r\n*2\r\n:1\r\n*1\r\n$1\r\na\r\n$-1\r\n-ERR x\r\n");
  const auto outer = *reply.AsArray();
  ASSERT_EQ(outer.size(), 3);
  const auto inner = *outer[0].AsArray();
  ASSERT_EQ(inner.size(), 2);
  EXPECT_EQ(*inner[0].AsInteger(), 1);
  EXPECT_EQ(*(*inner[1].AsArray())[0].AsString(), "a");
  EXPECT_TRUE(outer[1].IsNil());
  EXPECT_TRUE(outer[2].IsError());
}

TEST(RedisReplyReaderTest, TakesBytesInAnyPortion) {
  const std::string bytes = "*2\r\n$5\r\nhello\r\n:7\r\n+OK\r\n";
  for (size_t step = 1; step <= bytes.size(); ++step) {
    RedisReplyReader reader;
    std::vector<RedisReply> replies;
    for (size_t at = 0; at < bytes.size(); at += step) {
      absl::StatusOr<std::optional<RedisReply>> reply = Parse(reader, bytes.substr(at, step));
      ASSERT_TRUE(reply.ok());
      while (reply->has_value()) {
        replies.push_back(**reply);
        reply = Next(reader);
        ASSERT_TRUE(reply.ok());
      }
    }
    ASSERT_EQ(replies.size(), 2) << step;
    EXPECT_EQ(*(*replies[0].AsArray())[0].AsString(), "hello");
    EXPECT_EQ(*replies[1].AsString(), "OK");
  }
}

TEST(RedisReplyReaderTest, RefusesWhatIsNotTheProtocol) {
  for (const char* bytes :
       {"HTTP/1.1 200 OK\r\n", "$x\r\n", "$-2\r\n", ":1x\r\n", "*99999999999\r\n",
        "$99999999999999999999\r\n", "%1\r\n+a\r\n+b\r\n"}) {
    RedisReplyReader reader;
    const auto reply = Parse(reader, bytes);
    EXPECT_EQ(reply.status().code(), absl::StatusCode::kInternal) << bytes;
    EXPECT_EQ(Next(reader).status().code(), absl::StatusCode::kInternal) << "stays in error";
    reader.Reset();
    EXPECT_TRUE(Parse(reader, "+OK\r\n")->has_value());
  }
}

TEST(RedisReplyReaderTest, RefusesDeepNesting) {
  std::string bytes;
  for (int depth = 0; depth < 100; ++depth) bytes += "*1\r\n";
  RedisReplyReader reader;
  EXPECT_EQ(Parse(reader, bytes).status().code(), absl::StatusCode::kInternal);
}

TEST(RedisReplyReaderTest, AnnouncedSizesTakeNoMemory) {
  RedisReplyReader reader;
  EXPECT_FALSE(Parse(reader, "*2147483647\r\n")->has_value());
  RedisReplyReader other;
  EXPECT_FALSE(Parse(other, "$2147483647\r\nabc")->has_value());
}

TEST(RedisReplyReaderTest, HoldsItsLimits) {
  RedisReplyReader few({.max_reply_bytes = 1000, .max_reply_elements = 3});
  EXPECT_TRUE(Parse(few, "*2\r\n:1\r\n:2\r\n")->has_value());
  EXPECT_TRUE(Parse(few, "*2\r\n:1\r\n:2\r\n")->has_value()) << "counted per reply";
  const auto many = Parse(few, "*3\r\n:1\r\n:2\r\n:3\r\n");
  EXPECT_TRUE(absl::StrContains(many.status().message(), "more than 3 elements")) << many.status();

  RedisReplyReader small({.max_reply_bytes = 100});
  EXPECT_FALSE(Parse(small, "$1000\r\n" + std::string(50, 'a'))->has_value());
  EXPECT_EQ(Parse(small, std::string(50, 'a')).status().code(), absl::StatusCode::kInternal);
}

TEST(RedisReplyReaderTest, ALimitHoldsForAReplyThatComesAtOnce) {
  const std::string fits = "$3\r\nabc\r\n";
  RedisReplyReader reader({.max_reply_bytes = fits.size()});
  const std::string two = fits + fits;
  ASSERT_TRUE(reader.Feed(two.data(), two.size()).ok());
  EXPECT_TRUE(Next(reader)->has_value()) << "what follows a reply is none of its bytes";
  EXPECT_TRUE(Next(reader)->has_value());
  const absl::Status status = Parse(reader, "$4\r\nabcd\r\n").status();
  EXPECT_TRUE(absl::StrContains(status.message(), "more than 9 bytes")) << status;
}

// Bytes that are nearly right must end in a reply, a wait for more or an error; never in a crash.
TEST(RedisReplyReaderTest, SurvivesDamagedReplies) {
  const std::string good = "*4\r\n$5\r\nhello\r\n*2\r\n:1\r\n+OK\r\n$-1\r\n-ERR damaged\r\n";
  std::mt19937 random(1);
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = good;
    for (int damage = 0; damage < 3; ++damage) {
      bytes[random() % bytes.size()] = "*$:+-\r\n0129\xff"[random() % 13];
    }
    RedisReplyReader reader({.max_reply_bytes = 1000, .max_reply_elements = 100});
    absl::StatusOr<std::optional<RedisReply>> reply = Parse(reader, bytes);
    for (int i = 0; i < 100 && reply.ok() && reply->has_value(); ++i) reply = Next(reader);
  }
}

TEST(RedisReplyTest, AccessorsNameBothTypes) {
  const RedisReply reply = RedisReply::String("abc");
  EXPECT_EQ(reply.AsInteger().status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(reply.AsInteger().status().message(),
            "Redis answered string 'abc' where an integer is expected");
  EXPECT_FALSE(RedisReply::Integer(1).AsString().ok());
  EXPECT_FALSE(RedisReply().AsArray().ok());
  EXPECT_EQ(*RedisReply::String("-12").AsInteger(), -12);
  for (const char* text : {"", " 1", "1 ", "+1", "0x1", "99999999999999999999", "1.5", "007"}) {
    EXPECT_FALSE(RedisReply::String(text).AsInteger().ok()) << text;
  }
}

}  // namespace
}  // namespace ddp::store
