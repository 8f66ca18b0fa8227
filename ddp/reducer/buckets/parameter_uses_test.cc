#include "ddp/reducer/buckets/parameter_uses.h"

#include <optional>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(ParameterUsesTest, AParameterIsSharedWhileTwoModelsLive) {
  const int a = 0;
  const int b = 0;
  const ParameterUses stays({&a, &b});
  EXPECT_FALSE(stays.shared(0));
  {
    const ParameterUses goes({&b});
    EXPECT_FALSE(stays.shared(0));
    EXPECT_TRUE(stays.shared(1));
    EXPECT_TRUE(goes.shared(0));
  }
  EXPECT_FALSE(stays.shared(1));
}

TEST(ParameterUsesTest, AModelAfterTheLastOneBeginsAnew) {
  const int a = 0;
  std::optional<ParameterUses> first(std::in_place, std::vector<const void*>{&a});
  first.reset();
  const ParameterUses second({&a});
  EXPECT_FALSE(second.shared(0));
  const ParameterUses third({&a});
  EXPECT_TRUE(second.shared(0));
}

}  // namespace
}  // namespace ddp::internal
