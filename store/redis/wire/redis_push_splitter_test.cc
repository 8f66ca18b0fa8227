#include "store/redis/wire/redis_push_splitter.h"

#include <random>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ddp::store {
namespace {

struct Streams {
  std::string replies;
  std::string pushes;
  bool operator==(const Streams& other) const {
    return replies == other.replies && pushes == other.pushes;
  }
};

Streams MustSplit(const std::string& bytes, size_t portion) {
  RedisPushSplitter splitter;
  Streams out;
  for (size_t at = 0; at < bytes.size(); at += portion) {
    const std::string piece = bytes.substr(at, portion);
    const absl::Status status = splitter.Split(piece.data(), piece.size(), out.replies, out.pushes);
    EXPECT_TRUE(status.ok()) << status;
  }
  return out;
}

void ExpectSplit(const std::string& bytes, const Streams& expected) {
  for (size_t portion = 1; portion <= bytes.size(); ++portion) {
    const Streams out = MustSplit(bytes, portion);
    EXPECT_EQ(out.replies, expected.replies) << "in portions of " << portion;
    EXPECT_EQ(out.pushes, expected.pushes) << "in portions of " << portion;
  }
}

TEST(RedisPushSplitterTest, LeavesRepliesAsTheyAre) {
  const std::string bytes("+OK\r\n-ERR no\r\n:-4\r\n$3\r\na\0b\r\n$0\r\n\r\n$-1\r\n*-1\r\n*0\r\n",
                          48);
  ExpectSplit(bytes, {bytes, ""});
}

TEST(RedisPushSplitterTest, WhatLooksLikeAPushInsideAValueIsNone) {
  const std::string bytes = "$14\r\n\r\n>1\r\n$1\r\nx\r\n_\r\n+>3\r\n";
  ExpectSplit(bytes, {bytes, ""});
}

TEST(RedisPushSplitterTest, TakesPushesOut) {
  const std::string push = "3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$0\r\n\r\n";
  const std::string subscribed = "3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n";
  ExpectSplit(absl::StrCat(">", subscribed, ":1\r\n>", push, ">", push, "+OK\r\n"),
              {":1\r\n+OK\r\n", absl::StrCat("*", subscribed, "*", push, "*", push)});
}

TEST(RedisPushSplitterTest, TakesAPushOutOfTheMiddleOfAReply) {
  const std::string push = "3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$0\r\n\r\n";
  ExpectSplit(absl::StrCat("*3\r\n:1\r\n:1\r\n>", push, ":1\r\n"),
              {"*3\r\n:1\r\n:1\r\n:1\r\n", "*" + push});
}

TEST(RedisPushSplitterTest, NestedPushesEndWhereTheyEnd) {
  ExpectSplit(">2\r\n$10\r\ninvalidate\r\n*2\r\n$1\r\na\r\n*1\r\n:5\r\n+OK\r\n",
              {"+OK\r\n", "*2\r\n$10\r\ninvalidate\r\n*2\r\n$1\r\na\r\n*1\r\n:5\r\n"});
}

TEST(RedisPushSplitterTest, TranslatesNilsAndMaps) {
  ExpectSplit("_\r\n*2\r\n_\r\n+a\r\n%2\r\n+a\r\n:1\r\n+b\r\n*0\r\n%0\r\n",
              {"$-1\r\n*2\r\n$-1\r\n+a\r\n*4\r\n+a\r\n:1\r\n+b\r\n*0\r\n*0\r\n", ""});
}

TEST(RedisPushSplitterTest, RefusesWhatIsNotTheProtocol) {
  for (const char* bytes : {"HTTP/1.1 200 OK\r\n",
                            "$x\r\n",
                            "$-2\r\n",
                            "*99999999999\r\n",
                            "$ 1\r\n",
                            "$+1\r\n",
                            "$111111111111111111111111111",
                            ">0\r\n",
                            ">-1\r\n",
                            ">1025\r\n",
                            "_1\r\n",
                            "%-1\r\n",
                            "%2000000002\r\n",
                            "$-0\r\n\r\n",
                            "$007\r\nhellooo\r\n",
                            "*00\r\n",
                            ">2\r\n>1\r\n",
                            ">2\r\n*1024\r\n",
                            ">2\r\n%600\r\n",
                            "#t\r\n",
                            "$1\n2\r\n"}) {
    RedisPushSplitter splitter;
    Streams out;
    const std::string text = bytes;
    const absl::Status status = splitter.Split(text.data(), text.size(), out.replies, out.pushes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << bytes;
    splitter.Reset();
    EXPECT_TRUE(splitter.Split("+OK\r\n", 5, out.replies, out.pushes).ok());
  }
}

// Damaged bytes give an error or streams no longer than the input, whatever the pieces.
TEST(RedisPushSplitterTest, SurvivesDamagedBytes) {
  const std::string good =
      "*3\r\n:1\r\n>3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$0\r\n\r\n:1\r\n$5\r\nhello\r\n_\r\n-ERR\r\n";
  std::mt19937 random(1);
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = good;
    for (int damage = 0; damage < 3; ++damage) {
      bytes[random() % bytes.size()] = ">_%*$:+-\r\n0129\xff"[random() % 16];
    }
    RedisPushSplitter splitter;
    Streams out;
    for (size_t at = 0; at < bytes.size(); at += 7) {
      const std::string piece = bytes.substr(at, 7);
      if (!splitter.Split(piece.data(), piece.size(), out.replies, out.pushes).ok()) break;
    }
    EXPECT_LE(out.replies.size() + out.pushes.size(), 4 * bytes.size());
  }
}

}  // namespace
}  // namespace ddp::store
