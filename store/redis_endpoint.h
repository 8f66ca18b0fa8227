// Where a Redis server is, who we are there, and under which prefix a store keeps its keys.
//
// An endpoint as a person types it and a store's address as one process hands it to another are
// both plain text without secrets, so both may stand in argv, environments and logs. User and
// password come from the environment only (ApplyRedisCredentialsFromEnvironment).
#ifndef DDP_STORE_REDIS_ENDPOINT_H_
#define DDP_STORE_REDIS_ENDPOINT_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::store {

// Names one Redis server, and the user to be there. A value: copy it freely.
struct RedisEndpoint {
  static constexpr int kDefaultPort = 6379;

  // A TCP server: a name or an address (an IPv6 address without its brackets). Empty when
  // `unix_path` is set.
  std::string host;
  int port = kDefaultPort;

  // A server on a unix socket: the absolute path of the socket. Empty when `host` is set.
  std::string unix_path;

  // The numbered database (SELECT).
  int database = 0;

  // Empty: Redis's user "default".
  std::string user;
  // Empty: no AUTH is sent.
  std::string password;

  bool is_unix() const { return !unix_path.empty(); }

  // The address for messages: "127.0.0.1:6379", "[::1]:6379/2", "unix:///run/redis.sock". With a
  // password: " (user alice, with a password)" behind it. Never shows the password.
  std::string DebugString() const;

  friend bool operator==(const RedisEndpoint&, const RedisEndpoint&) = default;
};

// Reads what a person gives as an endpoint:
//   HOST  HOST:PORT  ADDRESS_V6  [ADDRESS_V6]:PORT    (`default_port` where it is left out)
//   redis://HOST[:PORT][/DATABASE]  unix:///PATH/OF/SOCKET
// The returned endpoint has no user and no password.
//
// kInvalidArgument: not of this form; a port outside 1..65535; a relative or over-long socket path
// (a unix socket's path has at most 107 bytes); or "user:password@", which does not belong in text
// that other users of the machine can read: the message names the variables to use instead and does
// not repeat the text.
absl::StatusOr<RedisEndpoint> ParseRedisEndpoint(const std::string& text,
                                                 int default_port = RedisEndpoint::kDefaultPort);

// Fills `endpoint`'s user and password from the environment of this process:
//   DDP_REDIS_USER           the user; unset: Redis's "default"
//   DDP_REDIS_PASSWORD       the password
//   DDP_REDIS_PASSWORD_FILE  a file holding the password; the line end at its end is dropped
// With none of them set, the endpoint is left as it is.
//
// kInvalidArgument: both DDP_REDIS_PASSWORD and DDP_REDIS_PASSWORD_FILE are set, a user without a
// password, or an empty file. kNotFound, kPermissionDenied: the file cannot be read; its path is
// named.
absl::Status ApplyRedisCredentialsFromEnvironment(RedisEndpoint& endpoint);

// Where a store's keys are: a server, and the text that each of the store's keys begins with. This
// is what DDP_STORE carries from the agent to the workers.
struct StoreAddress {
  RedisEndpoint endpoint;
  std::string prefix;

  friend bool operator==(const StoreAddress&, const StoreAddress&) = default;
};

// Reads redis://HOST[:PORT][/DATABASE]?prefix=PREFIX or unix:///PATH?[database=N&]prefix=PREFIX, as
// FormatStoreAddress writes them; the prefix is percent-encoded. Adds no credentials.
//
// kInvalidArgument: not of this form, or the prefix is missing or empty.
absl::StatusOr<StoreAddress> ParseStoreAddress(const std::string& url);

// The text that ParseStoreAddress reads back, without user and password.
std::string FormatStoreAddress(const StoreAddress& address);

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_ENDPOINT_H_
