#include "elastic/agent/free_port.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <set>
#include <string>

#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;

TEST(FreePortTest, AListenerCanHaveThePort) {
  const absl::StatusOr<int> port = FindFreePort();
  ASSERT_TRUE(port.ok()) << port.status();
  UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(*port));
  EXPECT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(listen(listener.get(), 1), 0);
}

TEST(FreePortTest, IsDrawnAtRandom) {
  std::set<int> ports;
  for (int i = 0; i < 20; ++i) {
    const absl::StatusOr<int> port = FindFreePort();
    ASSERT_TRUE(port.ok()) << port.status();
    EXPECT_GE(*port, 10'000);
    EXPECT_LE(*port, 65'535);
    ports.insert(*port);
  }
  EXPECT_GT(ports.size(), 10u);
}

TEST(FreePortTest, APortInUseIsNamed) {
  UniqueFd listener(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const int port = ntohs(address.sin6_port);
  EXPECT_THAT(
      CheckPortIsFree(port).message(),
      HasSubstr("port " + std::to_string(port) + " cannot be used: Address already in use"));
  listener.reset();
  EXPECT_TRUE(CheckPortIsFree(port).ok());
}

}  // namespace
}  // namespace ddp::elastic
