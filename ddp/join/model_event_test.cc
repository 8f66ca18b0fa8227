#include "ddp/join/model_event.h"

#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "ddp/join/join_core.h"

namespace ddp::internal {
namespace {

std::vector<ModelEvent> AllEvents() {
  std::vector<ModelEvent> events = {{.kind = ModelEvent::Kind::kDelayed},
                                    {.kind = ModelEvent::Kind::kStatistics}};
  for (const bool a : {false, true}) {
    for (const bool b : {false, true}) {
      events.push_back(
          {.kind = ModelEvent::Kind::kForward, .buffers_before = a, .buffers_after = b});
      for (const bool c : {false, true}) {
        events.push_back(
            {.parts = {.rebuild_after = a, .used_map_after = b, .used_map_before = c}});
      }
    }
  }
  return events;
}

TEST(ModelEventTest, HasANumberOfItsOwnBelowTheLimitOfAJoin) {
  std::set<int> numbers;
  for (const ModelEvent& event : AllEvents()) {
    EXPECT_EQ(ModelEvent::Decode(event.Encode()), event);
    EXPECT_TRUE(numbers.insert(event.Encode()).second);
    EXPECT_GE(event.Encode(), 0);
    EXPECT_LT(event.Encode(), JoinCore::kMaxEvents);
  }
}

TEST(ModelEventTest, HasANameForMessages) {
  EXPECT_EQ(ModelEvent{}.ToString(), "the reduction of gradients");
  EXPECT_EQ((ModelEvent{.parts = {.rebuild_after = true, .used_map_after = true}}).ToString(),
            "the reduction of gradients, with used parameters after it and new buckets at its "
            "end,");
  EXPECT_EQ((ModelEvent{.parts = {.used_map_before = true}}).ToString(),
            "the reduction of gradients, with used parameters before it,");
  EXPECT_EQ((ModelEvent{.kind = ModelEvent::Kind::kForward}).ToString(), "a forward");
  EXPECT_EQ((ModelEvent{.kind = ModelEvent::Kind::kForward, .buffers_before = true}).ToString(),
            "a forward that begins with buffers");
  EXPECT_EQ((ModelEvent{.kind = ModelEvent::Kind::kForward, .buffers_after = true}).ToString(),
            "a forward that ends with buffers");
  EXPECT_EQ((ModelEvent{.kind = ModelEvent::Kind::kDelayed}).ToString(),
            "the all-reduce of delayed gradients");
  EXPECT_EQ((ModelEvent{.kind = ModelEvent::Kind::kStatistics}).ToString(),
            "the sum of a SyncBatchNorm");
}

}  // namespace
}  // namespace ddp::internal
