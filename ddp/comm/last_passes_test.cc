#include "ddp/comm/last_passes.h"

#include <memory>
#include <thread>

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using Proof = std::atomic<DeviceOutcome>;

TEST(LastPassesTest, TheLastPassOfEachGroupCounts) {
  EXPECT_TRUE(LastPassesAreProven());
  const auto first = std::make_shared<int>();
  auto second = std::make_shared<int>();
  NoteLastPass(first, std::make_shared<Proof>(DeviceOutcome::kProven));
  EXPECT_TRUE(LastPassesAreProven());
  NoteLastPass(second, std::make_shared<Proof>(DeviceOutcome::kLost));
  NoteLastPass(first, std::make_shared<Proof>(DeviceOutcome::kProven));
  EXPECT_FALSE(LastPassesAreProven());
  NoteLastPass(second, std::make_shared<Proof>(DeviceOutcome::kProven));
  EXPECT_TRUE(LastPassesAreProven());
  NoteLastPass(second, std::make_shared<Proof>(DeviceOutcome::kLost));
  second.reset();
  EXPECT_TRUE(LastPassesAreProven()) << "the group has ended";
  NoteLastPass(first, std::make_shared<Proof>(DeviceOutcome::kLost));
  ForgetLastPasses();
  EXPECT_TRUE(LastPassesAreProven());
}

TEST(LastPassesTest, AnOpenPassIsWaitedFor) {
  const auto group = std::make_shared<int>();
  for (const DeviceOutcome outcome : {DeviceOutcome::kProven, DeviceOutcome::kLost}) {
    const auto proof = std::make_shared<Proof>(DeviceOutcome::kOpen);
    NoteLastPass(group, proof);
    std::thread device([&] {
      *proof = outcome;
      proof->notify_all();
    });
    EXPECT_EQ(LastPassesAreProven(), outcome == DeviceOutcome::kProven);
    device.join();
  }
}

}  // namespace
}  // namespace ddp::internal
