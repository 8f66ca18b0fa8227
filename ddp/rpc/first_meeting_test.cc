#include "ddp/rpc/first_meeting.h"

#include <future>
#include <memory>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "ddp/common/membership.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/fake_group_store.h"

namespace ddp::rpc::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::testing::AllOf;
using ::testing::HasSubstr;

class FirstMeetingTest : public ::testing::Test {
 protected:
  FirstMeeting Meet(int rank, int size, absl::Duration timeout = absl::Seconds(60)) {
    return MeetFirst(store_->Clone(), "worker" + std::to_string(rank),
                     ddp::internal::Membership{.rank = rank, .size = size}, timeout);
  }
  std::future<FirstMeeting> Start(int rank, int size) {
    return std::async(std::launch::async, [this, rank, size] { return Meet(rank, size); });
  }
  const std::shared_ptr<FakeGroupStore> store_ = std::make_shared<FakeGroupStore>();
};

TEST_F(FirstMeetingTest, AllShareANumberThatOthersDoNotHave) {
  auto zero = Start(0, 2);
  const FirstMeeting one = Meet(1, 2);
  EXPECT_EQ(one.mismatch, "");
  EXPECT_EQ(one.late, "");
  EXPECT_GT(one.world, 0);
  EXPECT_EQ(zero.get().world, one.world);
  FakeGroupStore others;
  EXPECT_NE(MeetFirst(others.Clone(), "worker0", {.rank = 0, .size = 1}, absl::Seconds(60)).world,
            one.world);
}

TEST_F(FirstMeetingTest, AnotherSizeEndsTheWaitOfAll) {
  auto zero = Start(0, 3);
  auto one = Start(1, 3);
  while (store_->Keys().empty()) std::this_thread::yield();
  const auto names_both =
      AllOf(HasSubstr("has world_size 3, and worker worker2 has world_size 4"), HasSubstr("same"));
  EXPECT_THAT(Meet(2, 4).mismatch, names_both);
  EXPECT_THAT(zero.get().mismatch, names_both);
  EXPECT_THAT(one.get().mismatch, names_both);
}

TEST_F(FirstMeetingTest, NamesThoseThatDoNotCome) {
  EXPECT_EQ(Meet(1, 4, absl::ZeroDuration()).late, "0, 2, 3");
}

}  // namespace
}  // namespace ddp::rpc::internal
