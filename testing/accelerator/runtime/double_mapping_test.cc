#include "testing/accelerator/runtime/double_mapping.h"

#include "gtest/gtest.h"

namespace ddp::testing {
namespace {

constexpr size_t kBytes = 1 << 20;

TEST(DoubleMappingDeathTest, TheHostFaultsAtADevicesMemory) {
  const DoubleMapping memory(kBytes, DoubleMapping::Kind::kDevice);
  auto* address = static_cast<volatile char*>(memory.Address(4096));
  EXPECT_DEATH((void)*address, "");
  EXPECT_DEATH(*address = 1, "");
  auto* view = static_cast<char*>(memory.KernelView(4096));
  *view = 7;
  EXPECT_EQ(*view, 7);
}

TEST(DoubleMappingTest, BothAddressesOfPinnedMemoryAreOneMemory) {
  DoubleMapping memory(kBytes, DoubleMapping::Kind::kPinned);
  auto* address = static_cast<char*>(memory.Address(8192));
  *address = 7;
  EXPECT_EQ(*static_cast<char*>(memory.KernelView(8192)), 7);
  EXPECT_TRUE(memory.Contains(address));
  EXPECT_EQ(memory.OffsetOf(address), 8192);
  EXPECT_FALSE(memory.Contains(memory.KernelView(8192)));
  memory.Discard(8192, 4096);
  EXPECT_EQ(*address, 0);
}

}  // namespace
}  // namespace ddp::testing
