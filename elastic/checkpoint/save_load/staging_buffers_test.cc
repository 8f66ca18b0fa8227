#include "elastic/checkpoint/save_load/staging_buffers.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

TEST(StagingBuffersTest, BuffersAreUsedAgainAndGrow) {
  StagingBuffers buffers(2);
  char* memory = nullptr;
  for (int i = 0; i < 3; ++i) {
    const auto lease = buffers.Take(10'000);
    ASSERT_TRUE(lease.ok()) << lease.status();
    if (memory != nullptr) {
      EXPECT_EQ(lease->data(), memory) << "a second buffer for one save";
    }
    memory = lease->data();
    std::memset(memory, i, 10'000);
  }
  const auto larger = buffers.Take(1'000'000);
  ASSERT_TRUE(larger.ok()) << larger.status();
  std::memset(larger->data(), 1, 1'000'000);
}

TEST(StagingBuffersTest, ALeaseKeepsItsBufferAndReturnsItOnce) {
  auto buffers = std::make_unique<StagingBuffers>(2);
  std::optional<StagingBuffers::Lease> first(*buffers->Take(1));
  StagingBuffers::Lease second = *buffers->Take(1);
  EXPECT_FALSE(buffers->HasFree());
  EXPECT_NE(first->data(), second.data());
  std::optional<StagingBuffers::Lease> moved(*std::move(first));
  first.reset();
  EXPECT_FALSE(buffers->HasFree());
  moved.reset();
  EXPECT_TRUE(buffers->HasFree());
  buffers.reset();
  *second.data() = 'x';  // a lease outlives the buffers
}

TEST(StagingBuffersTest, TooMuchIsAnErrorAndTheBufferIsFreeAgain) {
  StagingBuffers buffers(1);
  EXPECT_TRUE(absl::IsResourceExhausted(buffers.Take(uint64_t{1} << 60).status()));
  EXPECT_TRUE(buffers.HasFree());
  EXPECT_TRUE(buffers.Take(1).ok());
}

}  // namespace
}  // namespace ddp::elastic
