#ifndef DDP_TESTING_REDIS_REDIS_FIXTURE_H_
#define DDP_TESTING_REDIS_REDIS_FIXTURE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis_server/private_redis_server.h"
#include "testing/redis/tls_certificates.h"

namespace ddp::testing {

// A real redis-server for one test, in a folder whose path is short enough for a unix socket. The
// server ends with the fixture or with the test's process. If it cannot be started, the test's
// process ends with the reason.
//
// Thread-compatible. Create it, and call Restart(), in the main thread: the server ends with the
// thread that starts it.
class RedisFixture {
 public:
  // Starts a server on a unix socket, without a password.
  static std::unique_ptr<RedisFixture> Start();

  // Starts a server on a unix socket and a free TCP port of 127.0.0.1. With a `password`, the
  // server requires it of its user "default", and endpoint() has it.
  static std::unique_ptr<RedisFixture> StartTcp(const std::string& password = "");

  // Starts a server on `port` of a loopback address ("127.0.0.2"), without a password.
  static std::unique_ptr<RedisFixture> StartTcpAt(const std::string& address, int port);

  // Starts a server that speaks TLS alone, on a free port of 127.0.0.1, with the server's
  // certificate of `certificates`; endpoint() has their authority. With `asks_clients`, it demands
  // a certificate of its clients, and endpoint() has the client's.
  static std::unique_ptr<RedisFixture> StartTls(const TlsCertificates& certificates,
                                                bool asks_clients = false);

  ~RedisFixture();
  RedisFixture(const RedisFixture&) = delete;
  RedisFixture& operator=(const RedisFixture&) = delete;

  // The TCP address after StartTcp() or StartTcpAt(), otherwise the unix socket.
  const store::RedisEndpoint& endpoint() const { return endpoint_; }

  // The unix socket, in every case.
  store::RedisEndpoint SocketEndpoint() const;

  // Returns the version, such as "7.0.15".
  std::string ServerVersion() const;

  // Returns the address of a store in this server. Equal names give the same store.
  store::StoreAddress Address(const std::string& name = "test") const;

  std::unique_ptr<store::RedisConnection> Connect() const;

  // Simulate an outage. Kill() ends the server; its data is lost. Restart() starts an empty server
  // at the same address.
  void Kill();
  void Restart();

  // Returns the number of calls of each command ("hget": 3), as the server counts them.
  std::map<std::string, int64_t> CommandCalls() const;

  pid_t pid() const { return server_->pid(); }

 private:
  explicit RedisFixture(const std::string& directory);

  // Starts the server with `config` on a free port, which follows the last line.
  void StartAtFreePort(const std::vector<std::string>& config);

  std::string Info(const std::string& section) const;

  const std::string directory_;
  std::vector<std::string> config_;
  store::RedisEndpoint endpoint_;
  std::unique_ptr<store::PrivateRedisServer> server_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_REDIS_REDIS_FIXTURE_H_
