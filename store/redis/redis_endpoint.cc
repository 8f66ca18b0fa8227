#include "store/redis/redis_endpoint.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "store/redis/percent_encoding.h"

namespace ddp::store {
namespace {

constexpr char kTcpScheme[] = "redis://";
constexpr char kTlsScheme[] = "rediss://";
constexpr char kSentinelScheme[] = "redis+sentinel://";
constexpr int kSentinelPort = 26379;
constexpr char kUnixScheme[] = "unix://";
constexpr char kForms[] =
    "expected HOST, HOST:PORT, [IPV6]:PORT, redis://HOST:PORT[/DATABASE], rediss://HOST:PORT "
    "(TLS), redis+sentinel://HOST:PORT[,HOST:PORT...]/MASTER or unix:///PATH";
// The parts of an address behind '?', and where they go.
constexpr std::pair<absl::string_view, std::string RedisEndpoint::*> kTlsFiles[] = {
    {"tls_ca_cert_file", &RedisEndpoint::tls_ca_cert_file},
    {"tls_cert_file", &RedisEndpoint::tls_cert_file},
    {"tls_key_file", &RedisEndpoint::tls_key_file},
};
// No server has so many databases: a larger number is a typing error.
constexpr int kMaxDatabase = 1'000'000;
constexpr size_t kMaxPasswordBytes = 64 * 1024;

bool IsControl(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte < 0x20 || byte == 0x7f;
}

absl::Status Malformed(const std::string& text, const std::string& why) {
  std::string message = absl::StrCat("Redis endpoint '", text, "': ", why, "; ", kForms);
  std::replace_if(message.begin(), message.end(), &IsControl, '?');
  return absl::InvalidArgumentError(message);
}

// Accepts digits only: SimpleAtoi would also accept blanks and a sign.
bool ParseNumber(const std::string& text, int min, int max, int& value) {
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) return false;
  return absl::SimpleAtoi(text, &value) && value >= min && value <= max;
}

absl::Status SetPort(const std::string& text, const std::string& port, RedisEndpoint& endpoint) {
  if (!ParseNumber(port, 1, 65535, endpoint.port)) {
    return Malformed(text, absl::StrCat("the port '", port, "' is not a number from 1 to 65535"));
  }
  return absl::OkStatus();
}

absl::Status SetDatabase(const std::string& text, const std::string& database,
                         RedisEndpoint& endpoint) {
  if (!ParseNumber(database, 0, kMaxDatabase, endpoint.database)) {
    return Malformed(text, absl::StrCat("the database '", database, "' is not a number"));
  }
  return absl::OkStatus();
}

absl::Status CheckHost(const std::string& text, const std::string& host) {
  if (host.empty()) return Malformed(text, "the host is missing");
  if (host.find_first_of(" /?#[]") != std::string::npos ||
      std::any_of(host.begin(), host.end(), &IsControl)) {
    return Malformed(text, absl::StrCat("'", host, "' is not a host"));
  }
  return absl::OkStatus();
}

// Returns true for an IPv6 address, with or without a zone (fe80::1%eth0).
bool IsIpv6(const std::string& text) {
  in6_addr address{};
  return inet_pton(AF_INET6, text.substr(0, text.find('%')).c_str(), &address) == 1;
}

// Parses HOST, HOST:PORT, V6, [V6] or [V6]:PORT.
absl::Status SetAuthority(const std::string& text, const std::string& authority,
                          RedisEndpoint& endpoint) {
  std::string rest;
  if (absl::StartsWith(authority, "[")) {
    const size_t end = authority.find(']');
    if (end == std::string::npos) return Malformed(text, "']' is missing");
    endpoint.host = authority.substr(1, end - 1);
    rest = authority.substr(end + 1);
    if (!rest.empty() && rest[0] != ':') return Malformed(text, "':PORT' must follow ']'");
    if (!IsIpv6(endpoint.host)) {
      return Malformed(text, absl::StrCat("'", endpoint.host, "' is no IPv6 address"));
    }
  } else {
    const size_t first = authority.find(':');
    const bool bare_v6 = first != std::string::npos && authority.rfind(':') != first;
    if (bare_v6 && !IsIpv6(authority)) {
      return Malformed(text, "it has more than one ':' and is no IPv6 address");
    }
    endpoint.host = bare_v6 ? authority : authority.substr(0, first);
    rest = bare_v6 || first == std::string::npos ? "" : authority.substr(first);
  }
  DDP_RETURN_IF_ERROR(CheckHost(text, endpoint.host));
  return rest.empty() ? absl::OkStatus() : SetPort(text, rest.substr(1), endpoint);
}

absl::Status SetUnixPath(const std::string& text, const std::string& path,
                         RedisEndpoint& endpoint) {
  if (!absl::StartsWith(path, "/")) {
    return Malformed(text, "a socket's path must be absolute: unix:///run/redis.sock");
  }
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return Malformed(
        text, absl::StrCat("the socket's path has ", path.size(), " bytes, the system allows ",
                           sizeof(sockaddr_un::sun_path) - 1));
  }
  if (std::any_of(path.begin(), path.end(), &IsControl)) {
    return Malformed(text, "the path holds a control character");
  }
  endpoint.unix_path = path;
  endpoint.port = RedisEndpoint::kDefaultPort;
  return absl::OkStatus();
}

// Parses HOST[:PORT][,...]/MASTER[/DATABASE].
absl::StatusOr<RedisEndpoint> ParseSentinels(const std::string& text, const std::string& rest) {
  const std::vector<std::string> parts = absl::StrSplit(rest, '/');
  RedisEndpoint endpoint;
  if (parts.size() < 2 || parts.size() > 3 || parts[1].empty()) {
    return Malformed(text, "the sentinels' name of the master is missing");
  }
  for (const absl::string_view authority : absl::StrSplit(parts[0], ',')) {
    RedisEndpoint sentinel;
    sentinel.port = kSentinelPort;
    DDP_RETURN_IF_ERROR(SetAuthority(text, std::string(authority), sentinel));
    endpoint.sentinels.emplace_back(sentinel.host, sentinel.port);
  }
  DDP_ASSIGN_OR_RETURN(endpoint.master_name, PercentDecode(parts[1]));
  if (parts.size() == 3) DDP_RETURN_IF_ERROR(SetDatabase(text, parts[2], endpoint));
  return endpoint;
}

// Parses an endpoint, or the part of a store address before '?'.
absl::StatusOr<RedisEndpoint> ParseWithoutQuery(const std::string& text,
                                                int default_port = RedisEndpoint::kDefaultPort) {
  RedisEndpoint endpoint;
  endpoint.port = default_port;
  if (absl::StartsWith(text, kUnixScheme)) {
    DDP_ASSIGN_OR_RETURN(const std::string path,
                         PercentDecode(text.substr(sizeof(kUnixScheme) - 1)));
    DDP_RETURN_IF_ERROR(SetUnixPath(text, path, endpoint));
    return endpoint;
  }
  if (text.find('@') != std::string::npos) {
    return absl::InvalidArgumentError(
        "a Redis endpoint must not hold a user or a password, which other users of the machine "
        "could read: set DDP_REDIS_USER and DDP_REDIS_PASSWORD_FILE (or DDP_REDIS_PASSWORD) in the "
        "environment");
  }
  if (absl::StartsWith(text, kSentinelScheme)) {
    return ParseSentinels(text, text.substr(sizeof(kSentinelScheme) - 1));
  }
  std::string authority = text;
  endpoint.tls = absl::StartsWith(text, kTlsScheme);
  if (endpoint.tls || absl::StartsWith(text, kTcpScheme)) {
    authority = text.substr(text.find("://") + 3);
    const size_t slash = authority.find('/');
    if (slash != std::string::npos) {
      const std::string database = authority.substr(slash + 1);
      if (!database.empty()) DDP_RETURN_IF_ERROR(SetDatabase(text, database, endpoint));
      authority.resize(slash);
    }
  } else if (absl::StrContains(text, "://")) {
    return Malformed(text,
                     "the scheme is none of redis://, rediss://, redis+sentinel:// and unix://");
  }
  DDP_RETURN_IF_ERROR(SetAuthority(text, authority, endpoint));
  return endpoint;
}

std::string FromEnvironment(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

// Reads the parts "NAME=VALUE" of `query`, with "&" between. `take` returns kNotFound for a name
// that it does not know.
absl::Status ReadQuery(
    const std::string& text, const std::string& query,
    const std::function<absl::Status(const std::string& name, const std::string& value)>& take) {
  for (const absl::string_view item : absl::StrSplit(query, '&', absl::SkipEmpty())) {
    const std::vector<std::string> parts = absl::StrSplit(item, absl::MaxSplits('=', 1));
    DDP_ASSIGN_OR_RETURN(const std::string value, PercentDecode(parts.size() == 2 ? parts[1] : ""));
    const absl::Status taken = take(parts[0], value);
    if (absl::IsNotFound(taken)) return Malformed(text, absl::StrCat("unknown part '", item, "'"));
    DDP_RETURN_IF_ERROR(taken);
  }
  return absl::OkStatus();
}

// Takes a part of a query that belongs to the endpoint.
absl::Status TakePart(const std::string& text, const std::string& name, const std::string& value,
                      RedisEndpoint& endpoint) {
  if (name == "database" && endpoint.is_unix()) return SetDatabase(text, value, endpoint);
  return SetTlsFile(name, value, endpoint) ? absl::OkStatus() : absl::NotFoundError(name);
}

std::string HostAndPort(const std::string& host, int port) {
  const bool v6 = host.find(':') != std::string::npos;
  return v6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

// Returns the endpoint as a URL without credentials. Sets `query` to what has no place in the path:
// the database of a unix socket, the files for TLS.
std::string EndpointUrl(const RedisEndpoint& endpoint, std::string& query) {
  if (endpoint.is_unix()) {
    if (endpoint.database != 0) query = absl::StrCat("database=", endpoint.database, "&");
    return absl::StrCat(kUnixScheme, PercentEncodeForUrl(endpoint.unix_path));
  }
  for (const auto& [name, file] : kTlsFiles) {
    const std::string& path = endpoint.*file;
    if (!path.empty()) absl::StrAppend(&query, name, "=", PercentEncodeForUrl(path), "&");
  }
  const std::string database = endpoint.database == 0 ? "" : absl::StrCat("/", endpoint.database);
  if (endpoint.is_behind_sentinels()) {
    const std::string sentinels =
        absl::StrJoin(endpoint.sentinels, ",", [](std::string* out, const auto& sentinel) {
          absl::StrAppend(out, HostAndPort(sentinel.first, sentinel.second));
        });
    return absl::StrCat(kSentinelScheme, sentinels, "/", PercentEncodeForUrl(endpoint.master_name),
                        database);
  }
  return absl::StrCat(endpoint.tls ? kTlsScheme : kTcpScheme,
                      HostAndPort(endpoint.host, endpoint.port), database);
}

}  // namespace

std::string RedisEndpoint::DebugString() const {
  std::string query;
  std::string out = EndpointUrl(*this, query);
  if (is_unix() && database != 0) absl::StrAppend(&out, " database ", database);
  out = std::string(absl::StripPrefix(out, kTcpScheme));
  if (password.empty()) return out;
  return absl::StrCat(out, " (user ", user.empty() ? "default" : user, ", with a password)");
}

absl::StatusOr<RedisEndpoint> ParseRedisEndpoint(const std::string& text, int default_port) {
  if (text.empty()) return Malformed(text, "nothing is given");
  const size_t mark = text.find('?');
  DDP_ASSIGN_OR_RETURN(RedisEndpoint endpoint,
                       ParseWithoutQuery(text.substr(0, mark), default_port));
  if (mark == std::string::npos) return endpoint;
  if (!endpoint.tls && !endpoint.is_unix()) return Malformed(text, "'?' has no place here");
  DDP_RETURN_IF_ERROR(ReadQuery(text, text.substr(mark + 1),
                                [&](const std::string& name, const std::string& value) {
                                  return TakePart(text, name, value, endpoint);
                                }));
  DDP_RETURN_IF_ERROR(CheckTlsFiles(endpoint));
  return endpoint;
}

std::string FormatRedisEndpoint(const RedisEndpoint& endpoint) {
  std::string query;
  const std::string url = EndpointUrl(endpoint, query);
  return query.empty() ? url : absl::StrCat(url, "?", absl::StripSuffix(query, "&"));
}

absl::StatusOr<std::string> ReadRedisPasswordFile(const std::string& path) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(fopen(path.c_str(), "re"), &fclose);
  std::string password(kMaxPasswordBytes + 1, '\0');
  const size_t size = file ? fread(password.data(), 1, password.size(), file.get()) : 0;
  if (!file || ferror(file.get())) {
    const std::string message =
        absl::StrCat("DDP_REDIS_PASSWORD_FILE: cannot read ", path, ": ", strerror(errno));
    if (errno == ENOENT) return absl::NotFoundError(message);
    return absl::PermissionDeniedError(message);
  }
  if (size > kMaxPasswordBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("DDP_REDIS_PASSWORD_FILE: ", path, " is too large for a password"));
  }
  password.resize(size);
  if (absl::EndsWith(password, "\n")) password.pop_back();
  if (absl::EndsWith(password, "\r")) password.pop_back();
  if (password.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("DDP_REDIS_PASSWORD_FILE: ", path, " is empty"));
  }
  return password;
}

absl::Status ApplyRedisCredentialsFromEnvironment(RedisEndpoint& endpoint) {
  const std::string user = FromEnvironment("DDP_REDIS_USER");
  std::string password = FromEnvironment("DDP_REDIS_PASSWORD");
  const std::string file = FromEnvironment("DDP_REDIS_PASSWORD_FILE");
  if (!password.empty() && !file.empty()) {
    return absl::InvalidArgumentError(
        "DDP_REDIS_PASSWORD and DDP_REDIS_PASSWORD_FILE are both set: unset one of them");
  }
  if (!file.empty()) {
    DDP_ASSIGN_OR_RETURN(password, ReadRedisPasswordFile(file));
  }
  if (!user.empty() && password.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "DDP_REDIS_USER is '", user,
        "', but there is no password: set DDP_REDIS_PASSWORD_FILE or DDP_REDIS_PASSWORD"));
  }
  if (password.empty()) return absl::OkStatus();
  endpoint.user = user;
  endpoint.password = password;
  std::error_code none;  // without a path, the file is not read again
  endpoint.password_file = file.empty() ? "" : std::filesystem::absolute(file, none).string();
  return absl::OkStatus();
}

absl::StatusOr<StoreAddress> ParseStoreAddress(const std::string& url) {
  const size_t mark = url.find('?');
  if (mark == std::string::npos ||
      !(absl::StartsWith(url, kTcpScheme) || absl::StartsWith(url, kTlsScheme) ||
        absl::StartsWith(url, kSentinelScheme) || absl::StartsWith(url, kUnixScheme))) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", url.find('@') == std::string::npos ? url : "(hidden)",
                     "' is not the address of a store: expected "
                     "redis://HOST:PORT[/DATABASE]?prefix=PREFIX or unix:///PATH?prefix=PREFIX"));
  }
  StoreAddress address;
  DDP_ASSIGN_OR_RETURN(address.endpoint, ParseWithoutQuery(url.substr(0, mark)));
  DDP_RETURN_IF_ERROR(
      ReadQuery(url, url.substr(mark + 1), [&](const std::string& name, const std::string& value) {
        if (name != "prefix") return TakePart(url, name, value, address.endpoint);
        address.prefix = value;
        return absl::OkStatus();
      }));
  DDP_RETURN_IF_ERROR(CheckTlsFiles(address.endpoint));
  if (address.prefix.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("store address '", url, "': the prefix is missing or empty"));
  }
  return address;
}

std::string FormatStoreAddress(const StoreAddress& address) {
  std::string query;
  const std::string url = EndpointUrl(address.endpoint, query);
  return absl::StrCat(url, "?", query, "prefix=", PercentEncodeForUrl(address.prefix));
}

bool SetTlsFile(absl::string_view name, const std::string& path, RedisEndpoint& endpoint) {
  for (const auto& [known, file] : kTlsFiles) {
    if (name != known) continue;
    std::error_code none;
    endpoint.*file = path.empty() ? "" : std::filesystem::absolute(path, none).string();
    return true;
  }
  return false;
}

absl::Status CheckTlsFiles(const RedisEndpoint& endpoint) {
  for (const auto& [name, file] : kTlsFiles) {
    if (!endpoint.tls && !(endpoint.*file).empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " is given, but not TLS: write the endpoint as rediss://HOST:PORT"));
    }
  }
  if (endpoint.tls_cert_file.empty() == endpoint.tls_key_file.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(endpoint.tls_key_file.empty()
                                        ? "tls_cert_file is given without tls_key_file"
                                        : "tls_key_file is given without tls_cert_file");
}

}  // namespace ddp::store
