#include "testing/redis/delaying_proxy.h"

#include <glog/logging.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <utility>

namespace ddp::testing {

struct DelayingProxy::Link {
  UniqueFd client;
  UniqueFd server;
};

DelayingProxy::DelayingProxy(const std::string& unix_path, absl::Duration delay)
    : unix_path_(unix_path), delay_(delay), stop_(eventfd(0, EFD_CLOEXEC)) {
  CHECK(loop_->Watch(listener_.fd.get(), EPOLLIN, [this](uint32_t) { Accept(); }).ok());
  CHECK(loop_->Watch(stop_.get(), EPOLLIN, [this](uint32_t) { loop_->Stop(); }).ok());
  thread_ = std::thread([this] { CHECK(loop_->Run().ok()); });
}

DelayingProxy::~DelayingProxy() {
  PCHECK(eventfd_write(stop_.get(), 1) == 0);
  thread_.join();
}

store::RedisEndpoint DelayingProxy::endpoint() const {
  store::RedisEndpoint endpoint;
  endpoint.host = "127.0.0.1";
  endpoint.port = listener_.port;
  return endpoint;
}

void DelayingProxy::Accept() {
  auto link = std::make_shared<Link>();
  link->client.reset(accept4(listener_.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
  link->server.reset(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  CHECK_LT(unix_path_.size(), sizeof(address.sun_path));
  memcpy(address.sun_path, unix_path_.data(), unix_path_.size());
  // A server that is away ends the connection, as the kernel of its host does.
  if (connect(link->server.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return;
  }
  Forward(link, link->client.get(), link->server.get());
  Forward(link, link->server.get(), link->client.get());
}

void DelayingProxy::Forward(const std::shared_ptr<Link>& link, int from, int to) {
  const auto on_bytes = [this, link, from, to](uint32_t) {
    char buffer[4096];
    const ssize_t count = recv(from, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (count <= 0) return Close(*link);
    loop_->AddTimer(delay_, [link, to, bytes = std::string(buffer, count)] {
      if (link->client.valid()) (void)!send(to, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    });
  };
  CHECK(loop_->Watch(from, EPOLLIN, on_bytes).ok());
}

void DelayingProxy::Close(Link& link) {
  loop_->Unwatch(link.client.get());
  loop_->Unwatch(link.server.get());
  link.client.reset();
  link.server.reset();
}

}  // namespace ddp::testing
