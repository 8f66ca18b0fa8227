#include "store/redis/wire/redis_wire.h"

#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "store/redis/wire/redis_reply.h"

namespace ddp::store {
namespace {

using Pushes = RedisWire::Pushes;

constexpr char kMessage[] = ">3\r\n$7\r\nmessage\r\n$4\r\nnews\r\n$2\r\nhi\r\n";

absl::Status Feed(RedisWire& wire, const std::string& bytes) {
  return wire.Feed(bytes.data(), bytes.size());
}

// Returns the error of the wire, or takes all complete replies and pushes into the given lists.
absl::Status TakeAll(RedisWire& wire, std::vector<std::string>& replies,
                     std::vector<std::string>& pushes) {
  for (bool more = true; more;) {
    RedisReply reply;
    const absl::StatusOr<bool> replied = wire.NextReply(reply);
    if (!replied.ok()) return replied.status();
    if (*replied) replies.push_back(reply.DebugString());
    RedisPush push;
    const absl::StatusOr<bool> pushed = wire.NextPush(push);
    if (!pushed.ok()) return pushed.status();
    if (*pushed) {
      pushes.push_back(
          absl::StrCat(static_cast<int>(push.kind), " ", push.channel, " ", push.text));
    }
    more = *replied || *pushed;
  }
  return absl::OkStatus();
}

absl::Status FeedAndTakeAll(RedisWire& wire, const std::string& bytes) {
  const absl::Status fed = Feed(wire, bytes);
  if (!fed.ok()) return fed;
  std::vector<std::string> replies, pushes;
  return TakeAll(wire, replies, pushes);
}

std::string Item(RedisPush::Kind kind, const std::string& rest) {
  return absl::StrCat(static_cast<int>(kind), " ", rest);
}

TEST(RedisWireFormTest, CommandsAreArraysOfByteStrings) {
  const std::string any_bytes("\0\r\n", 3);
  EXPECT_EQ(RedisWireForm({{"PING"}, {"SET", "k", any_bytes}}),
            absl::StrCat("*1\r\n$4\r\nPING\r\n", "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$3\r\n", any_bytes,
                         "\r\n"));
  std::string out = "before";
  AppendRedisCommand({""}, out);
  EXPECT_EQ(out, "before*1\r\n$0\r\n\r\n");
}

TEST(RedisWireTest, RepliesAndPushesComeApartAndInOrder) {
  const std::string bytes =
      absl::StrCat("+OK\r\n", kMessage, ":7\r\n", ">3\r\n+subscribe\r\n+news\r\n:1\r\n", "_\r\n",
                   ">3\r\n+unsubscribe\r\n+news\r\n:0\r\n", "-ERR no\r\n");
  // In every portion of equal size, the smallest first.
  for (size_t portion = 1; portion <= bytes.size(); ++portion) {
    RedisWire wire(Pushes::kKept);
    std::vector<std::string> replies, pushes;
    for (size_t at = 0; at < bytes.size(); at += portion) {
      ASSERT_TRUE(Feed(wire, bytes.substr(at, portion)).ok());
      ASSERT_TRUE(TakeAll(wire, replies, pushes).ok());
    }
    EXPECT_EQ(replies,
              std::vector<std::string>(
                  {RedisReply::Status("OK").DebugString(), RedisReply::Integer(7).DebugString(),
                   RedisReply().DebugString(), RedisReply::Error("ERR no").DebugString()}));
    EXPECT_EQ(pushes, std::vector<std::string>({Item(RedisPush::Kind::kMessage, "news hi"),
                                                Item(RedisPush::Kind::kSubscribed, "news "),
                                                Item(RedisPush::Kind::kUnsubscribed, "news ")}));
  }
}

TEST(RedisWireTest, APushInTheMiddleOfAReply) {
  RedisWire wire(Pushes::kKept);
  ASSERT_TRUE(Feed(wire, absl::StrCat("*2\r\n:1\r\n", kMessage, ":2\r\n")).ok());
  RedisReply reply;
  RedisPush push;
  ASSERT_TRUE(wire.NextReply(reply).value());
  EXPECT_EQ(reply.AsArray()->size(), 2u);
  ASSERT_TRUE(wire.NextPush(push).value());
  EXPECT_EQ(push.text, "hi");
}

TEST(RedisWireTest, PushesOfNoUseAreOther) {
  RedisWire wire(Pushes::kKept);
  std::vector<std::string> replies, pushes;
  ASSERT_TRUE(Feed(wire,
                   ">2\r\n+invalidate\r\n*0\r\n"
                   ">4\r\n+pmessage\r\n+*\r\n+news\r\n+hi\r\n"
                   ">3\r\n+invented\r\n+news\r\n+hi\r\n"
                   ">3\r\n:1\r\n+news\r\n+hi\r\n")
                  .ok());
  ASSERT_TRUE(TakeAll(wire, replies, pushes).ok());
  EXPECT_EQ(pushes, std::vector<std::string>(4, Item(RedisPush::Kind::kOther, " ")));
  EXPECT_TRUE(replies.empty());
}

TEST(RedisWireTest, PushesAreDroppedWhereNobodyReadsThem) {
  RedisWire wire(Pushes::kDropped, {.max_reply_bytes = 100});
  RedisPush push;
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(Feed(wire, kMessage).ok());
  EXPECT_FALSE(wire.NextPush(push).value());
  ASSERT_TRUE(Feed(wire, "_\r\n").ok()) << "RESP3";
  RedisReply reply = RedisReply::Integer(1);
  ASSERT_TRUE(wire.NextReply(reply).value());
  EXPECT_TRUE(reply.IsNil());
}

TEST(RedisWireTest, InResp2APushIsAReply) {
  RedisWire wire(Pushes::kAreReplies);
  RedisReply reply;
  RedisPush push;
  ASSERT_TRUE(Feed(wire, "*3\r\n$7\r\nmessage\r\n$4\r\nnews\r\n$2\r\nhi\r\n").ok());
  EXPECT_FALSE(wire.NextPush(push).value());
  ASSERT_TRUE(wire.NextReply(reply).value());
  EXPECT_EQ(reply.AsArray()->size(), 3u);
  EXPECT_FALSE(wire.NextReply(reply).value());
}

TEST(RedisWireTest, TheLimitsHoldForRepliesAndPushes) {
  const std::string large = absl::StrCat("$200\r\n", std::string(200, 'x'), "\r\n");
  for (const std::string& bytes : {large, absl::StrCat(">3\r\n+message\r\n+news\r\n", large)}) {
    RedisWire wire(Pushes::kKept, {.max_reply_bytes = 100});
    EXPECT_TRUE(absl::IsInternal(FeedAndTakeAll(wire, bytes))) << bytes;
  }
}

TEST(RedisWireTest, ResetForgetsAHalfReplyAHalfPushAndAnError) {
  for (const Pushes pushes : {Pushes::kAreReplies, Pushes::kDropped, Pushes::kKept}) {
    for (const char* before : {"$5\r\nab", ">3\r\n+message\r\n", "HTTP/1.1 400\r\n"}) {
      RedisWire wire(pushes);
      // In RESP2 a push is an error already; the others may be unfinished or errors.
      (void)FeedAndTakeAll(wire, before);
      wire.Reset();
      RedisReply reply;
      ASSERT_TRUE(Feed(wire, "+OK\r\n").ok()) << before;
      ASSERT_TRUE(wire.NextReply(reply).value()) << before;
      EXPECT_EQ(reply.AsString().value(), "OK") << before;
    }
  }
}

TEST(RedisWireTest, SurvivesDamagedBytes) {
  const std::string sound =
      absl::StrCat("*2\r\n$1\r\na\r\n:2\r\n", kMessage, "%1\r\n+k\r\n_\r\n", kMessage);
  std::mt19937 random(1);
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = sound;
    for (int i = 0; i < 2; ++i) bytes[random() % bytes.size()] = static_cast<char>(random());
    RedisWire wire(Pushes::kKept, {.max_reply_bytes = 1000, .max_reply_elements = 100});
    const absl::Status status = FeedAndTakeAll(wire, bytes);
    EXPECT_TRUE(status.ok() || absl::IsInternal(status)) << status;
    if (!status.ok()) ++refused;
  }
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace ddp::store
