// Tests with several real ddprun on this machine as several nodes: how they find each other, and
// which node's server they use.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/flags/exit_code.h"
#include "launcher/meeting/network_server.h"
#include "store/tcp_store/tcp_store_server.h"
#include "testing/network/loopback_client.h"
#include "testing/network/loopback_socket.h"

namespace ddp::launcher {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kWorker[] = "launcher/end_to_end/meeting_worker";
constexpr char kStarted[] = "ddprun: started Redis at ";

using Agent = std::unique_ptr<DdprunDriver>;

Agent Start(std::vector<std::string> flags, const std::vector<std::string>& worker = {},
            const std::map<std::string, std::string>& environment = {}) {
  flags.push_back("--nproc-per-node=2");
  flags.push_back(kWorker);
  flags.insert(flags.end(), worker.begin(), worker.end());
  return std::make_unique<DdprunDriver>(
      DdprunDriver::Options{.arguments = flags, .environment = environment});
}

// Flags of two nodes that meet at an endpoint where no server runs yet.
class Endpoint {
 public:
  explicit Endpoint(const std::string& address) : place_(absl::StrCat(address, ":")) {
    place_ += absl::StrCat(*FreePort(address));
  }
  std::vector<std::string> Flags() const {
    return {"--nnodes=2", absl::StrCat("--rdzv-endpoint=", place_), "--rdzv-id=job",
            "--max-restarts=1"};
  }

 private:
  std::string place_;
};

std::vector<std::string> StaticFlags(int node, int port) {
  return {"--nnodes=2", absl::StrCat("--node-rank=", node), "--master-addr=127.0.0.1",
          absl::StrCat("--master-port=", port), "--max-restarts=1"};
}

int PortOfMine() { return *FreePort("127.0.0.1"); }

// Expects that each of four ranks has met the others once, in this attempt.
void ExpectAllMet(const DdprunDriver& one, const DdprunDriver& two, int restarts) {
  const std::string out = one.out() + two.out();
  for (int rank = 0; rank < 4; ++rank) {
    const std::string line = absl::StrCat("rank ", rank, " met 4 after ", restarts, "\n");
    EXPECT_EQ(Count(out, line), 1) << line << "in: " << out;
  }
}

pid_t ServerOf(const DdprunDriver& agent) {
  for (const pid_t pid : agent.Tree()) {
    std::string name;
    std::getline(std::ifstream(absl::StrCat("/proc/", pid, "/comm")), name);
    if (name == "redis-server") return pid;
  }
  return -1;
}

TEST(DdprunMeetingTest, OneOfTwoServesTheEndpoint) {
  const Endpoint endpoint("127.0.0.1");
  const Agent one = Start(endpoint.Flags());
  const Agent two = Start(endpoint.Flags());
  EXPECT_EQ(one->Wait(), 0) << one->err();
  EXPECT_EQ(two->Wait(), 0) << two->err();
  ExpectAllMet(*one, *two, 0);
  EXPECT_EQ(Count(one->err() + two->err(), kStarted), 1);
}

TEST(DdprunMeetingTest, AFailureOnOneNodeRestartsBothWithANewStore) {
  const Endpoint endpoint("127.0.0.1");
  const Agent one = Start(endpoint.Flags(), {"fail"});
  const Agent two = Start(endpoint.Flags(), {"fail"});
  EXPECT_EQ(one->Wait(), 0) << one->err();
  EXPECT_EQ(two->Wait(), 0) << two->err();
  ExpectAllMet(*one, *two, 0);
  ExpectAllMet(*one, *two, 1);
}

TEST(DdprunMeetingTest, OnlyWhoKnowsThePasswordGetsIn) {
  const Endpoint endpoint("127.0.0.1");
  const std::map<std::string, std::string> secret = {{"DDP_REDIS_PASSWORD", "open sesame"}};
  const Agent one = Start(endpoint.Flags(), {}, secret);
  one->AwaitStderr(kStarted);
  const Agent stranger = Start(endpoint.Flags());
  EXPECT_EQ(stranger->Wait(), 1);
  EXPECT_THAT(stranger->err(), HasSubstr("DDP_REDIS_PASSWORD"));
  const Agent two = Start(endpoint.Flags(), {}, secret);
  EXPECT_EQ(one->Wait(), 0) << one->err();
  EXPECT_EQ(two->Wait(), 0) << two->err();
  ExpectAllMet(*one, *two, 0);
  EXPECT_THAT(one->err() + two->err() + stranger->err(), Not(HasSubstr("sesame")));
}

TEST(DdprunMeetingTest, AServerThatDiesIsReplacedAndTheJobGoesOn) {
  std::vector<std::string> flags = Endpoint("127.0.0.1").Flags();
  flags.emplace_back("--rdzv-conf=any_program=1");
  const Agent one = Start(flags);
  one->AwaitStderr(kStarted);
  const std::string file = absl::StrCat(one->temporary_folder(), "/go");
  const Agent two = Start(flags, {"wait", file});
  two->AwaitStdout(" met 4 after 0\n", 2);
  ASSERT_EQ(kill(ServerOf(*one), SIGKILL), 0);
  one->AwaitStderr("started another one");
  std::ofstream(file) << "go";
  EXPECT_EQ(one->Wait(), 0) << one->err();
  EXPECT_EQ(two->Wait(), 0) << two->err();
}

TEST(DdprunMeetingTest, TheServerEndsWithItsAgent) {
  const Endpoint endpoint("127.0.0.1");
  const Agent agent = Start(endpoint.Flags());
  agent->AwaitStderr(kStarted);
  const HeldProcess server(ServerOf(*agent));
  ASSERT_GT(server.pid(), 0);
  ASSERT_EQ(kill(agent->AgentPid(), SIGKILL), 0);
  EXPECT_TRUE(server.AwaitEnd(MonotonicClock().Now() + DdprunDriver::kDeadline));
  EXPECT_NE(agent->Wait(), 0);
  EXPECT_TRUE(agent->TemporaryEntries().empty());
}

// No node can join them at a server that is gone, so they must not wait for it.
TEST(DdprunMeetingTest, WhoTakesTheServerAwayFromTooFewEndsTheirJobAndTheyHearWhy) {
  const Endpoint endpoint("127.0.0.1");
  const Agent one = Start(endpoint.Flags(), {"wait", "/nonexistent"});
  one->AwaitStderr(kStarted);
  const Agent two = Start(endpoint.Flags(), {"wait", "/nonexistent"});
  one->AwaitStdout(" met 4 after 0\n", 2);
  two->AwaitStdout(" met 4 after 0\n", 2);
  ASSERT_EQ(kill(one->pid(), SIGTERM), 0);
  EXPECT_EQ(one->Wait(), 1) << one->err();
  EXPECT_EQ(two->Wait(), 1) << two->err();
  EXPECT_THAT(two->err(), HasSubstr("the job was closed: node "));
  EXPECT_THAT(two->err(), HasSubstr("held the rendezvous"));
  EXPECT_THAT(two->err(), Not(HasSubstr("out of reach")));
}

TEST(DdprunMeetingTest, StaticNodesMeetAtTheMastersPort) {
  const int port = PortOfMine();
  const Agent one = Start(StaticFlags(1, port));
  const Agent zero = Start(StaticFlags(0, port));
  EXPECT_EQ(zero->Wait(), 0) << zero->err();
  EXPECT_EQ(one->Wait(), 0) << one->err();
  ExpectAllMet(*zero, *one, 0);
  EXPECT_EQ(Count(zero->out(), "rank 0 met"), 1) << "node 0 has the first ranks";
}

TEST(DdprunMeetingTest, AStaticJobRestartsWithANewStoreAtTheSamePort) {
  const int port = PortOfMine();
  const Agent zero = Start(StaticFlags(0, port), {"fail"});
  const Agent one = Start(StaticFlags(1, port), {"fail"});
  EXPECT_EQ(zero->Wait(), 0) << zero->err();
  EXPECT_EQ(one->Wait(), 0) << one->err();
  ExpectAllMet(*zero, *one, 0);
  ExpectAllMet(*zero, *one, 1);
}

TEST(DdprunMeetingTest, AMastersPortThatIsTakenIsOneLine) {
  const int port = PortOfMine();
  const Agent zero = Start(StaticFlags(0, port));
  // Node 0 holds the port once the other node knows where the rendezvous is.
  const Agent one = Start(StaticFlags(1, port), {"wait", zero->temporary_folder() + "/go"});
  one->AwaitStdout(" met 4 after 0\n", 2);
  const Agent second = Start(StaticFlags(0, port));
  EXPECT_EQ(second->Wait(), 1);
  EXPECT_THAT(second->err(), HasSubstr(absl::StrCat("--master-port=", port)));
  EXPECT_THAT(second->err(), HasSubstr("taken by another process"));
  std::ofstream(zero->temporary_folder() + "/go") << "go";
  EXPECT_EQ(zero->Wait(), 0) << zero->err();
  EXPECT_EQ(one->Wait(), 0) << one->err();
}

TEST(DdprunMeetingTest, ANameThatNeverComesIsWaitedForAsLongAsTheUserSays) {
  const std::vector<std::vector<std::string>> places = {
      {"--rdzv-endpoint=no-such-host.invalid:1234"},
      {"--rdzv-endpoint=no-such-host.invalid:1234", "--rdzv-conf=is_host=0,timeout=600"},
      {"--node-rank=0", "--master-addr=no-such-host.invalid",
       absl::StrCat("--master-port=", PortOfMine())}};
  for (std::vector<std::string> flags : places) {
    const bool has_conf = flags.size() == 2;
    flags.insert(flags.end(), {"--nnodes=2", "--exit-code=reason"});
    if (has_conf) {
      flags[1] += ",read_timeout=0.1";
    } else {
      flags.push_back("--rdzv-conf=join_timeout=0.1");
    }
    const Agent agent = Start(flags);
    EXPECT_EQ(agent->Wait(), kReasonRendezvousTimeout) << agent->err();
    EXPECT_THAT(agent->err(), HasSubstr("no-such-host.invalid"));
    EXPECT_THAT(agent->err(), HasSubstr("waited for the name for 100ms"));
  }
}

TEST(DdprunMeetingTest, AServerThatNeverAnswersIsWaitedForAsLongAsTheUserSays) {
  const testing::LoopbackSocket redis = testing::ListenOnLoopback();
  const Agent agent = Start({absl::StrCat("--rdzv-endpoint=127.0.0.1:", redis.port), "--nnodes=2",
                             "--rdzv-conf=read_timeout=0.3", "--exit-code=reason"});
  EXPECT_EQ(agent->Wait(), kReasonStoreLost) << agent->err();
  EXPECT_EQ(Count(agent->err(), "did not answer in time (tried "), 1) << agent->err();
  EXPECT_THAT(agent->err(), Not(HasSubstr("waiting for the rendezvous")));
}

// A proxy to node 0 that holds connections back for a while and then works.
class SlowWay {
 public:
  SlowWay(EventLoop* loop, int port, absl::Duration delay)
      : loop_(*loop), port_(port), delay_(delay) {
    EXPECT_TRUE(loop_.Watch(entrance_.fd.get(), EPOLLIN, [this](uint32_t) { Enter(); }).ok());
  }
  ~SlowWay() {
    loop_.Unwatch(entrance_.fd.get());
    for (const UniqueFd& end : ends_) loop_.Unwatch(end.get());
  }
  int port() const { return entrance_.port; }

 private:
  void Enter() {
    UniqueFd client(::accept4(entrance_.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
    ASSERT_TRUE(client.valid());
    const int from = client.get();
    ends_.push_back(std::move(client));
    loop_.AddTimer(delay_, [this, from] {
      UniqueFd server = testing::DialLoopback(port_);
      ASSERT_TRUE(server.valid());
      Forward(from, server.get());
      Forward(server.get(), from);
      ends_.push_back(std::move(server));
    });
  }
  void Forward(int from, int to) {
    const auto forward = [this, from, to](uint32_t) {
      std::array<char, 4096> bytes;
      const ssize_t count = ::recv(from, bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (count <= 0) return loop_.Unwatch(from);
      EXPECT_EQ(::send(to, bytes.data(), count, MSG_NOSIGNAL), count);
    };
    ASSERT_TRUE(loop_.Watch(from, EPOLLIN, forward).ok());
  }

  EventLoop& loop_;
  const int port_;
  const absl::Duration delay_;
  const testing::LoopbackSocket entrance_ = testing::ListenOnLoopback();
  std::vector<UniqueFd> ends_;
};

// Node 0 answers late, and the server that it names never does. The server has only the rest of the
// common time.
TEST(DdprunMeetingTest, ThePlaceAndItsServerAreWaitedForWithinOneTime) {
  const testing::LoopbackSocket redis = testing::ListenOnLoopback();
  const auto loop = *EventLoop::Create();
  const auto zero = *store::TcpStoreServer::Listen(loop.get(), "127.0.0.1", 0);
  zero->Publish("ddp/static-rendezvous",
                absl::StrCat(R"({"host":"127.0.0.1","password":"x","port":)", redis.port, "}"));
  const SlowWay way(loop.get(), zero->port(), absl::Milliseconds(700));
  std::vector<std::string> flags = StaticFlags(1, way.port());
  flags.push_back("--rdzv-conf=join_timeout=60");
  const Agent agent = Start(flags);
  loop->AddTimer(DdprunDriver::kDeadline, [&] { loop->Stop(); });
  ASSERT_TRUE(loop->Watch(redis.fd.get(), EPOLLIN, [&](uint32_t) { loop->Stop(); }).ok());
  ASSERT_TRUE(loop->Run().ok());
  loop->Unwatch(redis.fd.get());
  agent->AwaitStderr("ddprun: waiting for the rendezvous, at most ");
  agent->AwaitStderr("did not answer in time (tried ");
  // The time is the agent's clock. A minute less half a second would be printed as a minute.
  EXPECT_THAT(agent->err(), Not(HasSubstr("at most 1m0s"))) << agent->err();
  ASSERT_EQ(kill(agent->pid(), SIGTERM), 0);
  EXPECT_NE(agent->Wait(), 0);
}

TEST(DdprunMeetingTest, HostileClientsOfTheWorkersStoreFillNoLog) {
  DdprunDriver job({.arguments = {"--standalone", "bash", "-c",
                                  "for ((i = 0; i < 30; ++i)); do"
                                  " exec 3<>/dev/tcp/127.0.0.1/$MASTER_PORT;"
                                  " echo 'GET / HTTP/1.1 and much more of it' >&3;"
                                  " cat <&3 >/dev/null 2>&1; done; true"}});
  EXPECT_EQ(job.Wait(), 0) << job.err();
  EXPECT_EQ(Count(job.err(), "drops a client"), 10) << job.err();
  EXPECT_EQ(Count(job.err(), "; more of these are not told\n"), 1) << job.err();
  EXPECT_EQ(Count("\n" + job.err(), "\nddprun: TCPStore at port "), 10) << job.err();
}

TEST(DdprunMeetingTest, TheAgentMayHaveManyClientsAndItsWorkersHaveTheLimitOfTheUser) {
  rlimit files{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit few = {.rlim_cur = 128, .rlim_max = files.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  DdprunDriver job({.arguments = {"--standalone", "sh", "-c",
                                  "ulimit -Sn; grep 'open files' /proc/$PPID/limits"}});
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
  EXPECT_EQ(job.Wait(), 0) << job.err();
  EXPECT_EQ(Count("\n" + job.out(), "\n128\n"), 1) << job.out();
  const std::vector<std::string> agent =
      absl::StrSplit(job.out(), absl::ByAnyChar(" \n"), absl::SkipEmpty());
  // Words: 128, Max, open, files, soft, hard, files.
  ASSERT_EQ(agent.size(), 7U) << job.out();
  EXPECT_EQ(agent[4], absl::StrCat(std::min<rlim_t>(files.rlim_max, 1 << 18)));
}

}  // namespace
}  // namespace ddp::launcher
