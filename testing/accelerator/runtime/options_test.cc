#include "testing/accelerator/runtime/options.h"

#include <map>
#include <string>

#include "gtest/gtest.h"

namespace ddp::testing {
namespace {

absl::StatusOr<RuntimeOptions> Read(const std::map<std::string, std::string>& variables) {
  return RuntimeOptionsFromEnvironment(
      [&variables](const std::string& name) -> std::optional<std::string> {
        const auto it = variables.find(name);
        return it == variables.end() ? std::nullopt : std::optional(it->second);
      });
}

TEST(RuntimeOptionsTest, UnsetVariablesLeaveTheDefaults) {
  const RuntimeOptions options = *Read({{"DDP_SIM_SEED", ""}});
  EXPECT_EQ(options.seed, 0);
  EXPECT_TRUE(options.poison);
  EXPECT_TRUE(options.futures);
  EXPECT_FALSE(options.sync_budget.has_value());
}

TEST(RuntimeOptionsTest, EachVariableSetsItsField) {
  const RuntimeOptions options = *Read({{"DDP_SIM_SEED", "18446744073709551615"},
                                        {"DDP_SIM_LATENESS_MS", "2"},
                                        {"DDP_SIM_POISON", "0"},
                                        {"DDP_SIM_MEMORY_LIMIT", "1000000"},
                                        {"DDP_SIM_LAUNCH_BLOCKING", "1"},
                                        {"DDP_SIM_FAIL_KERNEL", "3"},
                                        {"DDP_SIM_FAIL_COLLECTIVE", "4"},
                                        {"DDP_SIM_HANG_COLLECTIVE", "5"},
                                        {"DDP_SIM_WATCHDOG_MS", "600"},
                                        {"DDP_SIM_FUTURES", "0"},
                                        {"DDP_SIM_SYNC_BUDGET", "0"}});
  EXPECT_EQ(options.seed, 18446744073709551615u);
  EXPECT_EQ(options.lateness, absl::Milliseconds(2));
  EXPECT_FALSE(options.poison);
  EXPECT_EQ(options.memory_limit, 1000000);
  EXPECT_TRUE(options.launch_blocking);
  EXPECT_EQ(options.fail_kernel, 3);
  EXPECT_EQ(options.fail_collective, 4);
  EXPECT_EQ(options.hang_collective, 5);
  EXPECT_EQ(options.watchdog, absl::Milliseconds(600));
  EXPECT_FALSE(options.futures);
  EXPECT_EQ(options.sync_budget, 0);
}

TEST(RuntimeOptionsTest, ABadValueIsNamed) {
  EXPECT_EQ(Read({{"DDP_SIM_POISON", "2"}}).status().message(),
            "DDP_SIM_POISON='2': it must be a whole number from 0 to 1");
  for (const std::string value : {"-1", "1.5", "x", "99999999999999999999"}) {
    EXPECT_FALSE(Read({{"DDP_SIM_LATENESS_MS", value}}).ok()) << value;
  }
}

}  // namespace
}  // namespace ddp::testing
