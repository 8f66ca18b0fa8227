#include "testing/redis/sentinels.h"

#include <fcntl.h>
#include <glog/logging.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "store/redis/redis_connection.h"
#include "testing/network/loopback_socket.h"

namespace ddp::testing {
namespace {

constexpr int kSentinels = 3;
constexpr char kMaster[] = "ddp";
constexpr absl::Duration kLong = absl::Seconds(60);
constexpr int kLookMs = 20;

store::RedisEndpoint AtPort(int port) {
  store::RedisEndpoint endpoint;
  endpoint.host = "127.0.0.1";
  endpoint.port = port;
  return endpoint;
}

// Returns the reply's text, or the error's.
std::string Ask(const store::RedisEndpoint& server, const std::vector<std::string>& command) {
  const auto connection = store::RedisConnection::Connect(server);
  if (!connection.ok()) return connection.status().ToString();
  const auto reply = (*connection)->Command(command);
  if (!reply.ok()) return reply.status().ToString();
  return reply->DebugString();
}

std::string Info(const store::RedisEndpoint& server, const char* section) {
  const auto connection = store::RedisConnection::Connect(server);
  const auto reply = connection.ok() ? (*connection)->Command({"INFO", section})
                                     : absl::StatusOr<store::RedisReply>(connection.status());
  return reply.ok() ? *reply->AsString() : "";
}

}  // namespace

Sentinels::Sentinels()
    : folder_("/tmp/ddp-sentinels-XXXXXX"),
      master_(RedisFixture::StartTcp()),
      replica_(RedisFixture::StartTcp()) {
  CHECK(mkdtemp(folder_.data()) != nullptr) << "cannot make a folder in /tmp";
  for (const auto* server : {&master_, &replica_}) {
    Ask((*server)->endpoint(), {"CONFIG", "SET", "repl-diskless-sync-delay", "0"});
  }
  Ask(replica_->endpoint(), {"REPLICAOF", "127.0.0.1", absl::StrCat(master_->endpoint().port)});
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + kLong;
  while (!absl::StrContains(Info(replica_->endpoint(), "replication"), "master_link_status:up")) {
    CHECK(clock.Now() < deadline) << "the replica does not reach its master";
    poll(nullptr, 0, kLookMs);
  }
  endpoint_.master_name = kMaster;
  for (int i = 0; i < kSentinels; ++i) {
    const int port = BindLoopback().port;
    StartSentinel(port);
    endpoint_.sentinels.emplace_back("127.0.0.1", port);
  }
  while (!AllKnowAll()) {
    CHECK(clock.Now() < deadline) << "the sentinels do not find each other";
    poll(nullptr, 0, kLookMs);
  }
}

Sentinels::~Sentinels() {
  for (const pid_t pid : sentinels_) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  std::error_code none;
  std::filesystem::remove_all(folder_, none);
}

void Sentinels::StartSentinel(int port) {
  const std::string path = absl::StrCat(folder_, "/", port, ".conf");
  std::ofstream(path) << "bind 127.0.0.1\nport " << port << "\ndir " << folder_
                      << "\nsentinel monitor " << kMaster << " 127.0.0.1 "
                      << master_->endpoint().port << " 2\nsentinel down-after-milliseconds "
                      << kMaster << " 300\nsentinel failover-timeout " << kMaster << " 3000\n";
  const pid_t parent = getpid();
  const pid_t pid = fork();
  CHECK(pid >= 0) << "fork";
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    dup2(null, STDOUT_FILENO);
    execlp("redis-server", "redis-server", path.c_str(), "--sentinel", nullptr);
    _exit(127);
  }
  sentinels_.push_back(pid);
}

bool Sentinels::AllKnowAll() const {
  for (const auto& [host, port] : endpoint_.sentinels) {
    // master0:name=ddp,status=ok,address=127.0.0.1:1,slaves=1,sentinels=3
    if (!absl::StrContains(Info(AtPort(port), "sentinel"), "status=ok,address=127.0.0.1:") ||
        !absl::StrContains(Info(AtPort(port), "sentinel"), ",slaves=1,sentinels=3")) {
      return false;
    }
  }
  return true;
}

void Sentinels::FailOver() {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + kLong;
  // Right after the beginning, a sentinel may not know yet that the replica is a good one.
  while (!absl::StrContains(
      Ask(AtPort(endpoint_.sentinels[0].second), {"SENTINEL", "FAILOVER", kMaster}), "OK")) {
    CHECK(clock.Now() < deadline) << "no sentinel makes the replica the master";
    poll(nullptr, 0, kLookMs);
  }
}

}  // namespace ddp::testing
