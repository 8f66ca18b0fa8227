#include "elastic/checkpoint/save_load/save_backoff.h"

#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

constexpr absl::Time kStart = absl::UnixEpoch();

TEST(SaveBackoffTest, ThePauseDoublesUpToItsBoundAndEndsWithASave) {
  SaveBackoff backoff({.first = absl::Seconds(2), .max = absl::Seconds(9)});
  EXPECT_TRUE(backoff.MayTry(kStart));
  absl::Time now = kStart;
  int64_t failures = 0;
  for (const int seconds : {2, 4, 8, 9, 9}) {
    backoff.Failed(now);
    EXPECT_EQ(backoff.failures(), ++failures);
    EXPECT_EQ(backoff.pause(), absl::Seconds(seconds));
    EXPECT_FALSE(backoff.MayTry(now + absl::Seconds(seconds) - absl::Nanoseconds(1)));
    now += absl::Seconds(seconds);
    EXPECT_TRUE(backoff.MayTry(now));
  }
  backoff.Saved();
  EXPECT_EQ(backoff.failures(), 0);
  backoff.Failed(now);
  EXPECT_EQ(backoff.pause(), absl::Seconds(2));
}

TEST(SaveBackoffTest, ManyFailuresKeepTheBound) {
  SaveBackoff backoff({.first = absl::Seconds(1), .max = absl::Minutes(5)});
  for (int i = 0; i < 10'000; ++i) backoff.Failed(kStart);
  EXPECT_EQ(backoff.pause(), absl::Minutes(5));
}

TEST(MayPassTest, AFaultOfTheEnvironmentMayPassAndAMistakeMayNot) {
  EXPECT_TRUE(MayPass(absl::ResourceExhaustedError("no space left on device")));
  EXPECT_TRUE(MayPass(absl::UnavailableError("a file server that restarts")));
  EXPECT_TRUE(MayPass(absl::DataLossError("a file that changed")));
  EXPECT_FALSE(MayPass(absl::InvalidArgumentError("the ranks do not save the same state")));
  EXPECT_FALSE(MayPass(absl::FailedPreconditionError("generation 2 has begun")));
  EXPECT_FALSE(MayPass(absl::AlreadyExistsError("another state")));
  EXPECT_FALSE(MayPass(absl::DeadlineExceededError("a rank did not call save()")));
}

}  // namespace
}  // namespace ddp::elastic
