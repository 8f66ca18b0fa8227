#include "elastic/checkpoint/format/checkpoint_id.h"

#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;

TEST(CheckpointIdTest, FolderNameIsPaddedAndComesBack) {
  EXPECT_EQ(FolderName({1200, 7}), "step-000000001200.g0007");
  for (const CheckpointId& id : std::vector<CheckpointId>{
           {0, 0},
           {1, 1},
           {999'999'999'999, 9999},
           {1'000'000'000'000, 10000},
           {std::numeric_limits<int64_t>::max(), std::numeric_limits<uint64_t>::max()}}) {
    EXPECT_EQ(ParseFolderName(FolderName(id)), id) << FolderName(id);
  }
}

TEST(CheckpointIdTest, EveryOtherNameIsNoCheckpoint) {
  for (const char* name :
       {"", "step-", "step-1.g1", "step-000000001200", "step-000000001200.g", "step-.g0001",
        "step-000000001200.g0007.tmp", ".tmp-step-000000001200.g0007", "step--00000001200.g0007",
        "step-000000001200.g007", "step-000000001200.g+007", "step- 00000001200.g0007",
        "step-0000000012000.g0007", "STEP-000000001200.g0007", "step-000000001200.g0007\n",
        "step-99999999999999999999.g0001", "metrics.jsonl", "line\nbreak"}) {
    EXPECT_FALSE(ParseFolderName(name).has_value()) << name;
  }
}

TEST(CheckpointIdTest, NewestIsTheHighestStepThenGeneration) {
  EXPECT_THAT(NewestFirst({"step-000000000900.g0009", "x", "step-000000010000.g0001",
                           "step-000000001000.g0002", ".tmp-1", "step-000000001000.g0010"}),
              ElementsAre(CheckpointId{10000, 1}, CheckpointId{1000, 10}, CheckpointId{1000, 2},
                          CheckpointId{900, 9}));
}

TEST(CheckpointIdTest, ManyOldEntriesAreNoTrouble) {
  std::vector<std::string> names;
  for (int64_t step = 0; step < 100'000; ++step) names.push_back(FolderName({step, 1}));
  EXPECT_EQ(NewestFirst(names).front(), (CheckpointId{99'999, 1}));
}

}  // namespace
}  // namespace ddp::elastic
