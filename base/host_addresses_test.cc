#include "base/host_addresses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/un.h>

#include "absl/status/status.h"

namespace ddp {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(HostAddressesTest, NumericAddressIsItsOwnAddress) {
  for (const char* host : {"127.0.0.1", "::1", "10.1.2.3", "fd00::7"}) {
    const absl::StatusOr<AddressList> list = ResolveHost(host, {.is_numeric = true});
    ASSERT_TRUE(list.ok()) << host << ": " << list.status();
    EXPECT_EQ(NumericAddress((*list)->ai_addr, (*list)->ai_addrlen), host);
    EXPECT_EQ((*list)->ai_next, nullptr);
  }
}

TEST(HostAddressesTest, QueryGivesPortAndSocketType) {
  const absl::StatusOr<AddressList> list =
      ResolveHost("127.0.0.1", {.port = 29500, .socket_type = SOCK_DGRAM});
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_EQ((*list)->ai_socktype, SOCK_DGRAM);
  const auto* const address = reinterpret_cast<const sockaddr_in*>((*list)->ai_addr);
  EXPECT_EQ(ntohs(address->sin_port), 29500);
}

TEST(HostAddressesTest, NameOfThisHostHasALoopbackAddress) {
  const absl::StatusOr<AddressList> list = ResolveHost("localhost");
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_EQ((*list)->ai_socktype, SOCK_STREAM);
  EXPECT_THAT(NumericAddress((*list)->ai_addr, (*list)->ai_addrlen),
              ::testing::AnyOf("127.0.0.1", "::1"));
}

TEST(HostAddressesTest, ErrorIsTheReasonAlone) {
  // A numeric query asks no server.
  const absl::Status status = ResolveHost("node-1.test", {.is_numeric = true}).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("node-1")));
  EXPECT_EQ(status.message(), gai_strerror(EAI_NONAME));
}

TEST(HostAddressesTest, UnixSocketHasNoNumericAddress) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  EXPECT_EQ(NumericAddress(reinterpret_cast<const sockaddr*>(&address), sizeof(address)), "");
}

}  // namespace
}  // namespace ddp
