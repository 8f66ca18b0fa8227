#include "launcher/meeting/name_wait.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class NameWaitTest : public ::testing::Test {
 protected:
  NameWaitTest() {
    options_.what = "--rdzv-endpoint=node0:1";
    options_.timeout = absl::Minutes(10);
    options_.now = [this] { return now_; };
    options_.rest = [this](absl::Duration pause) {
      EXPECT_GT(pause, absl::ZeroDuration());
      EXPECT_LE(pause, absl::Seconds(2));
      now_ += pause;
    };
    options_.say = [this](const std::string& line) { said_.push_back(line); };
  }

  // Waits for a name that resolves after `delay`.
  absl::Status AwaitOneThatComesAfter(absl::Duration delay) {
    const absl::Time there = now_ + delay;
    return AwaitName(options_, [this, there] {
      ++look_ups_;
      return now_ >= there ? absl::OkStatus() : absl::UnavailableError("no name node0");
    });
  }

  NameWaitOptions options_;
  absl::Time now_ = absl::UnixEpoch();
  int look_ups_ = 0;
  std::vector<std::string> said_;
};

TEST_F(NameWaitTest, ANameThatIsThereIsLookedUpOnce) {
  EXPECT_TRUE(AwaitOneThatComesAfter(absl::ZeroDuration()).ok());
  EXPECT_EQ(look_ups_, 1);
  EXPECT_THAT(said_, IsEmpty());
}

TEST_F(NameWaitTest, ANameMayComeLateAndTheUserHearsWhatIsWaitedFor) {
  EXPECT_TRUE(AwaitOneThatComesAfter(absl::Minutes(9)).ok());
  EXPECT_LT(look_ups_, 9 * 60) << "it backs off";
  EXPECT_GE(look_ups_, 9 * 30) << "but comes back soon";
  EXPECT_THAT(said_, ElementsAre("waiting for the name, at most 10m: --rdzv-endpoint=node0:1: "
                                 "no name node0"));
}

TEST_F(NameWaitTest, TheTimeoutHoldsToTheEnd) {
  options_.timeout = absl::Seconds(2);
  const absl::Time start = now_;
  const absl::Status status = AwaitOneThatComesAfter(absl::Hours(1));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("--rdzv-endpoint=node0:1: no name node0 (waited"),
                    HasSubstr("for 2s;"), HasSubstr("join_timeout")));
  EXPECT_EQ(now_ - start, absl::Seconds(2));
  EXPECT_THAT(said_, IsEmpty());
}

TEST_F(NameWaitTest, WhatDoesNotPassIsNotWaitedFor) {
  const absl::Status status =
      AwaitName(options_, [] { return absl::InvalidArgumentError("a wildcard"); });
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(status.message(), "--rdzv-endpoint=node0:1: a wildcard");
}

}  // namespace
}  // namespace ddp::launcher
