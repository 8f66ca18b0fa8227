#include "ddp/comm/meeting/store_meeting.h"

#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ddp/common/membership.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class StoreMeetingTest : public ::testing::Test {
 protected:
  StoreMeeting Seat(int rank, const char* name = "meeting") {
    return StoreMeeting(store_, name, {.rank = rank, .size = 3});
  }

  const std::shared_ptr<::ddp::testing::FakeGroupStore> store_ =
      std::make_shared<::ddp::testing::FakeGroupStore>();
};

TEST_F(StoreMeetingTest, TheLastRankEndsIt) {
  StoreMeeting first = Seat(0);
  first.Arrive("zero");
  Seat(2).Arrive("two");
  EXPECT_EQ(first.AwaitVerdict(absl::ZeroDuration()), std::nullopt);
  EXPECT_THAT(first.Missing(), ElementsAre(1));
  EXPECT_FALSE(Seat(1).HasArrived());
  Seat(1).Arrive("one");
  EXPECT_TRUE(Seat(1).HasArrived());
  EXPECT_EQ(first.AwaitVerdict(absl::ZeroDuration()), StoreMeeting::kMet);
  EXPECT_THAT(first.Missing(), IsEmpty());
  EXPECT_THAT(first.Values(), ElementsAre("zero", "one", "two"));
}

TEST_F(StoreMeetingTest, TheFirstVerdictHoldsForAll) {
  EXPECT_EQ(Seat(1).Decide("failed"), "failed");
  StoreMeeting late = Seat(0);
  EXPECT_EQ(late.Decide("gone 2"), "failed");
  EXPECT_EQ(AttendMeeting(late, "", absl::ZeroDuration()).verdict, "failed");
}

TEST_F(StoreMeetingTest, ATimeoutNamesTheMissingForAll) {
  StoreMeeting first = Seat(1);
  const MeetingEnd end = AttendMeeting(first, "", absl::ZeroDuration());
  EXPECT_THAT(end.missing, ElementsAre(0, 2));
  StoreMeeting late = Seat(2);
  EXPECT_THAT(AttendMeeting(late, "", absl::ZeroDuration()).missing, ElementsAre(0, 2));
}

// The last rank to arrive may have died before it wrote the verdict.
TEST_F(StoreMeetingTest, ATimeoutWithoutAMissingRankIsNoTimeout) {
  for (const int rank : {1, 2}) store_->Set(absl::StrCat("meeting/", rank), "");
  StoreMeeting first = Seat(0);
  const MeetingEnd end = AttendMeeting(first, "", absl::ZeroDuration());
  EXPECT_EQ(end.verdict, StoreMeeting::kMet);
  EXPECT_THAT(end.missing, IsEmpty());
}

TEST_F(StoreMeetingTest, AForgottenMeetingLeavesNoKeys) {
  for (const int rank : {0, 1, 2}) Seat(rank).Arrive("value");
  for (const int rank : {0, 1, 2}) Seat(rank).Forget();
  EXPECT_THAT(store_->Keys(), IsEmpty());
}

TEST_F(StoreMeetingTest, MeetingsOfOtherNamesAreApart) {
  Seat(0, "first").Decide("ended");
  EXPECT_EQ(Seat(0, "second").AwaitVerdict(absl::ZeroDuration()), std::nullopt);
}

}  // namespace
}  // namespace ddp::internal
