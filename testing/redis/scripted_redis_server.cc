#include "testing/redis/scripted_redis_server.h"

#include <glog/logging.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp::testing {

ScriptedRedisServer::ScriptedRedisServer(std::vector<Answers> connections)
    : connections_(std::move(connections)) {
  PCHECK(mkdtemp(folder_) != nullptr);
  endpoint_.unix_path = absl::StrCat(folder_, "/s");
  listener_ = UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, endpoint_.unix_path.data(), endpoint_.unix_path.size());
  PCHECK(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  PCHECK(listen(listener_.get(), 16) == 0);
  thread_ = std::thread([this] { Serve(); });
}

std::vector<std::string> ScriptedRedisServer::Finish() {
  if (thread_.joinable()) {
    shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
    unlink(endpoint_.unix_path.c_str());
    rmdir(folder_);
  }
  return received_;
}

void ScriptedRedisServer::Serve() {
  for (const Answers& answers : connections_) {
    const UniqueFd client(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!client.valid()) return;
    for (const std::string& answer : answers) {
      char buffer[4096];
      const ssize_t count = recv(client.get(), buffer, sizeof(buffer), 0);
      if (count <= 0) break;
      received_.emplace_back(buffer, count);
      (void)!send(client.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    }
  }
}

}  // namespace ddp::testing
