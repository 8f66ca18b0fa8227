#ifndef DDP_TESTING_REDIS_FIXTURE_H_
#define DDP_TESTING_REDIS_FIXTURE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "store/private_redis_server.h"
#include "store/redis_connection.h"
#include "store/redis_endpoint.h"

namespace ddp::testing {

// A real redis-server of one test, in a folder with a short path, gone with the fixture or with the
// test's process. Where it cannot be started the test's process ends with the reason.
//
// Thread-compatible. Create it in the main thread (see PrivateRedisServer).
class RedisFixture {
 public:
  // On a unix socket, without a password.
  static std::unique_ptr<RedisFixture> Start();

  // On a free TCP port of 127.0.0.1 as well. With a `password`, the server wants it from its user
  // "default"; endpoint() carries it.
  static std::unique_ptr<RedisFixture> StartTcp(const std::string& password = "");

  // The same on that port of another loopback address ("127.0.0.2"), without a password.
  static std::unique_ptr<RedisFixture> StartTcpAt(const std::string& address, int port);

  ~RedisFixture();
  RedisFixture(const RedisFixture&) = delete;
  RedisFixture& operator=(const RedisFixture&) = delete;

  // The TCP address after StartTcp, else the socket.
  const store::RedisEndpoint& endpoint() const { return endpoint_; }

  // The unix socket, in either case.
  store::RedisEndpoint SocketEndpoint() const;

  // "7.0.15"
  std::string ServerVersion() const;

  // A store's address in this server; equal names are equal stores.
  store::StoreAddress Address(const std::string& name = "test") const;

  std::unique_ptr<store::RedisConnection> Connect() const;

  // An outage: the server is gone, and its data. Restart() brings back an empty server at the same
  // address.
  void Kill();
  void Restart();

  // How often each command was called ("hget": 3), by the server's own count.
  std::map<std::string, int64_t> CommandCalls() const;

  pid_t pid() const { return server_->pid(); }

 private:
  explicit RedisFixture(const std::string& directory);

  std::string Info(const std::string& section) const;

  const std::string directory_;
  std::vector<std::string> config_;
  store::RedisEndpoint endpoint_;
  std::unique_ptr<store::PrivateRedisServer> server_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_REDIS_FIXTURE_H_
