#include "ddp/rpc/context_calls.h"

#include <cstdint>

#include "ddp/rpc/ended_contexts.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::rpc::internal {
namespace {

using ::testing::HasSubstr;

TEST(ContextCallsTest, FindsCallsWhoseGradientNeverComes) {
  int node = 0;
  const auto nothing = [](const void*) { return false; };
  const auto everything = [](const void*) { return true; };
  ContextCalls calls;
  EXPECT_EQ(calls.Problem(nothing), std::nullopt);
  const size_t plain = calls.Begin("ps0", "statistics", /*sends_gradient=*/false);
  EXPECT_THAT(*calls.Problem(everything), HasSubstr("statistics on worker ps0 was not taken"));
  calls.OnAnswer(plain, nullptr);
  EXPECT_EQ(calls.Problem(nothing), std::nullopt);
  const size_t lookup = calls.Begin("ps0", "lookup", /*sends_gradient=*/false);
  calls.OnAnswer(lookup, &node);
  EXPECT_EQ(calls.Problem(everything), std::nullopt);
  EXPECT_THAT(*calls.Problem(nothing), HasSubstr("does not depend on the answer of lookup"));
  const size_t cut = calls.Begin("ps1", "cut", /*sends_gradient=*/true);
  calls.OnAnswer(cut, nullptr);
  EXPECT_THAT(*calls.Problem(everything), HasSubstr("cut on worker ps1 sent a tensor"));
  calls.OnFailure(cut, "reason");
  EXPECT_THAT(*calls.Problem(everything), HasSubstr("failed in this context (reason)"));
}

TEST(EndedContextsTest, KeepsTheNewest) {
  EndedContexts contexts;
  EXPECT_FALSE(contexts.Contains(0));
  for (int64_t id = 0; id <= static_cast<int64_t>(EndedContexts::kKept); ++id) {
    contexts.Add(id);
    contexts.Add(id);  // a repeated message
    EXPECT_TRUE(contexts.Contains(id));
  }
  EXPECT_FALSE(contexts.Contains(0));
  EXPECT_TRUE(contexts.Contains(1));
}

}  // namespace
}  // namespace ddp::rpc::internal
