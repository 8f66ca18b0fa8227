// Several nodes on a real Redis, each with its own connection. testing/scenarios/rendezvous tests
// the rules themselves.
//
// Length: all cases share the fixture, which runs several nodes on one event loop.
#include <stdio.h>
#include <stdlib.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "base/event_loop.h"
#include "elastic/rendezvous/redis_rendezvous.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/rendezvous_scripts.h"
#include "elastic/rendezvous/round.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/wire/redis_reply.h"
#include "store/redis_server/redis_acl.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;
using Decision = FailureVerdict::Decision;

// Timeout of a request; a passing test never waits for it.
constexpr absl::Duration kLong = absl::Seconds(60);
// With this lease heartbeats come too late for any test, so every notification was pushed.
constexpr absl::Duration kSlowLease = absl::Hours(1);
// Short enough to wait for, long enough for a machine under load.
constexpr absl::Duration kShortLease = absl::Milliseconds(900);

class NodesTest : public ::testing::Test {
 protected:
  // An agent's rendezvous, and the notifications that it received.
  struct Node {
    std::unique_ptr<RedisRendezvous> rendezvous;
    std::optional<RendezvousAnswer> joined;
    std::vector<News> news;
    std::string host;

    const Round& round() const { return std::get<Round>(**joined); }
  };

  NodesTest() : redis_(testing::RedisFixture::Start()), loop_(*EventLoop::Create()) {
    options_.endpoint = redis_->endpoint();
    options_.job.run_id = "digits";
    options_.job.limits.max_restarts = 5;
    options_.job.limits.min_nodes = 1;
    options_.job.limits.max_nodes = 2;
    options_.job.rules.lease = kSlowLease;
  }

  std::unique_ptr<Node> MakeNode(const std::string& host) {
    auto node = std::make_unique<Node>();
    node->host = host;
    absl::StatusOr<std::unique_ptr<RedisRendezvous>> opened =
        RedisRendezvous::Open(options_, loop_.get());
    EXPECT_TRUE(opened.ok()) << opened.status();
    node->rendezvous = *std::move(opened);
    node->rendezvous->Watch([this, told = &node->news](const News& news) {
      told->push_back(news);
      Look();
    });
    return node;
  }

  // Runs the loop until `done` returns true; checks it after each notification.
  void RunUntil(std::function<bool()> done, const char* what) {
    if (done()) return;
    until_ = std::move(done);
    const EventLoop::TimerId guard = loop_->AddTimer(kLong, [what] {
      ADD_FAILURE() << "in vain waited for: " << what;
      abort();
    });
    ASSERT_TRUE(loop_->Run().ok());
    loop_->CancelTimer(guard);
    until_ = nullptr;
  }
  void Look() {
    if (until_ && until_()) loop_->Stop();
  }

  void StartJoin(Node& node) {
    node.joined.reset();
    const NodeOffer offer = {.nproc = 2,
                             .role = "default",
                             .host = node.host,
                             .master_addr = "127.0.0.1",
                             .master_port = 20'000};
    node.rendezvous->Ask(JoinRequest{offer}, kLong, [this, &node](const RendezvousAnswer& answer) {
      EXPECT_TRUE(answer.ok()) << answer.status();
      node.joined = answer;
      Look();
    });
  }

  void JoinAll(const std::vector<Node*>& nodes) {
    for (Node* node : nodes) StartJoin(*node);
    RunUntil(
        [&] {
          for (Node* node : nodes) {
            if (!node->joined.has_value()) return false;
          }
          return true;
        },
        "all to be in");
  }

  RendezvousAnswer Await(Node& node, const RendezvousRequest& request) {
    std::optional<RendezvousAnswer> answer;
    node.rendezvous->Ask(request, kLong, [&](const RendezvousAnswer& given) {
      answer = given;
      Look();
    });
    RunUntil([&] { return answer.has_value(); }, "an answer");
    return *std::move(answer);
  }

  absl::StatusOr<FailureVerdict> Fail(Node& node, const std::string& cause) {
    return AnswerAs<FailureVerdict>(Await(
        node, FailureRequest{.generation = node.round().generation, .rank = 1, .cause = cause}));
  }
  absl::Status Complete(Node& node) {
    return Await(node, CompleteRequest{node.round().generation}).status();
  }
  absl::Status Drain(Node& node, const std::string& cause) {
    return Await(node, DrainRequest{node.round().generation, cause}).status();
  }
  absl::Status Leave(Node& node) { return Await(node, LeaveRequest{}).status(); }
  absl::Status TakeBack(Node& node, const GenerationId& reported) {
    node.rendezvous->Cancel();
    return Await(node, TakeBackRequest{reported}).status();
  }
  absl::Status Close(Node& node, const std::string& reason) {
    return Await(node, CloseRequest{{JobEnd::Kind::kClosed, reason, 1}}).status();
  }

  void AwaitNews(Node& node, News::Kind kind) {
    RunUntil(
        [&] {
          for (const News& news : node.news) {
            if (news.kind == kind) return true;
          }
          return false;
        },
        "news");
  }

  store::RedisReply Redis(const std::vector<std::string>& command) {
    absl::StatusOr<store::RedisReply> reply = redis_->Connect()->Command(command);
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.value_or(store::RedisReply());
  }

  // Returns the server's ids of the agents' connections.
  std::set<int64_t> Connections() {
    std::set<int64_t> ids;
    const std::string list = *Redis({"CLIENT", "LIST"}).AsString();
    for (const auto& line : absl::StrSplit(list, '\n')) {
      int64_t id = 0;
      if (!absl::StrContains(line, " name=ddprun ")) continue;
      EXPECT_EQ(sscanf(std::string(line).c_str(), "id=%ld", &id), 1) << line;
      ids.insert(id);
    }
    return ids;
  }

  const std::unique_ptr<testing::RedisFixture> redis_;
  const std::unique_ptr<EventLoop> loop_;
  RedisRendezvous::Options options_;
  std::function<bool()> until_;
};

TEST_F(NodesTest, AFailureIsPushedToAll) {
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  EXPECT_EQ(a->round().placement.world_size, 4);
  EXPECT_NE(a->round().placement.group_rank, b->round().placement.group_rank);
  ASSERT_EQ(Fail(*b, "rank 3 was killed by SIGKILL")->decision, Decision::kRestart);
  AwaitNews(*a, News::Kind::kGenerationOver);
  EXPECT_EQ(a->news.back().generation, a->round().generation);
  EXPECT_EQ(a->news.back().cause, "rank 3 was killed by SIGKILL");
  EXPECT_TRUE(b->news.empty()) << "it knows";
  JoinAll({a.get(), b.get()});
  EXPECT_EQ(a->round().generation.number, 2u);
  EXPECT_EQ(a->round().restarts, 1);
  EXPECT_EQ(b->round().restarts, 1);
}

TEST_F(NodesTest, WhatIsToldWhileAConnectionIsBrokenIsNotMissed) {
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  EXPECT_EQ(*Redis({"CLIENT", "KILL", "TYPE", "pubsub"}).AsInteger(), 2);
  ASSERT_EQ(Fail(*b, "rank 3 failed")->decision, Decision::kRestart);
  AwaitNews(*a, News::Kind::kGenerationOver);
}

TEST_F(NodesTest, AnAgentHasOneConnectionAlways) {
  const auto a = MakeNode("a"), b = MakeNode("b");
  const std::set<int64_t> opened = Connections();
  EXPECT_EQ(opened.size(), 2u);
  JoinAll({a.get(), b.get()});
  EXPECT_EQ(Connections(), opened);
  ASSERT_EQ(Fail(*b, "rank 3 failed")->decision, Decision::kRestart);
  AwaitNews(*a, News::Kind::kGenerationOver);
  EXPECT_EQ(Connections(), opened);

  a->news.clear();
  for (const int64_t id : opened) Redis({"CLIENT", "KILL", "ID", absl::StrCat(id)});
  // The connections come back by themselves, without a request.
  std::function<void()> look = [&] {
    if (*(*Redis({"PUBSUB", "NUMSUB", "ddp:{digits}:i1:news"}).AsArray())[1].AsInteger() == 2) {
      return loop_->Stop();
    }
    loop_->AddTimer(absl::Milliseconds(1), look);
  };
  look();
  ASSERT_TRUE(loop_->Run().ok());
  JoinAll({a.get(), b.get()});
  const std::set<int64_t> again = Connections();
  EXPECT_EQ(again.size(), 2u);
  for (const int64_t id : again) EXPECT_EQ(opened.count(id), 0u) << id;
  ASSERT_EQ(Fail(*b, "rank 2 failed")->decision, Decision::kRestart);
  AwaitNews(*a, News::Kind::kGenerationOver);
  EXPECT_EQ(Connections(), again);
}

TEST_F(NodesTest, ADrainIsPushedToAllAndFreeOfCharge) {
  options_.job.limits.max_restarts = 0;
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  ASSERT_TRUE(Drain(*b, "node b leaves (SIGTERM)").ok());
  AwaitNews(*a, News::Kind::kDrain);
  AwaitNews(*b, News::Kind::kDrain);
  EXPECT_EQ(a->news.back().cause, "node b leaves (SIGTERM)");
  EXPECT_EQ(a->news.back().stop_at_step, -1) << "nobody has said how far it is";
  StartJoin(*a);
  ASSERT_TRUE(Leave(*b).ok());
  RunUntil([&] { return a->joined.has_value(); }, "a to go on");
  EXPECT_EQ(a->round().placement.group_world_size, 1);
  EXPECT_EQ(a->round().restarts, 0);
  EXPECT_FALSE(a->round().charged);
}

TEST_F(NodesTest, ClosingEndsTheJobForAll) {
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  ASSERT_TRUE(Close(*b, "node b: there is no program ./train").ok());
  AwaitNews(*a, News::Kind::kJobEnded);
  EXPECT_EQ(a->news.back().end,
            (JobEnd{JobEnd::Kind::kClosed, "node b: there is no program ./train", 1}));
  StartJoin(*a);
  RunUntil([&] { return a->joined.has_value(); }, "the end");
  EXPECT_TRUE(std::holds_alternative<JobEnd>(**a->joined));
}

TEST_F(NodesTest, TheLastToCompleteEndsTheJobForAll) {
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  EXPECT_TRUE(Complete(*a).ok());
  EXPECT_TRUE(a->news.empty());
  EXPECT_TRUE(Complete(*b).ok());
  AwaitNews(*a, News::Kind::kJobEnded);
  AwaitNews(*b, News::Kind::kJobEnded);
  EXPECT_EQ(a->news.back().end.kind, JobEnd::Kind::kSucceeded);
}

TEST_F(NodesTest, ASpareIsPromoted) {
  options_.job.limits.min_nodes = 2;
  const auto a = MakeNode("a"), b = MakeNode("b"), c = MakeNode("c");
  JoinAll({a.get(), b.get()});
  StartJoin(*c);
  ASSERT_TRUE(Leave(*b).ok());
  AwaitNews(*a, News::Kind::kGenerationOver);
  StartJoin(*a);
  RunUntil([&] { return a->joined.has_value() && c->joined.has_value(); }, "both to be in");
  EXPECT_EQ(a->round().generation, c->round().generation);
  EXPECT_EQ(a->round().reason, "node b left");
}

// Agents without a run id: the seat of a killed node is free once its lease has run out. By then
// the node may have come back and opened a job of its own, which no other node will join.
TEST_F(NodesTest, ANodeThatWaitsAloneGoesToAnOlderJobOfItsKind) {
  options_.job.rules.lease = kShortLease;
  options_.job.limits.min_nodes = 2;
  options_.job.fingerprint = "train";
  const auto a = MakeNode("a");
  auto b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  b.reset();
  const auto again = MakeNode("b");
  EXPECT_NE(again->rendezvous->instance(), a->rendezvous->instance()) << "the job was full";
  StartJoin(*again);
  AwaitNews(*a, News::Kind::kGenerationOver);
  StartJoin(*a);
  RunUntil([&] { return a->joined.has_value() && again->joined.has_value(); }, "both to be in");
  EXPECT_EQ(again->rendezvous->instance(), a->rendezvous->instance());
  EXPECT_EQ(a->round().generation, again->round().generation);
  EXPECT_EQ(a->round().restarts, 0);
}

// All nodes have opened the same instance before the first one joins.
TEST_F(NodesTest, AJobWithoutAnIdTakesInAgentsUntilItIsFull) {
  options_.job.limits.min_nodes = 2;
  options_.job.fingerprint = "train";
  const auto a = MakeNode("a"), b = MakeNode("b"), c = MakeNode("c"), d = MakeNode("d");
  ASSERT_EQ(d->rendezvous->instance(), a->rendezvous->instance());
  JoinAll({a.get(), b.get(), c.get(), d.get()});
  std::map<std::string, int> nodes_by_run_id;
  std::map<std::string, std::set<std::string>> nonces_by_run_id;
  for (const Node* node : {a.get(), b.get(), c.get(), d.get()}) {
    EXPECT_EQ(node->round().placement.group_world_size, 2);
    ++nodes_by_run_id[node->round().run_id];
    nonces_by_run_id[node->round().run_id].insert(node->round().generation.nonce);
  }
  EXPECT_EQ(nodes_by_run_id.size(), 2u) << "each job has a run id of its own";
  for (const auto& [run_id, nodes] : nodes_by_run_id) {
    EXPECT_EQ(nodes, 2) << run_id;
    EXPECT_EQ(nonces_by_run_id[run_id].size(), 1u) << run_id << " is one job";
    EXPECT_TRUE(absl::StartsWith(run_id, "digits-")) << run_id;
    EXPECT_EQ(run_id.find(std::string(*Redis({"HGET", "ddp:{digits}:i1:job", "token"}).AsString())),
              std::string::npos)
        << "the token stays secret";
  }
  // The job's name does not change in a restart.
  const std::string run_id = a->round().run_id;
  std::vector<Node*> job;
  for (Node* node : {a.get(), b.get(), c.get(), d.get()}) {
    if (node->round().run_id == run_id) job.push_back(node);
  }
  ASSERT_TRUE(Fail(*a, "rank 0 failed").ok());
  JoinAll(job);
  EXPECT_EQ(a->round().run_id, run_id);
}

TEST_F(NodesTest, ANewcomerPrefersAJobThatRunsToOneThatWaits) {
  options_.job.rules.lease = kShortLease;
  options_.job.limits.max_nodes = 3;
  options_.job.limits.min_nodes = 2;
  options_.job.fingerprint = "train";
  const auto a = MakeNode("a"), b = MakeNode("b"), c = MakeNode("c");
  JoinAll({a.get(), b.get(), c.get()});
  const auto waiting = MakeNode("d");
  ASSERT_NE(waiting->rendezvous->instance(), a->rendezvous->instance());
  ASSERT_TRUE(Leave(*c).ok());
  EXPECT_EQ(MakeNode("e")->rendezvous->instance(), a->rendezvous->instance());
}

TEST_F(NodesTest, AReportThatIsTakenBackIsTheLossOfItsNode) {
  options_.job.limits.max_restarts = 0;
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  ASSERT_EQ(Fail(*b, "rank 2 was killed by SIGKILL")->decision, Decision::kRestart);
  AwaitNews(*a, News::Kind::kGenerationOver);
  const GenerationId reported = b->round().generation;
  StartJoin(*b);
  ASSERT_TRUE(TakeBack(*b, reported).ok());
  JoinAll({a.get()});
  EXPECT_EQ(a->round().placement.group_world_size, 1);
  EXPECT_EQ(a->round().reason, "node b was lost");
  EXPECT_FALSE(a->round().charged);
  ASSERT_EQ(Fail(*a, "rank 0 failed")->decision, Decision::kEnded) << "nothing was left to spend";
}

TEST_F(NodesTest, AReportIsTakenBackAlsoWhenItWasCharged) {
  options_.job.limits.max_restarts = 1;
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  const GenerationId reported = b->round().generation;
  ASSERT_TRUE(Fail(*b, "rank 2 was killed by SIGKILL").ok());
  JoinAll({a.get(), b.get()});
  ASSERT_TRUE(a->round().charged);
  ASSERT_TRUE(TakeBack(*b, reported).ok());
  JoinAll({a.get()});
  EXPECT_EQ(a->round().reason, "node b was lost");
  ASSERT_EQ(Fail(*a, "rank 0 failed")->decision, Decision::kRestart) << "it was given back, once";
  JoinAll({a.get()});
  ASSERT_EQ(Fail(*a, "rank 0 failed")->decision, Decision::kEnded);
}

// The report is not taken back, so the end comes a moment later, for all nodes.
TEST_F(NodesTest, AReportThatSpendsTheBudgetEndsTheJob) {
  options_.job.limits.max_restarts = 0;
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  ASSERT_EQ(Fail(*b, "rank 2 was killed by SIGKILL")->decision, Decision::kRestart);
  JoinAll({a.get(), b.get()});
  for (const Node* node : {a.get(), b.get()}) {
    ASSERT_TRUE(std::holds_alternative<JobEnd>(**node->joined));
    EXPECT_EQ(std::get<JobEnd>(**node->joined).kind, JobEnd::Kind::kBudgetSpent);
  }
}

TEST_F(NodesTest, ALostNodeIsNoticedByTheOthers) {
  options_.job.rules.lease = kShortLease;
  options_.job.limits.max_restarts = 0;
  const auto a = MakeNode("a");
  auto b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  b.reset();
  AwaitNews(*a, News::Kind::kGenerationOver);
  EXPECT_EQ(a->news.back().cause, "node b was lost");
  JoinAll({a.get()});
  EXPECT_EQ(a->round().placement.group_world_size, 1);
  EXPECT_EQ(a->round().restarts, 0);
}

// A script gives up 500 nodes at most, so several scripts are needed.
TEST_F(NodesTest, NodesThatAreLostByTheThousandAreAllGivenUp) {
  options_.job.rules.lease = kShortLease;
  options_.job.limits.max_nodes = 1;
  const auto a = MakeNode("a");
  JoinAll({a.get()});
  const std::string prefix = "ddp:{digits}:i1:";
  std::vector<std::string> members = {"HSET", prefix + "members"};
  std::vector<std::string> awaited = {"SADD", prefix + "awaited"};
  std::vector<std::string> leases = {"ZADD", prefix + "leases"};
  for (int i = 1; i <= 1200; ++i) {
    const std::string node = absl::StrCat("node-", i);
    members.push_back(node);
    members.push_back(absl::StrCat(i, " 1201 2 ", 2 * i, " 2402 ", 2 * i,
                                   " 2402 20000\ndefault\nhost-", i, "\n127.0.0.1"));
    awaited.push_back(node);
    leases.push_back("1");  // the lease ran out a millisecond after the epoch
    leases.push_back(node);
  }
  for (const auto& command : {members, awaited, leases}) Redis(command);
  AwaitNews(*a, News::Kind::kGenerationOver);
  JoinAll({a.get()});
  EXPECT_EQ(a->round().placement.group_world_size, 1);
  EXPECT_EQ(a->round().restarts, 0);
  EXPECT_EQ(*Redis({"ZCARD", prefix + "leases"}).AsInteger(), 1);
  EXPECT_EQ(*Redis({"HLEN", prefix + "members"}).AsInteger(), 1);
}

TEST_F(NodesTest, AServerThatComesBackEmptyInterruptsNothing) {
  options_.job.rules.lease = kShortLease;
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  ASSERT_TRUE(Fail(*b, "rank 2 failed").ok());
  JoinAll({a.get(), b.get()});
  a->news.clear();
  b->news.clear();
  redis_->Kill();
  AwaitNews(*a, News::Kind::kOutOfReach);
  AwaitNews(*b, News::Kind::kOutOfReach);
  redis_->Restart();
  AwaitNews(*a, News::Kind::kBackInReach);
  AwaitNews(*b, News::Kind::kBackInReach);
  // Both nodes have registered again before the frozen time ends; else one would be lost.
  ASSERT_EQ(Fail(*a, "rank 0 failed")->decision, Decision::kRestart);
  JoinAll({a.get(), b.get()});
  EXPECT_EQ(a->round().generation.number, 3u);
  EXPECT_EQ(a->round().placement.group_world_size, 2);
  EXPECT_EQ(a->round().restarts, 2) << "what was charged stays charged";
  EXPECT_EQ(a->round().generation, b->round().generation);
}

TEST_F(NodesTest, AFailOverThatLosesTheLastWritesDoesNotTakeAGenerationBack) {
  options_.job.rules.lease = kShortLease;
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  std::map<std::string, std::string> dump;
  const store::RedisReply keys = Redis({"KEYS", "*"});
  const absl::Span<const store::RedisReply> names = *keys.AsArray();
  for (const store::RedisReply& key : names) {
    dump[*key.AsString()] = *Redis({"DUMP", *key.AsString()}).AsString();
  }
  ASSERT_TRUE(Fail(*b, "rank 2 failed").ok());
  JoinAll({a.get(), b.get()});
  const GenerationId second = a->round().generation;
  Redis({"FLUSHALL"});
  for (const auto& [key, value] : dump) Redis({"RESTORE", key, "0", value});
  EXPECT_EQ(*Redis({"HGET", "ddp:{digits}:i1:job", "generation"}).AsString(), "1");
  ASSERT_EQ(Fail(*a, "rank 0 failed")->decision, Decision::kRestart);
  JoinAll({a.get(), b.get()});
  EXPECT_EQ(a->round().generation.number, 3u);
  EXPECT_NE(a->round().generation.nonce, second.nonce);
  EXPECT_EQ(a->round().restarts, 2);
}

TEST_F(NodesTest, StepsOfTheJobDecideWhereADrainStops) {
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  a->rendezvous->SetReport({.step = 40, .steps_per_second = 0});
  // The next heartbeat is far away. A restored subscription sends one at once.
  Redis({"CLIENT", "KILL", "TYPE", "pubsub"});
  std::function<void()> look = [&] {
    if (*Redis({"HGET", "ddp:{digits}:i1:job", "max_step"}).AsString() == "40")
      return loop_->Stop();
    loop_->AddTimer(absl::Milliseconds(1), look);
  };
  look();
  ASSERT_TRUE(loop_->Run().ok());
  ASSERT_TRUE(Drain(*b, "node b leaves").ok());
  AwaitNews(*a, News::Kind::kDrain);
  AwaitNews(*b, News::Kind::kDrain);
  EXPECT_EQ(a->news.back().stop_at_step, 42);
  EXPECT_EQ(b->news.back().stop_at_step, 42);
}

TEST_F(NodesTest, EveryNodeKnowsWhichRankWorksWhileItsOwnWait) {
  options_.job.rules.heartbeat = absl::Milliseconds(20);
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  const auto await = [this, &b](bool works) {
    std::function<void()> look = [&] {
      if (b->rendezvous->at_work().has_value() == works) return loop_->Stop();
      loop_->AddTimer(absl::Milliseconds(1), look);
    };
    look();
    ASSERT_TRUE(loop_->Run().ok());
  };
  a->rendezvous->SetReport(
      {.at_work = RankAtWork{.rank = 1, .phase = "evaluation", .stalled_for = absl::Hours(1)}});
  await(true);
  EXPECT_EQ(b->rendezvous->at_work()->rank, 1);
  EXPECT_EQ(b->rendezvous->at_work()->phase, "evaluation");
  EXPECT_GE(b->rendezvous->at_work()->stalled_for, absl::Hours(1));
  EXPECT_EQ(b->rendezvous->at_work()->host, a->host);
  a->rendezvous->SetReport({});
  await(false);
}

// Permissions of a job's Redis user.
// --------------------------------------------------

class AclTest : public NodesTest {
 protected:
  AclTest() {
    std::vector<std::string> command = {"ACL", "SETUSER", "job", "on", ">secret"};
    for (const auto& rule : absl::StrSplit(store::JobAclRules("di{g}*ts"), ' ')) {
      command.emplace_back(rule);
    }
    EXPECT_EQ(*Redis(command).AsString(), "OK");
    options_.job.run_id = "di{g}*ts";
    options_.endpoint.user = "job";
    options_.endpoint.password = "secret";
  }

  absl::Status Try(const std::vector<std::string>& command) {
    absl::StatusOr<std::unique_ptr<store::RedisConnection>> connection =
        store::RedisConnection::Connect(options_.endpoint);
    EXPECT_TRUE(connection.ok()) << connection.status();
    return (*connection)->Command(command).status();
  }
};

TEST_F(AclTest, AJobsUserMayDoAllThatAJobDoes) {
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  ASSERT_TRUE(Fail(*b, "rank 2 failed").ok());
  AwaitNews(*a, News::Kind::kGenerationOver);
  JoinAll({a.get(), b.get()});
  ASSERT_TRUE(Drain(*b, "node b leaves").ok());
  StartJoin(*a);
  ASSERT_TRUE(Leave(*b).ok());
  RunUntil([&] { return a->joined.has_value(); }, "a to go on");
  EXPECT_TRUE(Complete(*a).ok());
  const std::string key = "ddp:{di%7Bg%7D*ts}:i1:g1.n:store:x";
  EXPECT_TRUE(Try({"HSET", key, "field", "value"}).ok());
  EXPECT_TRUE(Try({"HGET", key, "field"}).ok());
  EXPECT_TRUE(Try({"PUBLISH", key + ":pushed", "x"}).ok());
}

TEST_F(AclTest, AJobsUserCannotReachAnotherJob) {
  const auto refused = [this](const std::vector<std::string>& command) {
    EXPECT_EQ(Try(command).code(), absl::StatusCode::kPermissionDenied) << command[0];
  };
  for (const std::string& other :
       std::vector<std::string>{"ddp:{other}:i1:job", "ddp:{di%7Bg%7D-ts}:i1:job", "other"}) {
    refused({"GET", other});
    refused({"HGETALL", other});
    refused({"SET", other, "x"});
    refused({"DEL", other});
    refused({"EVAL", "return redis.call('GET', KEYS[1])", "1", other});
    refused({"RENAME", other, "ddp:{di%7Bg%7D*ts}:x"});
    refused({"SUBSCRIBE", other});
    refused({"PUBLISH", other, "x"});
    // The server also checks keys that a script does not declare.
    const absl::Status hidden =
        Try({"EVAL", absl::StrCat("return redis.call('GET', '", other, "')"), "0"});
    EXPECT_FALSE(hidden.ok()) << other;
  }
}

TEST_F(AclTest, AnotherIdThanTheUsersIsNamedWithTheCure) {
  options_.job.run_id = "other";
  const absl::Status status = RedisRendezvous::Open(options_, loop_.get()).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
  for (const char* text : {"user 'job'", "id 'other'", "--rdzv-id", "DDP_REDIS_USER"}) {
    EXPECT_NE(status.message().find(text), std::string::npos) << text << " in: " << status;
  }
  EXPECT_EQ(status.message().find('\n'), std::string::npos);
}

TEST_F(AclTest, AJobsUserIsNoAdministrator) {
  for (const std::vector<std::string>& command :
       std::vector<std::vector<std::string>>{{"CONFIG", "GET", "*"},
                                             {"MODULE", "LIST"},
                                             {"SAVE"},
                                             {"SHUTDOWN"},
                                             {"FLUSHALL"},
                                             {"FLUSHDB"},
                                             {"KEYS", "*"},
                                             {"SCAN", "0"},
                                             {"ACL", "LIST"},
                                             {"CLIENT", "LIST"},
                                             {"CLIENT", "KILL", "TYPE", "normal"},
                                             {"SCRIPT", "FLUSH"},
                                             {"PSUBSCRIBE", "*"},
                                             {"MONITOR"},
                                             {"REPLICAOF", "NO", "ONE"},
                                             {"MIGRATE", "h", "1", "k", "0", "1"},
                                             {"DUMP", "ddp:{di%7Bg%7D*ts}:x"}}) {
    EXPECT_EQ(Try(command).code(), absl::StatusCode::kPermissionDenied) << command[0];
  }
}

TEST_F(AclTest, TheUserOfAllJobsReachesNothingElse) {
  std::vector<std::string> command = {"ACL", "SETUSER", "job"};
  for (const auto& rule : absl::StrSplit(store::AllJobsAclRules(), ' ')) {
    command.emplace_back(rule);
  }
  EXPECT_EQ(*Redis(command).AsString(), "OK");
  options_.job.run_id = "another";
  // The user may not send a script's source, so the server must know the scripts already.
  const absl::Status unknown = RedisRendezvous::Open(options_, loop_.get()).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(unknown)) << unknown;
  EXPECT_NE(unknown.message().find("of all nodes from one version"), std::string::npos) << unknown;
  EXPECT_EQ(unknown.message().find("--rdzv-id"), std::string::npos) << unknown;
  const RendezvousScripts scripts;
  for (int i = 0; i < kScriptCount; ++i) {
    (void)Redis({"SCRIPT", "LOAD", scripts[static_cast<ScriptName>(i)].source()});
  }
  const auto a = MakeNode("a"), b = MakeNode("b");
  JoinAll({a.get(), b.get()});
  EXPECT_TRUE(Try({"GET", "ddp:{other}:instance"}).ok());
  EXPECT_EQ(Try({"GET", "other"}).code(), absl::StatusCode::kPermissionDenied);
}

}  // namespace
}  // namespace ddp::elastic
