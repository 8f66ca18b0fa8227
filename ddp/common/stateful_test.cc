#include "ddp/common/stateful.h"

#include <cstdint>
#include <string>

#include <ATen/ops/ones.h>

#include "ddp/common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"

namespace ddp {
namespace {

using testing::ErrorOf;

SavedState Inner() {
  SavedState state;
  state.values["count"] = int64_t{3};
  state.values["name"] = std::string("inner");
  state.tensors["weight"] = at::ones({2});
  return state;
}

TEST(SavedStateTest, PartsKeepTheirNames) {
  SavedState outer;
  outer.values["count"] = int64_t{7};
  outer.add_part("parts/0", Inner());
  outer.add_part("parts/01", SavedState());
  EXPECT_EQ(outer.value<int64_t>("count"), 7);
  EXPECT_EQ(outer.value<int64_t>("parts/0/count"), 3);

  const SavedState part = outer.part("parts/0");
  EXPECT_EQ(part.values, Inner().values);
  EXPECT_TRUE(part.tensor("weight").is_same(outer.tensor("parts/0/weight")));
  EXPECT_TRUE(outer.part("parts/01").values.empty());
  EXPECT_EQ(outer.part("parts").part("0").value<std::string>("name"), "inner");
}

TEST(SavedStateTest, WhatIsMissingIsNamed) {
  const SavedState state = Inner();
  EXPECT_EQ(ErrorOf<ConfigurationError>([&] { state.value<int64_t>("step"); }),
            "the saved state has no value \"step\"; it was saved by another class or version");
  EXPECT_EQ(ErrorOf<ConfigurationError>([&] { state.value<double>("count"); }),
            "the saved state has another type of \"count\"; it was saved by another class or "
            "version");
  EXPECT_EQ(ErrorOf<ConfigurationError>([&] { state.tensor("bias"); }),
            "the saved state has no tensor \"bias\"; it was saved by another class or version");
}

}  // namespace
}  // namespace ddp
