// Length: all cases share the fixture, which is a real Redis that a case may stop or empty.

#include "elastic/rendezvous/redis_rendezvous.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/event_loop.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/wire/redis_reply.h"
#include "store/redis_server/private_redis_server.h"
#include "testing/redis/delaying_proxy.h"
#include "testing/redis/scripted_redis_server.h"

namespace ddp::elastic {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;
using Decision = FailureVerdict::Decision;

// Timeout for a machine under load; a passing test never waits for it.
constexpr absl::Duration kLong = absl::Seconds(30);

class RedisRendezvousTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string folder = "/tmp/ddp-rdzv-XXXXXX";
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    StartServer();
    absl::StatusOr<std::unique_ptr<EventLoop>> loop = EventLoop::Create();
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
  }

  void TearDown() override {
    if (server_ != nullptr) server_->Stop();
    server_.reset();
    rmdir(folder_.c_str());
  }

  void StartServer(std::vector<std::string> extra_config = {}) {
    store::PrivateRedisServer::Options options;
    options.directory = folder_;
    options.extra_config = std::move(extra_config);
    absl::StatusOr<std::unique_ptr<store::PrivateRedisServer>> server =
        store::PrivateRedisServer::Start(options);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    endpoint_ = server_->endpoint();
  }

  RedisRendezvous::Options MakeOptions() {
    RedisRendezvous::Options options;
    options.endpoint = endpoint_;
    options.job.run_id = "digits";
    options.job.limits.max_restarts = 2;
    return options;
  }

  std::unique_ptr<RedisRendezvous> Open(const RedisRendezvous::Options& options) {
    absl::StatusOr<std::unique_ptr<RedisRendezvous>> rendezvous =
        RedisRendezvous::Open(options, loop_.get());
    EXPECT_TRUE(rendezvous.ok()) << rendezvous.status();
    return *std::move(rendezvous);
  }
  std::unique_ptr<RedisRendezvous> Open() { return Open(MakeOptions()); }

  // Makes the request, and runs the loop until it has been answered.
  RendezvousAnswer Await(Rendezvous& rendezvous, const RendezvousRequest& request,
                         absl::Duration timeout = kLong) {
    std::optional<RendezvousAnswer> answer;
    rendezvous.Ask(request, timeout, [&](const RendezvousAnswer& given) {
      answer = given;
      loop_->Stop();
    });
    EXPECT_FALSE(answer.has_value()) << "answered from within the request";
    RunLoop();
    return *std::move(answer);
  }

  // Runs the loop until Stop() is called on it.
  void RunLoop() {
    const EventLoop::TimerId guard = loop_->AddTimer(2 * kLong, [] {
      FAIL() << "nothing happened";
      abort();
    });
    ASSERT_TRUE(loop_->Run().ok());
    loop_->CancelTimer(guard);
  }

  absl::StatusOr<Round> Join(Rendezvous& rendezvous, const NodeOffer& offer = Offer(),
                             absl::Duration timeout = kLong) {
    RendezvousAnswer answer = Await(rendezvous, JoinRequest{offer}, timeout);
    if (!answer.ok()) return answer.status();
    if (const JobEnd* end = std::get_if<JobEnd>(&*answer)) {
      return absl::FailedPreconditionError(JobEndName(end->kind));
    }
    return std::get<Round>(*std::move(answer));
  }

  // Both nodes join, in this order; runs the loop until both are in the round.
  std::pair<Round, Round> JoinBoth(Rendezvous& first, Rendezvous& second) {
    std::vector<Round> rounds(2);
    int missing = 2;
    const auto take = [&](size_t index) {
      return [&, index](const RendezvousAnswer& round) {
        ASSERT_TRUE(round.ok()) << round.status();
        rounds[index] = std::get<Round>(*round);
        if (--missing == 0) loop_->Stop();
      };
    };
    first.Ask(JoinRequest{Offer()}, kLong, take(0));
    second.Ask(JoinRequest{Offer()}, kLong, take(1));
    RunLoop();
    return {rounds[0], rounds[1]};
  }

  absl::StatusOr<FailureVerdict> Report(Rendezvous& rendezvous, const GenerationId& generation,
                                        int rank, absl::Duration timeout = kLong) {
    const std::string cause = absl::StrCat("rank ", rank, " failed");
    return AnswerAs<FailureVerdict>(
        Await(rendezvous, FailureRequest{.generation = generation, .rank = rank, .cause = cause},
              timeout));
  }

  absl::Status Complete(Rendezvous& rendezvous, const GenerationId& generation) {
    return Await(rendezvous, CompleteRequest{generation}).status();
  }

  absl::Status Leave(Rendezvous& rendezvous) { return Await(rendezvous, LeaveRequest{}).status(); }

  store::RedisReply Redis(const std::vector<std::string>& command) {
    absl::StatusOr<std::unique_ptr<store::RedisConnection>> connection =
        store::RedisConnection::Connect(endpoint_);
    EXPECT_TRUE(connection.ok()) << connection.status();
    absl::StatusOr<store::RedisReply> reply = (*connection)->Command(command);
    EXPECT_TRUE(reply.ok()) << reply.status();
    return *std::move(reply);
  }

  static NodeOffer Offer() {
    return {.nproc = 2,
            .role = "default",
            .host = "a",
            .master_addr = "127.0.0.1",
            .master_port = 20'000};
  }

  std::string folder_;
  std::unique_ptr<store::PrivateRedisServer> server_;
  store::RedisEndpoint endpoint_;
  std::unique_ptr<EventLoop> loop_;
};

TEST_F(RedisRendezvousTest, OneNodeFormsARoundAtOnce) {
  const std::unique_ptr<RedisRendezvous> rendezvous = Open();
  const absl::StatusOr<Round> round = Join(*rendezvous);
  ASSERT_TRUE(round.ok()) << round.status();
  EXPECT_EQ(round->generation.number, 1u);
  EXPECT_THAT(round->generation.nonce, MatchesRegex("[0-9a-f]+"));
  EXPECT_EQ(round->generation.nonce.size(), 16u);
  EXPECT_EQ(round->restarts, 0);
  EXPECT_EQ(round->placement.world_size, 2);
  EXPECT_EQ(round->placement.group_rank, 0);

  const absl::StatusOr<store::StoreAddress> address = store::ParseStoreAddress(round->store_url);
  ASSERT_TRUE(address.ok()) << address.status();
  EXPECT_EQ(address->endpoint.unix_path, endpoint_.unix_path);
  EXPECT_EQ(address->prefix,
            absl::StrCat("ddp:{digits}:i1:g1.", round->generation.nonce, ":store:"));
}

TEST_F(RedisRendezvousTest, ARunIdUsedAgainInheritsNothing) {
  RedisRendezvous::Options options = MakeOptions();
  options.job.limits.max_restarts = 1;
  const std::unique_ptr<RedisRendezvous> first = Open(options);
  ASSERT_TRUE(Report(*first, Join(*first)->generation, 0).ok());
  ASSERT_EQ(Report(*first, Join(*first)->generation, 0)->decision, Decision::kEnded);
  ASSERT_TRUE(Leave(*first).ok());

  const std::unique_ptr<RedisRendezvous> second = Open(options);
  EXPECT_EQ(first->instance(), 1);
  EXPECT_EQ(second->instance(), 2);
  const Round round = *Join(*second);
  EXPECT_EQ(round.generation.number, 1u);
  EXPECT_EQ(round.restarts, 0);
  EXPECT_EQ(round.reason, "");
  EXPECT_EQ(round.placement.group_world_size, 1);
}

TEST_F(RedisRendezvousTest, FailuresAreChargedUntilTheBudgetIsSpent) {
  const std::unique_ptr<RedisRendezvous> rendezvous = Open();
  for (int restarts = 0; restarts < 2; ++restarts) {
    const Round round = *Join(*rendezvous);
    EXPECT_EQ(round.generation.number, restarts + 1u);
    EXPECT_EQ(round.restarts, restarts);
    const absl::StatusOr<FailureVerdict> verdict = Report(*rendezvous, round.generation, 1);
    ASSERT_TRUE(verdict.ok()) << verdict.status();
    EXPECT_EQ(verdict->decision, Decision::kRestart);
  }
  const Round last = *Join(*rendezvous);
  EXPECT_EQ(last.generation.number, 3u);
  const absl::StatusOr<FailureVerdict> verdict = Report(*rendezvous, last.generation, 0);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_EQ(verdict->decision, Decision::kEnded);
  EXPECT_EQ(verdict->end.kind, JobEnd::Kind::kBudgetSpent);
  EXPECT_EQ(verdict->end.reason, "rank 0 failed");
  EXPECT_EQ(verdict->end.host, "a");
  EXPECT_EQ(Join(*rendezvous).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(RedisRendezvousTest, TheFirstFailureOfAGenerationDecidesAndIsChargedOnce) {
  const std::unique_ptr<RedisRendezvous> rendezvous = Open();
  const Round round = *Join(*rendezvous);
  for (int rank : {1, 0, 1}) {
    const absl::StatusOr<FailureVerdict> verdict = Report(*rendezvous, round.generation, rank);
    ASSERT_TRUE(verdict.ok()) << verdict.status();
    EXPECT_EQ(verdict->decision, Decision::kRestart);
  }
}

TEST_F(RedisRendezvousTest, AnEarlierGenerationIsRefused) {
  const std::unique_ptr<RedisRendezvous> rendezvous = Open();
  const Round first = *Join(*rendezvous);
  ASSERT_TRUE(Report(*rendezvous, first.generation, 0).ok());
  const Round second = *Join(*rendezvous);

  const absl::StatusOr<FailureVerdict> late = Report(*rendezvous, first.generation, 1);
  ASSERT_TRUE(late.ok()) << late.status();
  EXPECT_EQ(late->decision, Decision::kStale);
  EXPECT_EQ(Complete(*rendezvous, first.generation).code(), absl::StatusCode::kAborted);
  GenerationId forged = second.generation;
  forged.nonce = "0000000000000000";
  EXPECT_EQ(Report(*rendezvous, forged, 1)->decision, Decision::kStale);
  EXPECT_TRUE(Complete(*rendezvous, second.generation).ok());
}

TEST_F(RedisRendezvousTest, ACompletedJobTakesNobodyIn) {
  const std::unique_ptr<RedisRendezvous> rendezvous = Open();
  const Round round = *Join(*rendezvous);
  EXPECT_TRUE(Complete(*rendezvous, round.generation).ok());
  EXPECT_TRUE(Complete(*rendezvous, round.generation).ok()) << "sent again";
  EXPECT_TRUE(Leave(*rendezvous).ok());
  RedisRendezvous::Options options = MakeOptions();
  options.instance = rendezvous->instance();
  const absl::Status late = Join(*Open(options)).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(late.message(), HasSubstr("succeeded"));
}

TEST_F(RedisRendezvousTest, TwoNodesMeetAndKeepTheirRanks) {
  RedisRendezvous::Options options = MakeOptions();
  options.job.limits.min_nodes = options.job.limits.max_nodes = 2;
  const std::unique_ptr<RedisRendezvous> a = Open(options);
  options.instance = a->instance();
  const std::unique_ptr<RedisRendezvous> b = Open(options);
  const auto [a_first, b_first] = JoinBoth(*a, *b);
  EXPECT_EQ(a_first.generation, b_first.generation);
  EXPECT_EQ(a_first.store_url, b_first.store_url);
  EXPECT_NE(a_first.placement.group_rank, b_first.placement.group_rank);

  ASSERT_EQ(Report(*b, b_first.generation, 3)->decision, Decision::kRestart);
  const auto [b_second, a_second] = JoinBoth(*b, *a);
  EXPECT_EQ(a_second.generation.number, 2u);
  EXPECT_EQ(a_second.restarts, 1);
  EXPECT_EQ(a_second.placement.group_rank, a_first.placement.group_rank);
  EXPECT_EQ(b_second.placement.group_rank, b_first.placement.group_rank);

  // A newcomer fills the hole of the node that left.
  ASSERT_TRUE(Leave(*a).ok());
  const std::unique_ptr<RedisRendezvous> c = Open(options);
  const auto [c_third, b_third] = JoinBoth(*c, *b);
  EXPECT_EQ(b_third.placement.group_rank, b_first.placement.group_rank);
  EXPECT_EQ(c_third.placement.group_rank, a_first.placement.group_rank);
}

TEST_F(RedisRendezvousTest, BothNodesMustCompleteForTheJobToSucceed) {
  RedisRendezvous::Options options = MakeOptions();
  options.job.limits.min_nodes = options.job.limits.max_nodes = 2;
  const std::unique_ptr<RedisRendezvous> a = Open(options);
  options.instance = a->instance();
  const std::unique_ptr<RedisRendezvous> b = Open(options);
  const Round round = JoinBoth(*a, *b).first;
  EXPECT_TRUE(Complete(*a, round.generation).ok());
  EXPECT_EQ(*Redis({"HGET", "ddp:{digits}:i1:job", "state"}).AsString(), "running");
  EXPECT_TRUE(Complete(*b, round.generation).ok());
  EXPECT_EQ(*Redis({"HGET", "ddp:{digits}:i1:job", "end_kind"}).AsString(), "succeeded");
}

TEST_F(RedisRendezvousTest, ANodeThatDiedWhileWaitingHoldsNobodyUp) {
  RedisRendezvous::Options options = MakeOptions();
  options.job.limits.min_nodes = options.job.limits.max_nodes = 2;
  options.job.rules.lease = absl::Milliseconds(300);
  std::unique_ptr<RedisRendezvous> dead = Open(options);
  dead->Ask(JoinRequest{Offer()}, kLong, [](const RendezvousAnswer&) { FAIL() << "alone"; });
  std::function<void()> look = [&] {
    if (*Redis({"HLEN", "ddp:{digits}:i1:joined"}).AsInteger() == 1) return loop_->Stop();
    loop_->AddTimer(absl::Milliseconds(1), look);
  };
  look();
  RunLoop();
  dead.reset();
  options.instance = 1;
  options.job.rules.lease = kLong;
  const std::unique_ptr<RedisRendezvous> a = Open(options);
  const std::unique_ptr<RedisRendezvous> b = Open(options);
  // The lease runs out by the server's clock. Until then the node counts as a member.
  while (
      Redis({"EVAL",
             "local t = redis.call('TIME') "
             "return redis.call('ZCOUNT', KEYS[1], t[1] * 1000 + math.floor(t[2] / 1000), '+inf')",
             "1", "ddp:{digits}:i1:leases"})
          .AsInteger()
          .value() != 0) {
  }
  const Round round = JoinBoth(*a, *b).first;
  EXPECT_EQ(round.placement.group_world_size, 2);
}

TEST_F(RedisRendezvousTest, SaysWhoIsMissing) {
  RedisRendezvous::Options options = MakeOptions();
  options.job.limits.min_nodes = options.job.limits.max_nodes = 2;
  const std::unique_ptr<RedisRendezvous> alone = Open(options);
  const absl::Status status = Join(*alone, Offer(), absl::Milliseconds(300)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(), "only 1 of 2 nodes have joined after 300ms");
}

TEST_F(RedisRendezvousTest, AServerThatLostItsMemoryAdoptsTheHighestGeneration) {
  const std::unique_ptr<RedisRendezvous> rendezvous = Open();
  ASSERT_TRUE(Report(*rendezvous, Join(*rendezvous)->generation, 0).ok());
  const Round second = *Join(*rendezvous);
  ASSERT_EQ(second.generation.number, 2u);

  Redis({"FLUSHALL"});
  const absl::StatusOr<FailureVerdict> verdict = Report(*rendezvous, second.generation, 1);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_EQ(verdict->decision, Decision::kRestart);
  Redis({"FLUSHALL"});
  const Round third = *Join(*rendezvous);
  EXPECT_EQ(third.generation.number, 3u);
  EXPECT_EQ(third.restarts, 1) << "what was charged stays charged, what was only reported is lost";
  Redis({"FLUSHALL"});
  EXPECT_TRUE(Complete(*rendezvous, third.generation).ok());
}

TEST_F(RedisRendezvousTest, ALostCounterDoesNotGiveARunningInstanceAway) {
  const auto open = [this](const std::string& fingerprint) {
    RedisRendezvous::Options options = MakeOptions();
    options.job.fingerprint = fingerprint;
    return Open(options);
  };
  const std::unique_ptr<RedisRendezvous> first = open("a");
  const std::unique_ptr<RedisRendezvous> second = open("b");
  ASSERT_EQ(second->instance(), 2);
  const Round round = *Join(*second);
  Redis({"FLUSHALL"});
  // The first script of a member brings the instance and the counter back.
  ASSERT_TRUE(Report(*second, round.generation, 0).ok());
  EXPECT_EQ(open("c")->instance(), 3);
  Redis({"DEL", "ddp:{digits}:instance"});
  EXPECT_EQ(open("d")->instance(), 1);
  EXPECT_EQ(open("e")->instance(), 4) << "2 and 3 are there";
}

// A run id is one job, which must not run twice.
TEST_F(RedisRendezvousTest, AJobThatWasBegunAnewIsJoined) {
  const std::unique_ptr<RedisRendezvous> late = Open();
  const Round round = *Join(*late);
  Redis({"FLUSHALL"});
  const std::unique_ptr<RedisRendezvous> early = Open();
  ASSERT_EQ(Join(*early)->generation.number, 1u);
  const absl::StatusOr<FailureVerdict> verdict = Report(*late, round.generation, 0);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_EQ(verdict->decision, FailureVerdict::Decision::kStale);
  EXPECT_EQ(Join(*early)->generation.number, 2u) << "untouched";
}

TEST_F(RedisRendezvousTest, AnotherJobInOurPlaceIsNotOurs) {
  const auto open = [this](const std::string& fingerprint) {
    RedisRendezvous::Options options = MakeOptions();
    options.job.fingerprint = fingerprint;
    return Open(options);
  };
  const std::unique_ptr<RedisRendezvous> robbed = open("a");
  const Round round = *Join(*robbed);
  Redis({"FLUSHALL"});
  const std::unique_ptr<RedisRendezvous> robber = open("b");
  ASSERT_EQ(robber->instance(), robbed->instance());
  ASSERT_EQ(Join(*robber)->generation.number, 1u);
  const absl::Status status = Report(*robbed, round.generation, 0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("--rdzv-id"));
  EXPECT_EQ(Join(*robber)->generation.number, 2u) << "untouched";
}

TEST_F(RedisRendezvousTest, AnInstanceThatIsNotOpenCannotBeJoined) {
  RedisRendezvous::Options options = MakeOptions();
  options.instance = 7;
  const absl::Status status = RedisRendezvous::Open(options, loop_.get()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no instance 7"));
}

TEST_F(RedisRendezvousTest, HeartbeatsRenewTheLease) {
  RedisRendezvous::Options options = MakeOptions();
  options.job.rules.lease = absl::Milliseconds(300);
  const std::unique_ptr<RedisRendezvous> rendezvous = Open(options);
  const Round round = *Join(*rendezvous);
  const std::string node =
      *(*Redis({"ZRANGE", "ddp:{digits}:i1:leases", "0", "0"}).AsArray())[0].AsString();
  const auto lease = [&] { return *Redis({"ZSCORE", "ddp:{digits}:i1:leases", node}).AsString(); };
  const std::string first = lease();
  std::function<void()> look = [&] {
    if (lease() != first) return loop_->Stop();
    loop_->AddTimer(absl::Milliseconds(1), look);
  };
  look();
  RunLoop();
  ASSERT_TRUE(Leave(*rendezvous).ok());
  EXPECT_TRUE(Redis({"ZSCORE", "ddp:{digits}:i1:leases", node}).IsNil());
}

TEST_F(RedisRendezvousTest, LosingTheServerIsToldOnceAndMends) {
  RedisRendezvous::Options options = MakeOptions();
  options.job.rules.lease = absl::Milliseconds(300);
  const std::unique_ptr<RedisRendezvous> rendezvous = Open(options);
  const Round round = *Join(*rendezvous);
  std::vector<News::Kind> told;
  rendezvous->Watch([&](const News& news) {
    told.push_back(news.kind);
    loop_->Stop();
  });
  server_->Stop();
  RunLoop();
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0], News::Kind::kOutOfReach);

  const absl::Status status =
      Report(*rendezvous, round.generation, 0, absl::Milliseconds(100)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(endpoint_.unix_path), HasSubstr("in 100ms"), HasSubstr("tr")));
  EXPECT_EQ(told.size(), 1u);

  server_.reset();
  StartServer();
  RunLoop();
  ASSERT_EQ(told.size(), 2u);
  EXPECT_EQ(told[1], News::Kind::kBackInReach);
  EXPECT_EQ(Report(*rendezvous, round.generation, 0)->decision, Decision::kRestart);
  EXPECT_EQ(Join(*rendezvous)->generation.number, 2u);
}

TEST_F(RedisRendezvousTest, ARequestSurvivesAnOutage) {
  const std::unique_ptr<RedisRendezvous> rendezvous = Open();
  const Round round = *Join(*rendezvous);
  server_->Stop();
  server_.reset();
  loop_->AddTimer(absl::Milliseconds(50), [this] { StartServer(); });
  EXPECT_EQ(Report(*rendezvous, round.generation, 0)->decision, Decision::kRestart);
}

// The greeting takes 300 ms, which is longer than a first attempt.
TEST_F(RedisRendezvousTest, AServerThatIsFarAwayIsReachedAtFirstAndAgain) {
  const testing::DelayingProxy proxy(endpoint_.unix_path, absl::Milliseconds(150));
  RedisRendezvous::Options options = MakeOptions();
  options.endpoint = proxy.endpoint();
  ASSERT_LT(options.first_attempt, absl::Milliseconds(300));
  const std::unique_ptr<RedisRendezvous> rendezvous = Open(options);
  const Round round = *Join(*rendezvous);
  EXPECT_GE(*Redis({"CLIENT", "KILL", "TYPE", "normal"}).AsInteger() +
                *Redis({"CLIENT", "KILL", "TYPE", "pubsub"}).AsInteger(),
            1);
  EXPECT_EQ(Report(*rendezvous, round.generation, 0)->decision, Decision::kRestart);
}

TEST_F(RedisRendezvousTest, AServerThatHangsDoesNotStopTheLoop) {
  RedisRendezvous::Options options = MakeOptions();
  options.reply_timeout = absl::Milliseconds(20);
  options.first_attempt = absl::Milliseconds(20);
  const std::unique_ptr<RedisRendezvous> rendezvous = Open(options);
  ASSERT_EQ(kill(server_->pid(), SIGSTOP), 0);
  int turns = 0;
  std::function<void()> turn = [&] {
    if (++turns == 20) kill(server_->pid(), SIGCONT);
    loop_->AddTimer(absl::Milliseconds(5), turn);
  };
  turn();
  const absl::StatusOr<Round> round = Join(*rendezvous);
  EXPECT_GE(turns, 20);
  // A request that was sent before the hang may have been applied. The retry must not count twice.
  ASSERT_TRUE(round.ok()) << round.status();
  EXPECT_EQ(round->generation.number, 1u);
}

TEST_F(RedisRendezvousTest, ACancelledRequestIsNotAnswered) {
  const std::unique_ptr<RedisRendezvous> rendezvous = Open();
  rendezvous->Ask(JoinRequest{Offer()}, kLong, [](const RendezvousAnswer&) { FAIL(); });
  rendezvous->Cancel();
  EXPECT_TRUE(Leave(*rendezvous).ok());
  rendezvous->Cancel();  // no request is outstanding: does nothing
}

TEST_F(RedisRendezvousTest, EveryKeyIsInTheRunsSlotAndExpires) {
  RedisRendezvous::Options options = MakeOptions();
  options.job.run_id = "a{b}%c";
  const std::unique_ptr<RedisRendezvous> rendezvous = Open(options);
  const Round round = *Join(*rendezvous);
  ASSERT_TRUE(Report(*rendezvous, round.generation, 0).ok());
  ASSERT_TRUE(Complete(*rendezvous, Join(*rendezvous)->generation).ok());
  const store::RedisReply keys = Redis({"KEYS", "*"});
  const absl::Span<const store::RedisReply> names = *keys.AsArray();
  EXPECT_GE(names.size(), 6u);
  for (const store::RedisReply& key : names) {
    EXPECT_THAT(*key.AsString(), StartsWith("ddp:{a%7Bb%7D%25c}:"));
    EXPECT_GT(*Redis({"PTTL", *key.AsString()}).AsInteger(), 0) << *key.AsString();
  }
}

// A node that comes on the second day finds the job.
TEST_F(RedisRendezvousTest, TheCounterOfInstancesLivesAsLongAsTheJob) {
  const std::unique_ptr<RedisRendezvous> rendezvous = Open();
  const std::string counter = "ddp:{digits}:instance";
  const auto next_round = [&](const Round& round) {
    EXPECT_TRUE(Report(*rendezvous, round.generation, 0).ok());
    return *Join(*rendezvous);
  };
  const Round first = *Join(*rendezvous);
  Redis({"PEXPIRE", counter, "60000"});
  const Round second = next_round(first);
  EXPECT_GT(*Redis({"PTTL", counter}).AsInteger(), absl::ToInt64Milliseconds(absl::Hours(23)));
  Redis({"DEL", counter});
  (void)next_round(second);
  EXPECT_EQ(*Redis({"GET", counter}).AsString(), "1");
  EXPECT_EQ(Open()->instance(), 1);
}

TEST_F(RedisRendezvousTest, RefusesARoundThatMakesNoSense) {
  RedisRendezvous::Options options = MakeOptions();
  const std::unique_ptr<RedisRendezvous> rendezvous = Open(options);
  NodeOffer offer = Offer();
  offer.nproc = 0;
  EXPECT_THAT(Join(*rendezvous, offer).status().message(), HasSubstr("a node with 0 workers"));
}

TEST_F(RedisRendezvousTest, SaysWhereItTriedAndForHowLong) {
  server_->Stop();
  RedisRendezvous::Options options = MakeOptions();
  options.connect_timeout = absl::Milliseconds(50);
  const absl::Status status = RedisRendezvous::Open(options, loop_.get()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr(endpoint_.unix_path));
}

TEST_F(RedisRendezvousTest, SaysThatAServerIsTooOld) {
  testing::ScriptedRedisServer old(
      {{"+OK\r\n+PONG\r\n-ERR unknown command `HELLO`, with args beginning with: `3`\r\n"}});
  RedisRendezvous::Options options = MakeOptions();
  options.endpoint = old.endpoint();
  const absl::Status status = RedisRendezvous::Open(options, loop_.get()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(old.endpoint().unix_path), HasSubstr("use Redis 6 or newer"),
                    Not(HasSubstr("\n"))));
}

TEST_F(RedisRendezvousTest, SaysThatAPasswordIsNeeded) {
  server_->Stop();
  server_.reset();
  StartServer({"requirepass open-sesame"});
  endpoint_.password = "";
  const absl::Status status = RedisRendezvous::Open(MakeOptions(), loop_.get()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
  endpoint_.password = "open-sesame";
  const std::unique_ptr<RedisRendezvous> rendezvous = Open();
  EXPECT_THAT(Join(*rendezvous)->store_url, Not(HasSubstr("sesame")));
}

}  // namespace
}  // namespace ddp::elastic
