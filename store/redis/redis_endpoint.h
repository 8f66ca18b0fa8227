// The addresses of Redis servers and of stores, and the credentials for them.
//
// An endpoint (typed by a person) and a store's address (passed between processes) are plain text
// without secrets, so both may stand in argv, environments and logs. User and password come from
// the environment only (ApplyRedisCredentialsFromEnvironment).
#ifndef DDP_STORE_REDIS_REDIS_ENDPOINT_H_
#define DDP_STORE_REDIS_REDIS_ENDPOINT_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "store/redis/store_address.h"  // IWYU pragma: export

namespace ddp::store {

// Parses an endpoint that a person typed:
//   HOST  HOST:PORT  ADDRESS_V6  [ADDRESS_V6]:PORT    (`default_port` where it is left out)
//   redis://HOST[:PORT][/DATABASE]  rediss://HOST[:PORT][/DATABASE]  unix:///PATH/OF/SOCKET
//   redis+sentinel://HOST[:PORT][,HOST[:PORT]...]/MASTER[/DATABASE]    (port 26379)
// After rediss:// (TLS), the files of RedisEndpoint may follow, percent-encoded:
//   ?tls_ca_cert_file=PATH&tls_cert_file=PATH&tls_key_file=PATH
// and after unix://, ?database=NUMBER.
// The returned endpoint has no user and no password.
//
// kInvalidArgument: the text has another form; a certificate has no key, or the reverse; the port
// is outside 1..65535; the path of a socket is relative or has more than 107 bytes. Also
// kInvalidArgument: the text holds "user:password@", which other users of the machine could read.
// The message then names the variables to use instead and does not repeat the text.
absl::StatusOr<RedisEndpoint> ParseRedisEndpoint(const std::string& text,
                                                 int default_port = RedisEndpoint::kDefaultPort);

// Returns a URL that ParseRedisEndpoint parses, without user and password.
std::string FormatRedisEndpoint(const RedisEndpoint& endpoint);

// Sets the user and password of `endpoint` from the environment of this process:
//   DDP_REDIS_USER           the user; unset: Redis's "default"
//   DDP_REDIS_PASSWORD       the password
//   DDP_REDIS_PASSWORD_FILE  a file holding the password; the line end at its end is dropped
// If none of them is set, `endpoint` stays as it is.
//
// kInvalidArgument: both DDP_REDIS_PASSWORD and DDP_REDIS_PASSWORD_FILE are set, a user has no
// password, or the file is empty or too large. kNotFound, kPermissionDenied: the file cannot be
// read; the message names its path.
absl::Status ApplyRedisCredentialsFromEnvironment(RedisEndpoint& endpoint);

// Returns the content of DDP_REDIS_PASSWORD_FILE at `path`. Errors: those of
// ApplyRedisCredentialsFromEnvironment() about the file.
absl::StatusOr<std::string> ReadRedisPasswordFile(const std::string& path);

// Parses URL?prefix=PREFIX as FormatStoreAddress writes it; URL: redis://HOST[:PORT][/DATABASE], or
// another of the URLs above. The prefix and paths are percent-encoded. Sets no credentials.
//
// kInvalidArgument: the text has another form, or the prefix is missing or empty.
absl::StatusOr<StoreAddress> ParseStoreAddress(const std::string& url);

// Returns the text that ParseStoreAddress parses, without user and password.
std::string FormatStoreAddress(const StoreAddress& address);

// Sets one of RedisEndpoint's TLS files by its name. A relative path becomes an absolute one.
// Returns false for any other name.
bool SetTlsFile(absl::string_view name, const std::string& path, RedisEndpoint& endpoint);

// kInvalidArgument: there is a certificate without its key, or the reverse; or there are files, and
// no TLS.
absl::Status CheckTlsFiles(const RedisEndpoint& endpoint);

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_REDIS_ENDPOINT_H_
