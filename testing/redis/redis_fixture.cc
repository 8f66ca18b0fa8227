#include "testing/redis/redis_fixture.h"

#include <glog/logging.h>
#include <stdlib.h>
#include <unistd.h>

#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "testing/network/loopback_socket.h"

namespace ddp::testing {
namespace {

constexpr int kPortAttempts = 20;

std::string MakeFolder() {
  char path[] = "/tmp/ddp-redis-test-XXXXXX";
  CHECK(mkdtemp(path) != nullptr) << "cannot make a folder in /tmp";
  return path;
}

}  // namespace

RedisFixture::RedisFixture(const std::string& directory) : directory_(directory) {}

RedisFixture::~RedisFixture() {
  server_.reset();
  rmdir(directory_.c_str());
}

std::unique_ptr<RedisFixture> RedisFixture::Start() {
  std::unique_ptr<RedisFixture> fixture(new RedisFixture(MakeFolder()));
  fixture->Restart();
  fixture->endpoint_ = fixture->server_->endpoint();
  return fixture;
}

std::unique_ptr<RedisFixture> RedisFixture::StartTcp(const std::string& password) {
  std::unique_ptr<RedisFixture> fixture(new RedisFixture(MakeFolder()));
  fixture->endpoint_.password = password;
  std::vector<std::string> config;
  if (!password.empty()) config.push_back(absl::StrCat("requirepass ", password));
  config.push_back("port ");
  fixture->StartAtFreePort(config);
  return fixture;
}

std::unique_ptr<RedisFixture> RedisFixture::StartTls(const TlsCertificates& certificates,
                                                     bool asks_clients) {
  std::unique_ptr<RedisFixture> fixture(new RedisFixture(MakeFolder()));
  fixture->endpoint_.tls = true;
  fixture->endpoint_.tls_ca_cert_file = certificates.ca();
  if (asks_clients) {
    fixture->endpoint_.tls_cert_file = certificates.client_cert();
    fixture->endpoint_.tls_key_file = certificates.client_key();
  }
  fixture->StartAtFreePort({absl::StrCat("tls-ca-cert-file ", certificates.ca()),
                            absl::StrCat("tls-cert-file ", certificates.server_cert()),
                            absl::StrCat("tls-key-file ", certificates.server_key()),
                            absl::StrCat("tls-auth-clients ", asks_clients ? "yes" : "no"),
                            "tls-port "});
  return fixture;
}

void RedisFixture::StartAtFreePort(const std::vector<std::string>& config) {
  endpoint_.host = "127.0.0.1";
  absl::Status last;
  for (int attempt = 0; attempt < kPortAttempts; ++attempt) {
    // redis-server cannot choose a port itself. Another program may take this one first.
    endpoint_.port = BindLoopback().port;
    config_ = {"bind 127.0.0.1"};
    config_.insert(config_.end(), config.begin(), config.end());
    absl::StrAppend(&config_.back(), endpoint_.port);
    store::PrivateRedisServer::Options options;
    options.directory = directory_;
    options.extra_config = config_;
    auto server = store::PrivateRedisServer::Start(options);
    if (server.ok()) {
      server_ = *std::move(server);
      return;
    }
    last = server.status();
  }
  LOG(FATAL) << "no redis-server on any of " << kPortAttempts << " ports: " << last;
}

std::unique_ptr<RedisFixture> RedisFixture::StartTcpAt(const std::string& address, int port) {
  std::unique_ptr<RedisFixture> fixture(new RedisFixture(MakeFolder()));
  fixture->endpoint_.host = address;
  fixture->endpoint_.port = port;
  fixture->config_ = {absl::StrCat("bind ", address), absl::StrCat("port ", port)};
  fixture->Restart();
  return fixture;
}

void RedisFixture::Kill() {
  if (server_ != nullptr) server_->Stop();
}

void RedisFixture::Restart() {
  Kill();
  store::PrivateRedisServer::Options options;
  options.directory = directory_;
  options.extra_config = config_;
  auto server = store::PrivateRedisServer::Start(options);
  CHECK(server.ok()) << server.status();
  server_ = *std::move(server);
}

store::RedisEndpoint RedisFixture::SocketEndpoint() const {
  store::RedisEndpoint endpoint = server_->endpoint();
  endpoint.password = endpoint_.password;
  return endpoint;
}

std::string RedisFixture::ServerVersion() const {
  const std::string text = Info("server");
  const std::string label = "redis_version:";
  const size_t at = text.find(label);
  CHECK_NE(at, std::string::npos) << text;
  return text.substr(at + label.size(), text.find("\r\n", at) - at - label.size());
}

std::string RedisFixture::Info(const std::string& section) const {
  auto reply = Connect()->Command({"INFO", section});
  CHECK(reply.ok()) << reply.status();
  return *std::move(*reply).AsString();
}

store::StoreAddress RedisFixture::Address(const std::string& name) const {
  return {endpoint_, absl::StrCat("ddp:{", name, "}:i0:g1.0:store:")};
}

std::unique_ptr<store::RedisConnection> RedisFixture::Connect() const {
  auto connection = store::RedisConnection::Connect(endpoint_);
  CHECK(connection.ok()) << connection.status();
  return *std::move(connection);
}

std::map<std::string, int64_t> RedisFixture::CommandCalls() const {
  const std::string text = Info("commandstats");
  std::map<std::string, int64_t> calls;
  for (absl::string_view line : absl::StrSplit(text, "\r\n")) {
    // cmdstat_hget:calls=3,usec=...
    const std::vector<std::string> parts = absl::StrSplit(line, absl::ByAnyChar("_:=,"));
    int64_t count = 0;
    if (parts.size() > 3 && parts[0] == "cmdstat" && absl::SimpleAtoi(parts[3], &count)) {
      calls[parts[1]] = count;
    }
  }
  return calls;
}

}  // namespace ddp::testing
