#include "base/name_lookup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp {
namespace {

using ::testing::ElementsAre;
using ::testing::StartsWith;

constexpr int kDeadlineMs = 30000;

absl::StatusOr<std::vector<std::string>> LookUp(const std::string& host) {
  absl::StatusOr<std::unique_ptr<NameLookup>> lookup = NameLookup::Start(host);
  if (!lookup.ok()) return lookup.status();
  pollfd polled{.fd = (*lookup)->fd(), .events = POLLIN, .revents = 0};
  if (poll(&polled, 1, kDeadlineMs) != 1) return absl::DeadlineExceededError("no end");
  EXPECT_TRUE((*lookup)->done());
  return (*lookup)->Result();
}

TEST(NameLookupTest, NumericAddressIsItsOwnResult) {
  const absl::StatusOr<std::vector<std::string>> v4 = LookUp("127.0.0.1");
  ASSERT_TRUE(v4.ok()) << v4.status();
  EXPECT_THAT(*v4, ElementsAre("127.0.0.1"));
  const absl::StatusOr<std::vector<std::string>> v6 = LookUp("::1");
  ASSERT_TRUE(v6.ok()) << v6.status();
  EXPECT_THAT(*v6, ElementsAre("::1"));
}

TEST(NameLookupTest, ErrorNamesTheHost) {
  // Longer than a name may be: no server is asked.
  const std::string host(300, 'x');
  const absl::Status status = LookUp(host).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), StartsWith("cannot resolve the name " + host + ": "));
}

TEST(NameLookupTest, MayBeDestroyedBeforeItsEnd) {
  absl::StatusOr<std::unique_ptr<NameLookup>> lookup = NameLookup::Start("localhost");
  ASSERT_TRUE(lookup.ok()) << lookup.status();
  lookup->reset();
  EXPECT_TRUE(LookUp("127.0.0.1").ok());
}

TEST(NameLookupTest, KnowsNumericAddresses) {
  EXPECT_TRUE(IsNumericAddress("10.0.0.7"));
  EXPECT_TRUE(IsNumericAddress("fd00::7"));
  EXPECT_FALSE(IsNumericAddress("localhost"));
  EXPECT_FALSE(IsNumericAddress("10.0.0"));
  EXPECT_FALSE(IsNumericAddress(""));
}

}  // namespace
}  // namespace ddp
