// Length: nearly all cases share the fixture, which starts endpoint servers.

#include "launcher/meeting/endpoint_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <atomic>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "elastic/rendezvous/rendezvous_scripts.h"
#include "launcher/meeting/network_server.h"
#include "launcher/process/private_folder.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_script.h"
#include "store/redis_store/redis_key_value_store.h"
#include "store/tcp_store/tcp_store_server.h"

namespace ddp::launcher {
namespace {

using Guard = std::unique_ptr<ServerGuard>;

constexpr absl::Duration kLong = absl::Seconds(60);

// A stand-in for redis-server while this object lives: it answers nothing, and ends when a line is
// written to pipe().
class SilentRedis {
 public:
  SilentRedis() {
    EXPECT_EQ(mkfifo(pipe().c_str(), 0700), 0);
    const std::string program = folder_ + "/redis-server";
    std::ofstream(program) << "#!/bin/sh\nread line < " << pipe() << "\n";
    EXPECT_EQ(chmod(program.c_str(), 0755), 0);
    setenv("PATH", absl::StrCat(folder_, ":", path_).c_str(), 1);
  }
  ~SilentRedis() {
    Uninstall();
    EXPECT_TRUE(RemoveFolder(folder_).ok());
  }
  SilentRedis(const SilentRedis&) = delete;
  SilentRedis& operator=(const SilentRedis&) = delete;

  std::string pipe() const { return folder_ + "/pipe"; }

  // Ends the stand-in: the real redis-server is started from then on.
  void Uninstall() { setenv("PATH", path_.c_str(), 1); }

 private:
  const std::string folder_ = *MakePrivateFolder("ddp-test-");
  const std::string path_ = getenv("PATH");
};

class EndpointServerTest : public ::testing::Test {
 protected:
  EndpointServerTest() : folder_(*MakePrivateFolder("ddp-test-")) {}
  ~EndpointServerTest() override { EXPECT_TRUE(RemoveFolder(folder_).ok()); }

  // Returns an endpoint where no server listens now.
  static store::RedisEndpoint FreeEndpoint(const std::string& address = "127.0.0.1") {
    store::RedisEndpoint endpoint;
    endpoint.host = address;
    endpoint.port = *FreePort(address);
    return endpoint;
  }

  // Starts a server at `endpoint` with a free port. Another program may take the port first.
  Guard StartAt(store::RedisEndpoint& endpoint) {
    for (int attempt = 0; attempt < 10; ++attempt) {
      endpoint.port = *FreePort(endpoint.host);
      auto server = StartServerIfOurs(endpoint, folder_, kLong);
      EXPECT_TRUE(server.ok()) << server.status();
      if (server.ok() && *server != nullptr) return *std::move(server);
    }
    ADD_FAILURE() << "no free port";
    return nullptr;
  }

  static absl::Status TryConnect(const store::RedisEndpoint& endpoint) {
    return store::RedisConnection::Connect(endpoint, {.total_timeout = absl::Seconds(5)}).status();
  }

  // Stops the loop once `doomed` is true.
  static void StopWhenDoomed(EventLoop& loop, const std::atomic<bool>& doomed) {
    if (doomed) return loop.Stop();
    loop.AddTimer(absl::Milliseconds(1), [&] { StopWhenDoomed(loop, doomed); });
  }

  const std::string folder_;
};

TEST_F(EndpointServerTest, StartsWhereNobodyHasOnThatAddressOnly) {
  store::RedisEndpoint endpoint = FreeEndpoint("127.0.0.5");
  const Guard server = StartAt(endpoint);
  ASSERT_NE(server, nullptr);
  EXPECT_EQ(server->endpoint(), endpoint);
  EXPECT_TRUE(TryConnect(endpoint).ok());
  store::RedisEndpoint elsewhere = endpoint;
  elsewhere.host = "127.0.0.6";
  EXPECT_TRUE(absl::IsUnavailable(
      store::RedisConnection::Connect(elsewhere, {.total_timeout = absl::ZeroDuration()})
          .status()));
}

TEST_F(EndpointServerTest, TheSecondUsesTheFirstOnes) {
  store::RedisEndpoint endpoint = FreeEndpoint();
  const Guard server = StartAt(endpoint);
  ASSERT_NE(server, nullptr);
  const std::string other_folder = *MakePrivateFolder("ddp-test-");
  const auto second = StartServerIfOurs(endpoint, other_folder, kLong);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(*second, nullptr);
  EXPECT_TRUE(RemoveFolder(other_folder).ok());
}

TEST_F(EndpointServerTest, OfTwoAtOnceOneHasIt) {
  for (int round = 0; round < 3; ++round) {
    const store::RedisEndpoint endpoint = FreeEndpoint("127.0.0.7");
    std::vector<std::string> folders;
    std::vector<std::promise<Guard>> started(4);
    // A server ends with the thread that started it.
    std::promise<void> end;
    const std::shared_future<void> ended = end.get_future().share();
    std::vector<std::thread> agents;
    for (auto& promise : started) {
      folders.push_back(*MakePrivateFolder("ddp-test-"));
      agents.emplace_back([&promise, &endpoint, ended, folder = folders.back()] {
        auto server = StartServerIfOurs(endpoint, folder, kLong);
        EXPECT_TRUE(server.ok()) << server.status();
        promise.set_value(server.ok() ? *std::move(server) : nullptr);
        ended.wait();
      });
    }
    std::vector<Guard> guards;
    int owners = 0;
    for (auto& promise : started) {
      guards.push_back(promise.get_future().get());
      owners += guards.back() != nullptr;
    }
    EXPECT_EQ(owners, 1);
    EXPECT_TRUE(TryConnect(endpoint).ok());
    guards.clear();
    end.set_value();
    for (std::thread& agent : agents) agent.join();
    for (const std::string& folder : folders) EXPECT_TRUE(RemoveFolder(folder).ok());
  }
}

TEST_F(EndpointServerTest, OtherMachinesAddressesAndSocketsAreNotOurs) {
  store::RedisEndpoint endpoint;
  endpoint.host = "192.0.2.1";  // an address reserved for documentation
  const auto other = StartServerIfOurs(endpoint, folder_, kLong);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(*other, nullptr);
  endpoint = {};
  endpoint.unix_path = "/tmp/ddp-no-such.sock";
  const auto socket = StartServerIfOurs(endpoint, folder_, kLong);
  ASSERT_TRUE(socket.ok()) << socket.status();
  EXPECT_EQ(*socket, nullptr);
}

// With this sysctl every node can bind the address, and each would start a server.
TEST_F(EndpointServerTest, AnAddressThatCanBeBoundIsNotOursForThat) {
  std::thread([] {
    constexpr char kSysctl[] = "/proc/sys/net/ipv4/ip_nonlocal_bind";
    if (unshare(CLONE_NEWNET) != 0 || !(std::ofstream(kSysctl) << "1" << std::flush)) {
      GTEST_SKIP() << "needs a network namespace with the sysctl";
    }
    const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    ASSERT_EQ(inet_pton(AF_INET, "192.0.2.1", &address.sin_addr), 1);
    ASSERT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    const auto probe = ProbeBind("192.0.2.1", 0);
    ASSERT_TRUE(probe.ok()) << probe.status();
    EXPECT_THAT(probe->ours, ::testing::IsEmpty());
  }).join();
  EXPECT_THAT(ProbeBind("127.0.0.2", 0)->ours, ::testing::ElementsAre("127.0.0.2"))
      << "a loopback interface has its whole network";
}

TEST_F(EndpointServerTest, WhatCannotBeIsSaidInOneLine) {
  store::RedisEndpoint endpoint = FreeEndpoint();
  endpoint.host = "0.0.0.0";
  const auto wildcard = StartServerIfOurs(endpoint, folder_, kLong);
  EXPECT_TRUE(absl::IsInvalidArgument(wildcard.status())) << wildcard.status();
  endpoint.host = "no-such-host.invalid";
  const auto name = StartServerIfOurs(endpoint, folder_, absl::ZeroDuration());
  EXPECT_TRUE(absl::IsDeadlineExceeded(name.status())) << name.status();
  EXPECT_NE(name.status().message().find("--rdzv-endpoint=no-such-host.invalid"),
            std::string::npos);
  EXPECT_TRUE(absl::IsDeadlineExceeded(AwaitEndpointName(endpoint, absl::ZeroDuration())));
  endpoint.host = "localhost";
  EXPECT_TRUE(AwaitEndpointName(endpoint, absl::ZeroDuration()).ok());
}

TEST_F(EndpointServerTest, WithoutRedisInstalledSaysSo) {
  const store::RedisEndpoint endpoint = FreeEndpoint();
  const std::string path = getenv("PATH");
  setenv("PATH", folder_.c_str(), 1);
  const auto server = StartServerIfOurs(endpoint, folder_, kLong);
  setenv("PATH", path.c_str(), 1);
  EXPECT_TRUE(absl::IsNotFound(server.status())) << server.status();
  for (const char* part : {"--rdzv-endpoint=127.0.0.1:", "install redis-server", "this node"}) {
    EXPECT_NE(server.status().message().find(part), std::string::npos) << server.status();
  }
}

TEST_F(EndpointServerTest, AllAddressesOfANameAreServed) {
  store::RedisEndpoint endpoint = FreeEndpoint("localhost");
  const Guard server = StartAt(endpoint);
  ASSERT_NE(server, nullptr);
  const auto probe = ProbeBind("localhost", endpoint.port);
  ASSERT_TRUE(probe.ok());
  EXPECT_TRUE(probe->ours.empty()) << probe->ours[0] << " is free";
  EXPECT_TRUE(TryConnect(endpoint).ok());
}

TEST_F(EndpointServerTest, SaysWhereItIsAsAPersonTypesIt) {
  const auto probe = ProbeBind("::1", 0);
  if (!probe.ok() || probe->ours.empty()) GTEST_SKIP() << "this machine has no IPv6";
  store::RedisEndpoint endpoint = FreeEndpoint("::1");
  endpoint.password = "secret";
  ::testing::internal::CaptureStderr();
  const Guard server = StartAt(endpoint);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, ::testing::HasSubstr(
                        absl::StrCat("started Redis at [::1]:", endpoint.port, " on this node")));
  EXPECT_THAT(said, ::testing::Not(::testing::HasSubstr("secret")));
}

TEST_F(EndpointServerTest, NobodyReadsOrChangesTheServer) {
  store::RedisEndpoint endpoint = FreeEndpoint();
  const Guard server = StartAt(endpoint);
  const auto connection = store::RedisConnection::Connect(endpoint, {.total_timeout = kLong});
  ASSERT_TRUE(connection.ok()) << connection.status();
  const auto refused = [&](const std::vector<std::string>& command) {
    const auto reply = (*connection)->Command(command);
    const std::string why(reply.status().message());
    // Redis has three texts for a refusal.
    for (const char* text : {"NOPERM", "command not allowed", "The user executing the script"}) {
      if (why.find(text) != std::string::npos) return true;
    }
    return false;
  };
  for (const std::vector<std::string>& command : std::vector<std::vector<std::string>>{
           {"CONFIG", "GET", "*"},
           {"CONFIG", "SET", "dir", "/tmp"},
           {"MODULE", "LOAD", "/tmp/x.so"},
           {"DEBUG", "SLEEP", "0"},
           {"SAVE"},
           {"BGSAVE"},
           {"SHUTDOWN", "NOSAVE"},
           {"FLUSHALL"},
           {"FLUSHDB"},
           {"KEYS", "*"},
           {"SCAN", "0"},
           {"ACL", "LIST"},
           {"MONITOR"},
           {"CLIENT", "LIST"},
           {"CLIENT", "KILL", "TYPE", "normal"},
           {"SCRIPT", "FLUSH"},
           {"SCRIPT", "KILL"},
           {"SCRIPT", "LOAD", "return 1"},
           {"SCRIPT", "EXISTS", "e0e1f9fabfc9d4800c877a703b823ac0578ff8db"},
           {"EVAL", "return 1", "0"},
           {"EVAL_RO", "return 1", "0"},
           {"FUNCTION", "LOAD", "#!lua name=x\nredis.register_function('f', function() end)"},
           {"FCALL", "f", "0"},
           {"ACL", "SETUSER", "default", "+@all"},
           {"SLAVEOF", "127.0.0.1", "1"},
           {"REPLICAOF", "127.0.0.1", "1"},
           {"MIGRATE", "127.0.0.1", "1", "ddp:k", "0", "1"},
           {"SET", "other", "v"},
           {"GET", "other"},
           {"PUBLISH", "other", "v"},
           {"EVAL", "return redis.call('SET', 'other', 'v')", "0"},
           {"EVAL", "return redis.call('FLUSHALL')", "0"},
       }) {
    EXPECT_TRUE(refused(command)) << command[0] << ": " << (*connection)->Command(command).status();
  }
  EXPECT_TRUE((*connection)->Command({"SET", "ddp:{job}:k", "v"}).ok());
  const absl::Status foreign = (*connection)->Eval(store::RedisScript("return 7"), {}, {}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(foreign)) << foreign;
  EXPECT_THAT(std::string(foreign.message()),
              ::testing::HasSubstr("of all nodes from one version"));
}

// The scripts of the rendezvous and of the workers' store, called by their hashes alone.
TEST_F(EndpointServerTest, KnowsTheScriptsOfJobsAlsoAfterItWasReplaced) {
  store::RedisEndpoint endpoint = FreeEndpoint("127.0.0.8");
  const auto loop = *EventLoop::Create();  // outlives the guard
  const Guard server = StartAt(endpoint);
  std::vector<store::RedisScript> scripts = store::KeyValueScripts();
  const elastic::RendezvousScripts rendezvous;
  for (int i = 0; i < elastic::kScriptCount; ++i) {
    scripts.push_back(rendezvous[static_cast<elastic::ScriptName>(i)]);
  }
  const auto expect_known = [&] {
    const auto connection = store::RedisConnection::Connect(endpoint, {.total_timeout = kLong});
    ASSERT_TRUE(connection.ok()) << connection.status();
    for (const store::RedisScript& script : scripts) {
      // Without its keys and arguments the script fails, but not because the server does not know
      // it.
      const auto reply = (*connection)->Command({"EVALSHA", script.sha1_hex(), "1", "ddp:{job}:k"});
      EXPECT_FALSE(absl::IsNotFound(reply.status())) << reply.status();
    }
  };
  expect_known();
  ServerGuard::Hooks hooks;
  hooks.on_replaced = [&](pid_t) { loop->Stop(); };
  hooks.say = [](const std::string&) {};
  ASSERT_TRUE(server->Watch(loop.get(), hooks).ok());
  ASSERT_EQ(kill(server->pid(), SIGKILL), 0);
  loop->AddTimer(kLong, [&] { loop->Stop(); });
  ASSERT_TRUE(loop->Run().ok());
  expect_known();
}

TEST_F(EndpointServerTest, SaysWhetherAPasswordGuardsIt) {
  for (const bool guarded : {true, false}) {
    store::RedisEndpoint endpoint = FreeEndpoint();
    if (guarded) endpoint.password = "secret";
    ::testing::internal::CaptureStderr();
    const Guard server = StartAt(endpoint);
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(said, ::testing::HasSubstr(guarded ? "guarded by the password in DDP_REDIS_PASSWORD"
                                                   : "without a password (DDP_REDIS_PASSWORD)"));
  }
}

TEST_F(EndpointServerTest, TheWorkersStoreFindsAllItsCommands) {
  store::RedisEndpoint endpoint = FreeEndpoint();
  const Guard server = StartAt(endpoint);
  const auto opened = store::RedisKeyValueStore::Connect(
      {.endpoint = endpoint, .prefix = "ddp:{job}:i1:g1.x:store:"}, {});
  ASSERT_TRUE(opened.ok()) << opened.status();
  store::RedisKeyValueStore& kv = **opened;
  EXPECT_TRUE(kv.Set("k", "1", kLong).ok());
  auto late = std::async(std::launch::async, [&] { return kv.Get("late", kLong); });
  auto all = std::async(std::launch::async, [&] { return kv.Wait({"k", "late", "x"}, kLong); });
  EXPECT_TRUE(kv.MultiSet({"late", "x"}, {"v", "y"}, kLong).ok());
  const auto got = late.get();
  EXPECT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(all.get().ok());
  EXPECT_EQ(*kv.Add("n", 2, kLong), 2);
  EXPECT_EQ(*kv.CompareSet("k", "1", "2", kLong), "2");
  EXPECT_TRUE(kv.Append("k", "3", kLong).ok());
  EXPECT_EQ(*kv.MultiGet({"k", "x"}, kLong), (std::vector<std::string>{"23", "y"}));
  EXPECT_TRUE(*kv.Check({"k"}, kLong));
  EXPECT_TRUE(*kv.Delete("k", kLong));
  EXPECT_TRUE(kv.QueuePush("q", "e", kLong).ok());
  EXPECT_EQ(*kv.QueueLength("q", kLong), 1);
  EXPECT_EQ(*kv.QueuePop("q", kLong), "e");
  EXPECT_FALSE((*kv.QueueTryPop("q", kLong)).has_value());
  EXPECT_EQ(*kv.NumKeys(kLong), 3);
  EXPECT_EQ((*kv.ListKeys(kLong)).size(), 3u);
  EXPECT_TRUE(kv.RefreshTtl(kLong).ok());
}

TEST_F(EndpointServerTest, UserAndPasswordOfAnyCharacters) {
  store::RedisEndpoint endpoint = FreeEndpoint();
  endpoint.user = "alice";
  endpoint.password = "a b\"c\\d'e\xc3\xa4 >#x";
  const Guard server = StartAt(endpoint);
  ASSERT_NE(server, nullptr);
  EXPECT_TRUE(TryConnect(endpoint).ok()) << TryConnect(endpoint);
  store::RedisEndpoint stranger = endpoint;
  stranger.user = stranger.password = "";
  EXPECT_TRUE(absl::IsUnauthenticated(TryConnect(stranger))) << TryConnect(stranger);
  stranger.password = endpoint.password;
  EXPECT_FALSE(TryConnect(stranger).ok()) << "the default user is off";
  endpoint.user = "";
  endpoint.password = "x";
  store::RedisEndpoint other = endpoint;
  const std::string folder = *MakePrivateFolder("ddp-test-");
  other.port = *FreePort(other.host);
  const auto second = StartServerIfOurs(other, folder, kLong);
  ASSERT_TRUE(second.ok() && *second != nullptr);
  EXPECT_TRUE(TryConnect(other).ok());
  other.password = "y";
  EXPECT_TRUE(absl::IsUnauthenticated(TryConnect(other)));
  EXPECT_TRUE(RemoveFolder(folder).ok());
}

TEST_F(EndpointServerTest, IsReplacedAtItsPlaceWhenItDies) {
  store::RedisEndpoint endpoint = FreeEndpoint("127.0.0.8");
  endpoint.password = "secret";
  const auto loop = *EventLoop::Create();  // outlives the guard
  const Guard server = StartAt(endpoint);
  pid_t second = -1;
  ServerGuard::Hooks hooks;
  hooks.on_replaced = [&](pid_t pid) {
    second = pid;
    loop->Stop();
  };
  hooks.say = [](const std::string&) {};
  ASSERT_TRUE(server->Watch(loop.get(), hooks).ok());
  const pid_t first = server->pid();
  ASSERT_EQ(kill(first, SIGKILL), 0);
  loop->AddTimer(kLong, [&] { loop->Stop(); });
  ASSERT_TRUE(loop->Run().ok());
  EXPECT_EQ(server->pid(), second);
  EXPECT_NE(second, first);
  EXPECT_TRUE(TryConnect(endpoint).ok());
}

// Another agent that probes the endpoint holds the port for a moment.
TEST_F(EndpointServerTest, IsReplacedLaterWhereItsPlaceIsTakenAtFirst) {
  store::RedisEndpoint endpoint = FreeEndpoint("127.0.0.8");
  const auto loop = *EventLoop::Create();  // outlives the guard
  const Guard server = StartAt(endpoint);
  std::vector<std::string> lines;
  std::unique_ptr<store::TcpStoreServer> other;
  ServerGuard::Hooks hooks;
  hooks.on_replaced = [&](pid_t) { loop->Stop(); };
  hooks.say = [&](const std::string& line) {
    lines.push_back(line);
    other.reset();
  };
  ASSERT_TRUE(server->Watch(loop.get(), hooks).ok());
  ASSERT_EQ(kill(server->pid(), SIGKILL), 0);
  while (other == nullptr) {
    auto listening = store::TcpStoreServer::Listen(loop.get(), endpoint.host, endpoint.port);
    if (listening.ok()) other = *std::move(listening);
  }
  loop->AddTimer(kLong, [&] { loop->Stop(); });
  ASSERT_TRUE(loop->Run().ok());
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_THAT(lines[0], ::testing::HasSubstr("cannot be replaced yet: "));
  EXPECT_EQ(lines[1], "the private Redis server died: started another one");
  EXPECT_TRUE(TryConnect(endpoint).ok());
}

// The code that kills all processes kills the replacement too: no message is due.
TEST_F(EndpointServerTest, AReplacementThatEndsWithEverythingIsNotComplainedOf) {
  store::RedisEndpoint endpoint = FreeEndpoint("127.0.0.8");
  const auto loop = *EventLoop::Create();  // outlives the guard
  const Guard server = StartAt(endpoint);
  SilentRedis silent;

  std::atomic<bool> doomed = false;
  ServerGuard::Hooks hooks;
  hooks.on_replaced = [](pid_t) { ADD_FAILURE() << "replaced"; };
  hooks.say = [](const std::string& line) { ADD_FAILURE() << line; };
  hooks.doomed = &doomed;
  ASSERT_TRUE(server->Watch(loop.get(), hooks).ok());
  std::thread killer([&] {
    std::ofstream told(silent.pipe());  // blocks until a reader opens the pipe
    doomed = true;
    told << "end" << std::endl;
  });
  ASSERT_EQ(kill(server->pid(), SIGKILL), 0);
  loop->AddTimer(kLong, [&] {
    ADD_FAILURE() << "the server's end was not seen";
    loop->Stop();
  });
  // The timer fires after the server's end is seen.
  loop->AddTimer(absl::Milliseconds(1), [&] { StopWhenDoomed(*loop, doomed); });
  ASSERT_TRUE(loop->Run().ok());
  killer.join();
  EXPECT_EQ(server->pid(), -1);
}

// The agent must be able to send heartbeats meanwhile.
TEST_F(EndpointServerTest, AReplacementThatDoesNotAnswerDoesNotHoldTheLoopUp) {
  store::RedisEndpoint endpoint = FreeEndpoint("127.0.0.8");
  const auto loop = *EventLoop::Create();  // outlives the guard
  const Guard server = StartAt(endpoint);
  SilentRedis silent;

  std::vector<std::string> lines;
  std::vector<pid_t> launched;
  int ticks = 0;  // ticks between start and end of the silent server
  std::thread killer;
  std::function<void()> tick = [&] {
    if (++ticks == 20) {
      killer = std::thread([&] { std::ofstream(silent.pipe()) << "end" << std::endl; });
    }
    loop->AddTimer(absl::Milliseconds(1), tick);
  };
  ServerGuard::Hooks hooks;
  hooks.on_launched = [&](pid_t pid) {
    launched.push_back(pid);
    if (launched.size() == 1) tick();
  };
  hooks.on_replaced = [&](pid_t) { loop->Stop(); };
  hooks.say = [&](const std::string& line) {
    lines.push_back(line);
    if (lines.size() > 1) return;
    EXPECT_GE(ticks, 20);
    silent.Uninstall();
  };
  ASSERT_TRUE(server->Watch(loop.get(), hooks).ok());
  ASSERT_EQ(kill(server->pid(), SIGKILL), 0);
  loop->AddTimer(kLong, [&] { loop->Stop(); });
  ASSERT_TRUE(loop->Run().ok());
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_THAT(lines[0],
              ::testing::HasSubstr("cannot be replaced yet: redis-server ended at its start"));
  EXPECT_TRUE(TryConnect(endpoint).ok());
  ASSERT_EQ(launched.size(), 2U);
  EXPECT_EQ(launched[1], server->pid());
  killer.join();
}

TEST_F(EndpointServerTest, AReplacementThatDoesNotAnswerEndsWithTheGuard) {
  store::RedisEndpoint endpoint = FreeEndpoint("127.0.0.8");
  const auto loop = *EventLoop::Create();  // outlives the guard
  Guard server = StartAt(endpoint);
  SilentRedis silent;
  pid_t launched = -1;
  ServerGuard::Hooks hooks;
  hooks.on_launched = [&](pid_t pid) {
    launched = pid;
    loop->Stop();
  };
  hooks.on_replaced = [](pid_t) { ADD_FAILURE() << "replaced"; };
  hooks.say = [](const std::string& line) { ADD_FAILURE() << line; };
  ASSERT_TRUE(server->Watch(loop.get(), hooks).ok());
  ASSERT_EQ(kill(server->pid(), SIGKILL), 0);
  loop->AddTimer(kLong, [&] { loop->Stop(); });
  ASSERT_TRUE(loop->Run().ok());
  ASSERT_GT(launched, 0);
  server.reset();
  EXPECT_EQ(kill(launched, 0), -1);
}

TEST(ExportCredentialsTest, LeavesWhatTheServerWantsAndNoMore) {
  setenv("DDP_REDIS_PASSWORD_FILE", "/tmp/x", 1);
  store::RedisEndpoint endpoint;
  endpoint.password = "p";
  ExportCredentials(endpoint);
  EXPECT_STREQ(getenv("DDP_REDIS_PASSWORD"), "p");
  EXPECT_EQ(getenv("DDP_REDIS_PASSWORD_FILE"), nullptr);
  EXPECT_EQ(getenv("DDP_REDIS_USER"), nullptr);
  ExportCredentials({});
  EXPECT_EQ(getenv("DDP_REDIS_PASSWORD"), nullptr);
}

}  // namespace
}  // namespace ddp::launcher
