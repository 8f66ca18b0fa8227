#include "testing/network/loopback_socket.h"

#include <glog/logging.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

namespace ddp::testing {

bool LoopbackSocket::HasClient() const {
  pollfd polled{.fd = fd.get(), .events = POLLIN, .revents = 0};
  return ::poll(&polled, 1, 0) == 1;
}

LoopbackSocket BindLoopback() {
  LoopbackSocket result = {.fd = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0))};
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  PCHECK(::bind(result.fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
  PCHECK(::getsockname(result.fd.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
  result.port = ntohs(address.sin_port);
  return result;
}

LoopbackSocket ListenOnLoopback() {
  LoopbackSocket result = BindLoopback();
  PCHECK(::listen(result.fd.get(), SOMAXCONN) == 0);
  return result;
}

}  // namespace ddp::testing
