#include "launcher/meeting/local_address.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::launcher {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(LocalAddressTest, AJobOfOneHostMeetsOnItsLoopback) {
  const absl::StatusOr<LocalAddress> own = LocalAddressTowards("127.0.0.1", false);
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_EQ(own->address, "127.0.0.1");
  EXPECT_TRUE(own->is_loopback);
  EXPECT_THAT(own->interface, Not(IsEmpty()));
}

// A peer on this host says nothing about how other hosts reach it.
TEST(LocalAddressTest, AJobOfSeveralHostsDoesNotAdvertiseALoopback) {
  const std::vector<LocalAddress> all = LocalAddresses();
  const bool has_network =
      std::any_of(all.begin(), all.end(), [](const LocalAddress& a) { return !a.is_loopback; });
  const absl::StatusOr<LocalAddress> own = LocalAddressTowards("127.0.0.1", true);
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_EQ(own->is_loopback, !has_network);
  EXPECT_EQ(InterfaceOf(own->address), own->interface);
}

TEST(LocalAddressTest, EveryAddressIsFoundByItself) {
  for (const LocalAddress& own : LocalAddresses()) {
    const absl::StatusOr<LocalAddress> found = LocalAddressTowards(own.address, false);
    ASSERT_TRUE(found.ok()) << own.address << ": " << found.status();
    EXPECT_FALSE(found->interface.empty()) << own.address;
  }
}

TEST(LocalAddressTest, ANameThatNobodyHasIsRefusedWithAdvice) {
  const absl::Status status = LocalAddressTowards("no-such-host.invalid", true).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no-such-host.invalid"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--local-addr"));
  EXPECT_EQ(InterfaceOf("192.0.2.1"), "");
}

}  // namespace
}  // namespace ddp::launcher
