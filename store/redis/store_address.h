// The addresses of Redis servers and of stores as values. redis_endpoint.h parses them.
#ifndef DDP_STORE_REDIS_STORE_ADDRESS_H_
#define DDP_STORE_REDIS_STORE_ADDRESS_H_

#include <string>
#include <utility>
#include <vector>

namespace ddp::store {

// The address of a Redis server, and the user to log in as. A value: copy it freely.
struct RedisEndpoint {
  static constexpr int kDefaultPort = 6379;

  // The host of a TCP server: a name or an address (IPv6 without brackets). Empty with `unix_path`
  // and with `sentinels`.
  std::string host;
  int port = kDefaultPort;

  // Hosts and ports of Redis Sentinels, which know the address of the master `master_name`. Empty:
  // the address does not come from Sentinel.
  std::vector<std::pair<std::string, int>> sentinels;
  std::string master_name;

  // The absolute path of a server's unix socket. Empty with `host`.
  std::string unix_path;

  // The numbered database (SELECT).
  int database = 0;

  // Empty: Redis's user "default".
  std::string user;
  // Empty: no AUTH is sent.
  std::string password;
  // The absolute path of the file that `password` was read from. A client that the server refuses
  // reads it again, because the password may have been changed. Empty: no file.
  std::string password_file;

  // Whether the server is spoken to by TLS. It then has a host.
  bool tls = false;
  // PEM files by absolute paths: the certificates that may sign the server's (empty: the system's),
  // and this client's own certificate with its key (both or none).
  std::string tls_ca_cert_file;
  std::string tls_cert_file;
  std::string tls_key_file;

  bool is_unix() const { return !unix_path.empty(); }
  bool is_behind_sentinels() const { return !sentinels.empty(); }

  // Returns the address for messages: "127.0.0.1:6379", "[::1]:6379/2", "unix:///run/redis.sock",
  // "rediss://redis.example:6379".
  // With a password, " (user alice, with a password)" follows. The password is never shown.
  std::string DebugString() const;

  friend bool operator==(const RedisEndpoint&, const RedisEndpoint&) = default;
};

// The place of a store's keys: a server, and the prefix of each key. DDP_STORE carries it from the
// agent to the workers.
struct StoreAddress {
  RedisEndpoint endpoint;
  std::string prefix;

  friend bool operator==(const StoreAddress&, const StoreAddress&) = default;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_STORE_ADDRESS_H_
