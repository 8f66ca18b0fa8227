#include "launcher/flags/flag_default.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <array>

#include "absl/time/time.h"

namespace ddp::launcher {
namespace {

constexpr std::array kSignals = {SIGUSR2, SIGTERM};

TEST(FlagDefaultTest, IsWhatAUserWouldWrite) {
  EXPECT_EQ(TextOf(""), "");
  EXPECT_EQ(TextOf("spawn"), "spawn");
  EXPECT_EQ(TextOf(0), "0");
  EXPECT_EQ(TextOf(1.5), "1.5");
  EXPECT_EQ(TextOf(InSeconds{absl::Minutes(10)}), "600");
  EXPECT_EQ(TextOf(InSeconds{absl::Milliseconds(2500)}), "2.5");
  EXPECT_EQ(TextOf(InMilliseconds{absl::Seconds(3)}), "3000");
  EXPECT_EQ(TextOf(NodeRange{.min = 2, .max = 16}), "2:16");
  EXPECT_EQ(TextOf(SignalList{kSignals}), "SIGUSR2,SIGTERM");
}

}  // namespace
}  // namespace ddp::launcher
