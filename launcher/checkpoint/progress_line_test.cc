#include "launcher/checkpoint/progress_line.h"

#include "gtest/gtest.h"

namespace ddp::launcher {
namespace {

TEST(ProgressLineTest, ALineEveryFifthOfASecond) {
  const absl::Time start = absl::UnixEpoch();
  ProgressLine line("verifying a", start);
  EXPECT_EQ(line.Update(1, 10, start + absl::Milliseconds(199)), std::nullopt);
  EXPECT_EQ(line.Update(1'000'000, 4'000'000, start + absl::Milliseconds(200)),
            "verifying a: 1.0 MB of 4.0 MB (25%), 5.0 MB/s");
  EXPECT_EQ(line.Update(2'000'000, 4'000'000, start + absl::Milliseconds(399)), std::nullopt);
  EXPECT_EQ(line.Update(4'000'000, 4'000'000, start + absl::Seconds(2)),
            "verifying a: 4.0 MB of 4.0 MB (100%), 2.0 MB/s");
}

TEST(ProgressLineTest, NothingToRead) {
  ProgressLine line("a", absl::UnixEpoch());
  EXPECT_EQ(line.Update(0, 0, absl::UnixEpoch() + absl::Seconds(1)), "a: 0 B of 0 B (100%), 0 B/s");
}

}  // namespace
}  // namespace ddp::launcher
