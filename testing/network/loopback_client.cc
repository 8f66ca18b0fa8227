#include "testing/network/loopback_client.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <cstdint>

namespace ddp::testing {

namespace {

UniqueFd Connect(const sockaddr& address, socklen_t size) {
  UniqueFd fd(::socket(address.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval timeout{60, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  if (::connect(fd.get(), &address, size) != 0) fd.reset();
  return fd;
}

}  // namespace

UniqueFd DialLoopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return Connect(reinterpret_cast<const sockaddr&>(address), sizeof(address));
}

UniqueFd DialLoopback6(int port) {
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  address.sin6_port = htons(static_cast<uint16_t>(port));
  return Connect(reinterpret_cast<const sockaddr&>(address), sizeof(address));
}

bool HasLoopback6() {
  const UniqueFd fd(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  return fd.valid() &&
         ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

void SendText(const UniqueFd& socket, const std::string& text) {
  EXPECT_EQ(::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(text.size()));
}

std::string ReceiveText(const UniqueFd& socket) {
  std::string text;
  char bytes[4096];
  ssize_t got = 0;
  while ((got = ::recv(socket.get(), bytes, sizeof(bytes), 0)) > 0) text.append(bytes, got);
  return text;
}

}  // namespace ddp::testing
