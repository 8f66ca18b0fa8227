#include "ddp/rpc/failure/engine_error.h"

#include <optional>
#include <string>

#include "gtest/gtest.h"

namespace ddp::rpc::internal {
namespace {

TEST(EngineErrorTest, AnErrorOfThisWorkerHasNoNode) {
  const EngineError error = EngineError::Parse("eof");
  EXPECT_EQ(error.worker, -1);
  EXPECT_EQ(error.message, "eof");
}

TEST(EngineErrorTest, TheInnermostErrorIsTheCause) {
  const EngineError error =
      EngineError::Parse("Error on Node 1: Error on Node 2: no memory\nthe stack");
  EXPECT_EQ(error.worker, 2);
  EXPECT_EQ(error.message, "no memory\nthe stack");
  EXPECT_EQ(error.lost, std::nullopt);
  EXPECT_FALSE(error.timeout);
}

// The worker that passes the error on lives.
TEST(EngineErrorTest, TheLostWorkerIsFound) {
  const EngineError sent{.message = LostWorkerText("worker10", "eof"), .lost = 2};
  const EngineError error = EngineError::Parse("Error on Node 1: " + sent.Serialize());
  EXPECT_EQ(error.worker, 1);
  EXPECT_EQ(error.message, "worker worker10 is gone (eof)");
  EXPECT_EQ(error.lost, 2);
}

TEST(EngineErrorTest, AnAnswerThatDidNotComeIsATimeout) {
  const EngineError sent{.message = "no answer in time", .timeout = true};
  const EngineError error = EngineError::Parse("Error on Node 0: " + sent.Serialize());
  EXPECT_EQ(error.message, "no answer in time");
  EXPECT_TRUE(error.timeout);
  EXPECT_EQ(error.lost, std::nullopt);
}

// A function of the program may throw any text.
TEST(EngineErrorTest, WhatAMessageSaysDecidesNothing) {
  for (const std::string text :
       {"worker worker1 is gone (eof)", "RPC ran for more than set timeout (60000 ms)",
        "the log has: Error on Node 2: eof"}) {
    const EngineError error = EngineError::Parse("Error on Node 1: " + text);
    EXPECT_EQ(error.worker, 1) << text;
    EXPECT_EQ(error.message, text);
    EXPECT_EQ(error.lost, std::nullopt) << text;
    EXPECT_FALSE(error.timeout) << text;
  }
}

TEST(EngineErrorTest, ATextWithoutAMessageIsKept) {
  EXPECT_EQ(EngineError::Parse("Error on Node 1").message, "Error on Node 1");
}

}  // namespace
}  // namespace ddp::rpc::internal
