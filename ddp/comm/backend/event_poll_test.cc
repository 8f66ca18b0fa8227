#include "ddp/comm/backend/event_poll.h"

#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::Contains;
using ::testing::Not;

void Watch(int event_poll, int descriptor) {
  epoll_event event{.events = EPOLLIN, .data = {.fd = descriptor}};
  ASSERT_EQ(::epoll_ctl(event_poll, EPOLL_CTL_ADD, descriptor, &event), 0);
}

TEST(EventPollTest, FindsThoseOfThisProcess) {
  int number = -1;
  {
    const UniqueFd event_poll(::epoll_create1(EPOLL_CLOEXEC));
    number = event_poll.get();
    EXPECT_THAT(EventPolls(), Contains(number));
  }
  EXPECT_THAT(EventPolls(), Not(Contains(number)));
}

TEST(EventPollTest, EndsConnectionsAndLeavesTheListener) {
  const UniqueFd event_poll(::epoll_create1(EPOLL_CLOEXEC));
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd mine(ends[0]);
  const UniqueFd peer(ends[1]);
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  Watch(event_poll.get(), mine.get());
  Watch(event_poll.get(), listener.get());

  ShutDownConnectionsOf(event_poll.get());

  char byte = 0;
  EXPECT_EQ(::read(mine.get(), &byte, 1), 0);
  EXPECT_EQ(::read(peer.get(), &byte, 1), 0);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const UniqueFd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
}

}  // namespace
}  // namespace ddp::internal
