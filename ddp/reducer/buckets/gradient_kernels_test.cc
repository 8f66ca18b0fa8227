#include "ddp/reducer/buckets/gradient_kernels.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

constexpr int64_t kMiB = 1 << 20;

template <typename T>
class GradientKernelsTest : public ::testing::Test {
 protected:
  static T ValueAt(int64_t i) { return static_cast<T>(i % 1009) - 500; }

  // Copies from one unaligned offset to another, with guard elements on both sides.
  static void CopyOf(int64_t count, int64_t source_offset, int64_t target_offset) {
    constexpr T kGuard = -7;
    const T third = T(1) / 3;
    std::vector<T> from(source_offset + count), to(target_offset + count + 1, kGuard);
    for (int64_t i = 0; i < count; ++i) from[source_offset + i] = ValueAt(i);
    ScaleCopy(from.data() + source_offset, third, count, to.data() + target_offset);
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; ++i) {
      wrong += to[target_offset + i] != ValueAt(i) * third ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0) << count << " from " << source_offset << " to " << target_offset;
    for (int64_t i = 0; i < target_offset; ++i) EXPECT_EQ(to[i], kGuard);
    EXPECT_EQ(to.back(), kGuard) << count << " to " << target_offset;
  }
};

using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(GradientKernelsTest, Types);

TYPED_TEST(GradientKernelsTest, CopiesAnySizeFromAnywhereToAnywhere) {
  // Also sizes next to the one from which writes go past the caches.
  const int64_t limit = kMiB / sizeof(TypeParam);
  for (const int64_t count :
       {int64_t{0}, int64_t{1}, int64_t{37}, limit - 1, limit, limit + 1, limit + 29}) {
    for (const int64_t source_offset : {0, 3}) {
      for (const int64_t target_offset : {0, 1, 2, 5, 15}) {
        this->CopyOf(count, source_offset, target_offset);
      }
    }
  }
}

TYPED_TEST(GradientKernelsTest, ScalesInPlace) {
  for (const int64_t count : {int64_t{5}, kMiB}) {
    std::vector<TypeParam> data(count, 3);
    ScaleCopy(data.data(), TypeParam(0.5), count, data.data());
    EXPECT_EQ(data, std::vector<TypeParam>(count, 1.5));
  }
}

}  // namespace
}  // namespace ddp::internal
