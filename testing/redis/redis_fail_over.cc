#include "testing/redis/redis_fail_over.h"

#include <glog/logging.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <unistd.h>

#include <fstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace ddp::testing {
namespace {

constexpr char kName[] = "redis.fail-over.test";
constexpr char kFirstAddress[] = "127.0.0.1";
constexpr char kSecondAddress[] = "127.0.0.2";

std::string MakeFolder() {
  char path[] = "/tmp/ddp-fail-over-XXXXXX";
  CHECK(mkdtemp(path) != nullptr) << "cannot make a folder in /tmp";
  return path;
}

}  // namespace

RedisFailOver::RedisFailOver()
    : folder_(MakeFolder()),
      first_server_(RedisFixture::StartTcp()),
      second_server_(RedisFixture::StartTcpAt(kSecondAddress, first_server_->endpoint().port)),
      first_(first_server_->Connect()),
      second_(second_server_->Connect()) {
  AskFirst({"CONFIG", "SET", "repl-diskless-sync-delay", "0"});
  AskSecond({"CONFIG", "SET", "repl-diskless-sync-delay", "0"});
  const std::string port = absl::StrCat(first_server_->endpoint().port);
  AskSecond({"REPLICAOF", kFirstAddress, port});
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + absl::Seconds(30);
  while (!absl::StrContains(AskSecond({"INFO", "replication"}), "master_link_status:up")) {
    CHECK(clock.Now() < deadline) << "the replica does not reach its master";
  }
  if (MountHosts()) {
    endpoint_.host = kName;
    endpoint_.port = first_server_->endpoint().port;
  } else {
    endpoint_.unix_path = absl::StrCat(folder_, "/redis.sock");
  }
  PointTo(kFirstAddress, *first_server_);
}

RedisFailOver::~RedisFailOver() {
  if (has_host_name()) umount2("/etc/hosts", MNT_DETACH);
  unlink(absl::StrCat(folder_, "/hosts").c_str());
  unlink(absl::StrCat(folder_, "/redis.sock").c_str());
  rmdir(folder_.c_str());
}

bool RedisFailOver::MountHosts() {
  const std::string hosts = absl::StrCat(folder_, "/hosts");
  std::ofstream(hosts) << "127.0.0.1 localhost\n";
  return unshare(CLONE_NEWNS) == 0 &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount(hosts.c_str(), "/etc/hosts", nullptr, MS_BIND, nullptr) == 0;
}

void RedisFailOver::WriteHosts(const std::vector<std::string>& addresses) {
  std::ofstream hosts(absl::StrCat(folder_, "/hosts"));
  hosts << "127.0.0.1 localhost\n";
  for (const std::string& address : addresses) hosts << address << " " << kName << "\n";
}

void RedisFailOver::PointTo(const std::string& address, const RedisFixture& server) {
  if (has_host_name()) return WriteHosts({address});
  unlink(endpoint_.unix_path.c_str());
  const std::string socket = server.SocketEndpoint().unix_path;
  PCHECK(symlink(socket.c_str(), endpoint_.unix_path.c_str()) == 0);
}

void RedisFailOver::ChangeRoles() {
  AskSecond({"REPLICAOF", "NO", "ONE"});
  AskFirst({"REPLICAOF", kSecondAddress, absl::StrCat(first_server_->endpoint().port)});
}

void RedisFailOver::MoveName() { PointTo(kSecondAddress, *second_server_); }

void RedisFailOver::NameBoth() {
  CHECK(has_host_name());
  WriteHosts({kFirstAddress, kSecondAddress});
}

std::string RedisFailOver::Ask(store::RedisConnection& connection,
                               const std::vector<std::string>& command) {
  const auto reply = connection.Command(command);
  CHECK(reply.ok()) << reply.status();
  const auto text = reply->AsString();
  return text.ok() ? *text : reply->DebugString();
}

}  // namespace ddp::testing
