#include "store/redis_server/private_redis_server.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/process/pidfd.h"
#include "base/unique_fd.h"
#include "gtest/gtest.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_script.h"
#include "store/redis/wire/redis_reply.h"
#include "testing/network/loopback_socket.h"

namespace ddp::store {
namespace {

constexpr int kDeadlineMs = 20'000;

bool Exists(const std::string& path) {
  struct stat info {};
  return lstat(path.c_str(), &info) == 0;
}

// A folder with mode 0700 and a short path, removed at the end.
class Folder {
 public:
  Folder() { EXPECT_NE(mkdtemp(path_), nullptr); }
  ~Folder() { EXPECT_EQ(rmdir(path_), 0) << "something was left in " << path_; }
  std::string path() const { return path_; }

 private:
  char path_[32] = "/tmp/ddp-test-XXXXXX";
};

TEST(PrivateRedisServerTest, AnswersOnItsSocketAndKeepsNothing) {
  auto server = PrivateRedisServer::Start();
  ASSERT_TRUE(server.ok()) << server.status();
  auto connection = RedisConnection::Connect((*server)->endpoint());
  ASSERT_TRUE(connection.ok()) << connection.status();
  const auto config = [&](const char* name) {
    return *(*(*(*connection)->Command({"CONFIG", "GET", name})).AsArray())[1].AsString();
  };
  EXPECT_EQ(config("port"), "0");
  EXPECT_EQ(config("appendonly"), "no");
  EXPECT_EQ(config("save"), "");
  EXPECT_EQ(config("maxmemory-policy"), "noeviction");
}

TEST(PrivateRedisServerTest, OnlyThisUserCanEnter) {
  auto server = PrivateRedisServer::Start();
  ASSERT_TRUE(server.ok()) << server.status();
  struct stat info {};
  ASSERT_EQ(stat((*server)->directory().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700U);
  ASSERT_EQ(stat((*server)->endpoint().unix_path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0077, 0U);
  ASSERT_EQ(stat(((*server)->directory() + "/redis.conf").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
}

TEST(PrivateRedisServerTest, ClientsRunTheScriptsThatItWasGivenAndTheirLoaderIsGone) {
  PrivateRedisServer::Options options;
  options.scripts = {RedisScript("return 1"), RedisScript("return {KEYS[1], ARGV[1]}")};
  options.extra_config = {"bind 127.0.0.1"};
  absl::StatusOr<std::unique_ptr<PrivateRedisServer>> server = absl::UnavailableError("");
  RedisEndpoint endpoint;
  endpoint.host = "127.0.0.1";
  for (int attempt = 0; attempt < 10 && absl::IsUnavailable(server.status()); ++attempt) {
    options.port = endpoint.port =
        testing::BindLoopback().port;  // another program may take the port first
    server = PrivateRedisServer::Start(options);
  }
  ASSERT_TRUE(server.ok()) << server.status();
  auto connection = RedisConnection::Connect(endpoint);
  ASSERT_TRUE(connection.ok()) << connection.status();
  for (const RedisScript& script : options.scripts) {
    const auto ran = (*connection)->Command({"EVALSHA", script.sha1_hex(), "1", "k", "v"});
    EXPECT_TRUE(ran.ok()) << ran.status();
  }
  const auto reply = (*connection)->Command({"ACL", "LIST"});
  ASSERT_TRUE(reply.ok()) << reply.status();
  int starters = 0;
  const auto users = *reply->AsArray();
  for (const RedisReply& user : users) {
    const std::string rules = *user.AsString();
    if (!absl::StartsWith(rules, "user ddp-start-")) continue;
    ++starters;
    EXPECT_TRUE(absl::StrContains(rules, " off ")) << rules;
    EXPECT_FALSE(absl::StrContains(rules, "#")) << "a password: " << rules;
    EXPECT_FALSE(absl::StrContains(rules, "+")) << rules;
  }
  EXPECT_EQ(starters, 1);
}

TEST(PrivateRedisServerTest, APortThatIsTakenIsUnavailable) {
  const testing::LoopbackSocket other = testing::ListenOnLoopback();
  PrivateRedisServer::Options options;
  options.extra_config = {"bind 127.0.0.1"};
  options.port = other.port;
  const absl::Status status = PrivateRedisServer::Start(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat(options.port))) << status;
}

TEST(PrivateRedisServerTest, StopLeavesNothingBehind) {
  auto server = PrivateRedisServer::Start();
  ASSERT_TRUE(server.ok()) << server.status();
  const pid_t pid = (*server)->pid();
  const std::string directory = (*server)->directory();
  (*server)->Stop();
  (*server)->Stop();
  EXPECT_EQ(kill(pid, 0), -1);
  EXPECT_FALSE(Exists(directory));
}

TEST(PrivateRedisServerTest, UsesAndEmptiesAGivenFolder) {
  const Folder folder;
  PrivateRedisServer::Options options;
  options.directory = folder.path();
  auto server = PrivateRedisServer::Start(options);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ((*server)->endpoint().unix_path, folder.path() + "/redis.sock");
  EXPECT_EQ(PrivateRedisServer::Start(options).status().code(),
            absl::StatusCode::kFailedPrecondition)
      << "the socket is in use";
}

TEST(PrivateRedisServerTest, LivesInASessionOfItsOwn) {
  auto server = PrivateRedisServer::Start();
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ(getsid((*server)->pid()), (*server)->pid());
}

TEST(PrivateRedisServerTest, SignalsBlockedInTheCallerReachTheServer) {
  sigset_t blocked;
  sigset_t before;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  sigprocmask(SIG_BLOCK, &blocked, &before);
  auto server = PrivateRedisServer::Start();
  sigprocmask(SIG_SETMASK, &before, nullptr);
  ASSERT_TRUE(server.ok()) << server.status();
  kill((*server)->pid(), SIGTERM);
  pollfd ended{.fd = (*server)->exit_fd(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&ended, 1, kDeadlineMs), 1);
}

TEST(PrivateRedisServerTest, DiesWithAKilledOwner) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  UniqueFd from_owner(ends[0]);
  UniqueFd to_us(ends[1]);
  const Folder folder;
  const pid_t owner = fork();
  if (owner == 0) {
    PrivateRedisServer::Options options;
    options.directory = folder.path();
    auto server = PrivateRedisServer::Start(options);
    const pid_t pid = server.ok() ? (*server)->pid() : -1;
    (void)!write(to_us.get(), &pid, sizeof(pid));
    pause();
    _exit(1);
  }
  to_us.reset();
  pid_t pid = -1;
  ASSERT_EQ(read(from_owner.get(), &pid, sizeof(pid)), static_cast<ssize_t>(sizeof(pid)));
  ASSERT_GT(pid, 0);
  const UniqueFd server = OpenPidfd(pid);
  ASSERT_TRUE(server.valid());
  kill(owner, SIGKILL);
  waitpid(owner, nullptr, 0);
  pollfd ended{.fd = server.get(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&ended, 1, kDeadlineMs), 1);
  // ddprun's keeper removes these files in a real job.
  for (const char* name : {"redis.sock", "redis.conf", "redis.log"}) {
    unlink((folder.path() + "/" + name).c_str());
  }
}

TEST(PrivateRedisServerTest, SaysWhatToInstall) {
  PrivateRedisServer::Options options;
  options.redis_server = "redis-server-that-is-not-there";
  const absl::Status status = PrivateRedisServer::Start(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(status.message(), "install redis-server")) << status;
}

TEST(PrivateRedisServerTest, QuotesAServerThatEndsAtItsStart) {
  PrivateRedisServer::Options options;
  options.extra_config = {"no-such-setting 1"};
  const absl::Status status = PrivateRedisServer::Start(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(status.message(), "no-such-setting")) << status;
}

TEST(PrivateRedisServerTest, GivesUpOnAServerThatNeverAnswers) {
  const Folder folder;
  const std::string program = folder.path() + "/mute";
  FILE* file = fopen(program.c_str(), "w");
  fputs("#!/bin/sh\nexec cat /dev/zero > /dev/null\n", file);
  fclose(file);
  chmod(program.c_str(), 0700);
  PrivateRedisServer::Options options;
  options.redis_server = program;
  options.start_timeout = absl::Milliseconds(50);
  const absl::Status status = PrivateRedisServer::Start(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  unlink(program.c_str());
}

TEST(PrivateRedisServerTest, RefusesFoldersThatOthersCanEnterOrThatAreTooDeep) {
  const Folder folder;
  PrivateRedisServer::Options options;
  options.directory = folder.path();
  chmod(folder.path().c_str(), 0755);
  EXPECT_EQ(PrivateRedisServer::Start(options).status().code(),
            absl::StatusCode::kFailedPrecondition);
  options.directory = "/tmp/" + std::string(120, 'd');
  EXPECT_EQ(PrivateRedisServer::Start(options).status().code(), absl::StatusCode::kInvalidArgument);
  options.directory = "/tmp/ddp-no-such-folder";
  EXPECT_EQ(PrivateRedisServer::Start(options).status().code(), absl::StatusCode::kNotFound);
}

TEST(PrivateRedisServerTest, AvoidsATemporaryFolderThatIsTooDeep) {
  const char* before = getenv("TMPDIR");
  const std::string saved = before == nullptr ? "" : before;
  setenv("TMPDIR", ("/" + std::string(120, 'd')).c_str(), 1);
  auto server = PrivateRedisServer::Start();
  if (before == nullptr) {
    unsetenv("TMPDIR");
  } else {
    setenv("TMPDIR", saved.c_str(), 1);
  }
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_TRUE(absl::StartsWith((*server)->directory(), "/tmp/ddp-redis-"));
}

}  // namespace
}  // namespace ddp::store
