#include "ddp/rpc/failure/engine_error.h"

#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace ddp::rpc::internal {
namespace {

const std::vector<std::string> kNames = {"worker0", "worker1", "worker10"};

TEST(EngineErrorTest, AnErrorOfThisWorkerIsNone) {
  EXPECT_FALSE(ReadEngineError("eof", kNames).has_value());
}

TEST(EngineErrorTest, TheInnermostErrorIsTheCause) {
  const auto error =
      ReadEngineError("Error on Node 1: Error on Node 2: no memory\nthe stack", kNames);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->worker, 2);
  EXPECT_EQ(error->message, "no memory");
  EXPECT_EQ(error->lost, std::nullopt);
}

// The worker that passes the error on lives.
TEST(EngineErrorTest, TheLostWorkerIsFound) {
  const auto error =
      ReadEngineError("Error on Node 1: " + LostWorkerText("worker10", "eof"), kNames);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->worker, 1);
  EXPECT_EQ(error->message, "worker worker10 is gone (eof)");
  EXPECT_EQ(error->lost, 2);
}

TEST(EngineErrorTest, AWorkerWithAnotherNameIsNotLost) {
  const auto error =
      ReadEngineError("Error on Node 1: " + LostWorkerText("worker7", "eof"), kNames);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->lost, std::nullopt);
}

TEST(EngineErrorTest, ATextWithoutAMessageIsKept) {
  const auto error = ReadEngineError("Error on Node 1", kNames);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->message, "Error on Node 1");
}

}  // namespace
}  // namespace ddp::rpc::internal
