#include "base/death_notice.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <vector>

#include "base/unique_fd.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

void Count(void* count) { ++*static_cast<int*>(count); }

TEST(DeathNoticeTest, EachLivingNoticeIsGiven) {
  int first = 0;
  int second = 0;
  std::optional<DeathNotice> gone(std::in_place, &Count, &first);
  const DeathNotice stays(&Count, &second);
  GiveDeathNotices();
  gone.reset();
  GiveDeathNotices();
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 2);
}

TEST(DeathNoticeTest, ASlotServesManyNoticesOneAfterTheOther) {
  int count = 0;
  for (int i = 0; i < 3 * DeathNotice::kMost; ++i) DeathNotice(&Count, &count);
  const DeathNotice last(&Count, &count);
  GiveDeathNotices();
  EXPECT_EQ(count, 1);
}

TEST(DeathNoticeTest, NoticesBeyondTheLimitAreNotGiven) {
  int count = 0;
  std::vector<std::unique_ptr<DeathNotice>> many;
  for (int i = 0; i < DeathNotice::kMost + 10; ++i) {
    many.push_back(std::make_unique<DeathNotice>(&Count, &count));
  }
  GiveDeathNotices();
  EXPECT_EQ(count, DeathNotice::kMost);
}

// Two ends of one TCP connection over the loopback address.
struct Connection {
  UniqueFd listener, near, far;
};

Connection Connect() {
  Connection made;
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  made.listener.reset(::socket(AF_INET, SOCK_STREAM, 0));
  EXPECT_EQ(::bind(made.listener.get(), any, size), 0);
  EXPECT_EQ(::listen(made.listener.get(), 1), 0);
  EXPECT_EQ(::getsockname(made.listener.get(), any, &size), 0);
  made.near.reset(::socket(AF_INET, SOCK_STREAM, 0));
  EXPECT_EQ(::connect(made.near.get(), any, size), 0);
  made.far.reset(::accept(made.listener.get(), nullptr, nullptr));
  return made;
}

TEST(DeathNoticeTest, TcpConnectionsEndAndUnixSocketsStay) {
  const Connection tcp = Connect();
  int pair[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  const UniqueFd one(pair[0]);
  const UniqueFd other(pair[1]);
  GiveDeathNotices();
  char byte = 'x';
  EXPECT_EQ(::read(tcp.far.get(), &byte, 1), 0);
  EXPECT_EQ(::write(one.get(), &byte, 1), 1);
  EXPECT_EQ(::read(other.get(), &byte, 1), 1);
}

}  // namespace
}  // namespace ddp
