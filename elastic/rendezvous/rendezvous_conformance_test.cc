// The contract of Rendezvous, tested on the Redis implementation and on the fake that the agent's
// tests use.
#include <stdlib.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/event_loop.h"
#include "elastic/rendezvous/redis_rendezvous.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"
#include "gtest/gtest.h"
#include "store/redis_server/private_redis_server.h"
#include "testing/fake_rendezvous.h"

namespace ddp::elastic {
namespace {

using Decision = FailureVerdict::Decision;

constexpr absl::Duration kLong = absl::Seconds(30);
constexpr int kMaxRestarts = 1;

class RendezvousConformanceTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<EventLoop>> loop = EventLoop::Create();
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
    loop_->AddTimer(2 * kLong, [] {
      ADD_FAILURE() << "a request was not answered";
      abort();
    });
    if (std::string(GetParam()) == "Fake") {
      rendezvous_ = std::make_unique<ddp::testing::FakeRendezvous>(loop_.get(), kMaxRestarts);
      return;
    }
    absl::StatusOr<std::unique_ptr<store::PrivateRedisServer>> server =
        store::PrivateRedisServer::Start();
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    RedisRendezvous::Options options;
    options.endpoint = server_->endpoint();
    options.job.run_id = "digits";
    options.job.limits.max_restarts = kMaxRestarts;
    absl::StatusOr<std::unique_ptr<RedisRendezvous>> rendezvous =
        RedisRendezvous::Open(options, loop_.get());
    ASSERT_TRUE(rendezvous.ok()) << rendezvous.status();
    rendezvous_ = *std::move(rendezvous);
  }

  // Makes the request, and runs the loop until it has been answered.
  RendezvousAnswer Await(const RendezvousRequest& request) {
    std::optional<RendezvousAnswer> answer;
    rendezvous_->Ask(request, kLong, [&](const RendezvousAnswer& given) {
      answer = given;
      loop_->Stop();
    });
    EXPECT_FALSE(answer.has_value()) << "answered from within the request";
    while (!answer.has_value()) EXPECT_TRUE(loop_->Run().ok());  // notifications stop the loop too
    return *std::move(answer);
  }

  absl::StatusOr<Round> Join() {
    RendezvousAnswer answer = Await(JoinRequest{Offer()});
    if (!answer.ok()) return answer.status();
    if (const JobEnd* end = std::get_if<JobEnd>(&*answer)) {
      return absl::FailedPreconditionError(JobEndName(end->kind));
    }
    return std::get<Round>(*std::move(answer));
  }

  absl::StatusOr<FailureVerdict> Report(const GenerationId& generation, int rank) {
    return AnswerAs<FailureVerdict>(Await(FailureRequest{
        .generation = generation, .rank = rank, .cause = absl::StrCat("rank ", rank, " failed")}));
  }

  absl::Status Complete(const GenerationId& generation) {
    return Await(CompleteRequest{generation}).status();
  }

  absl::Status Leave() { return Await(LeaveRequest{}).status(); }

  absl::Status Drain(const GenerationId& generation) {
    return Await(DrainRequest{generation, "the host goes away"}).status();
  }

  absl::Status Close(const JobEnd& end) { return Await(CloseRequest{end}).status(); }

  // Runs the loop until `kind` is notified, and returns the notification.
  News AwaitNews(News::Kind kind) {
    for (;;) {
      for (const News& news : news_) {
        if (news.kind == kind) return news;
      }
      EXPECT_TRUE(loop_->Run().ok());
    }
  }
  // Keeps the notifications from now on.
  void Watch() {
    rendezvous_->Watch([this](const News& news) {
      news_.push_back(news);
      loop_->Stop();
    });
  }

  static NodeOffer Offer() {
    return {.nproc = 2, .role = "default", .master_addr = "127.0.0.1", .master_port = 20'000};
  }

  std::unique_ptr<store::PrivateRedisServer> server_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Rendezvous> rendezvous_;
  std::vector<News> news_;
};

TEST_P(RendezvousConformanceTest, TheFirstRoundIsGenerationOne) {
  const absl::StatusOr<Round> round = Join();
  ASSERT_TRUE(round.ok()) << round.status();
  EXPECT_TRUE(ValidatePlacement(round->placement).ok());
  EXPECT_EQ(round->generation.number, 1u);
  EXPECT_FALSE(round->generation.nonce.empty());
  EXPECT_EQ(round->restarts, 0);
  EXPECT_EQ(round->placement.world_size, Offer().nproc);
  EXPECT_EQ(round->placement.group_rank, 0);
  EXPECT_TRUE(Complete(round->generation).ok());
  EXPECT_TRUE(Leave().ok());
}

TEST_P(RendezvousConformanceTest, AFailureLeadsToANewGenerationWithNothingOfTheOld) {
  const Round first = *Join();
  const absl::StatusOr<FailureVerdict> verdict = Report(first.generation, 1);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_EQ(verdict->decision, Decision::kRestart);
  const Round second = *Join();
  EXPECT_EQ(second.generation.number, 2u);
  EXPECT_NE(second.generation.nonce, first.generation.nonce);
  EXPECT_NE(second.store_url, first.store_url);
  EXPECT_EQ(second.restarts, 1);
  EXPECT_EQ(second.reason, "rank 1 failed");
  EXPECT_TRUE(second.charged);
}

TEST_P(RendezvousConformanceTest, TheFirstFailureOfAGenerationDecides) {
  const Round round = *Join();
  for (int rank : {1, 0}) {
    const absl::StatusOr<FailureVerdict> verdict = Report(round.generation, rank);
    ASSERT_TRUE(verdict.ok()) << verdict.status();
    EXPECT_EQ(verdict->decision, Decision::kRestart);
  }
  EXPECT_EQ(Complete(round.generation).code(), absl::StatusCode::kAborted);
}

TEST_P(RendezvousConformanceTest, ASpentBudgetEndsTheJob) {
  ASSERT_TRUE(Report(Join()->generation, 0).ok());
  const absl::StatusOr<FailureVerdict> verdict = Report(Join()->generation, 0);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_EQ(verdict->decision, Decision::kEnded);
  EXPECT_EQ(Join().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(RendezvousConformanceTest, ACompletedJobEndsToo) {
  ASSERT_TRUE(Complete(Join()->generation).ok());
  EXPECT_EQ(Join().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(RendezvousConformanceTest, TheEndOfTheJobIsTold) {
  Watch();
  ASSERT_TRUE(Complete(Join()->generation).ok());
  EXPECT_EQ(AwaitNews(News::Kind::kJobEnded).end.kind, JobEnd::Kind::kSucceeded);
  EXPECT_EQ(news_.size(), 1u);
}

TEST_P(RendezvousConformanceTest, ADrainIsToldOnceAndWhatFollowsIsFree) {
  Watch();
  const Round first = *Join();
  ASSERT_TRUE(Drain(first.generation).ok());
  ASSERT_TRUE(Drain(first.generation).ok()) << "sent again";
  const News news = AwaitNews(News::Kind::kDrain);
  EXPECT_EQ(news.generation, first.generation);
  EXPECT_EQ(news.cause, "the host goes away");
  ASSERT_EQ(Report(first.generation, 0)->decision, Decision::kRestart);
  const Round second = *Join();
  EXPECT_EQ(second.restarts, 0);
  EXPECT_FALSE(second.charged);
  EXPECT_EQ(second.reason, "the host goes away");
  EXPECT_EQ(Drain(first.generation).code(), absl::StatusCode::kAborted) << "over already";
  EXPECT_EQ(news_.size(), 1u);
}

TEST_P(RendezvousConformanceTest, WhoClosesTheJobEndsIt) {
  const JobEnd end = {JobEnd::Kind::kClosed, "there is no program ./train", 127};
  const GenerationId generation = Join()->generation;
  ASSERT_TRUE(Close(end).ok());
  ASSERT_TRUE(Close({JobEnd::Kind::kClosed, "another reason", 1}).ok());
  const absl::StatusOr<FailureVerdict> verdict = Report(generation, 0);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_EQ(verdict->decision, Decision::kEnded);
  EXPECT_EQ(verdict->end, end) << "the first end counts";
  EXPECT_EQ(Join().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(RendezvousConformanceTest, WhatComesFromAnEarlierGenerationIsRefused) {
  const Round first = *Join();
  ASSERT_TRUE(Report(first.generation, 0).ok());
  const Round second = *Join();
  EXPECT_EQ(Report(first.generation, 0)->decision, Decision::kStale);
  EXPECT_EQ(Complete(first.generation).code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(Complete(second.generation).ok());
}

TEST_P(RendezvousConformanceTest, ACancelledRequestIsNotAnswered) {
  rendezvous_->Ask(JoinRequest{Offer()}, kLong, [](const RendezvousAnswer&) { FAIL(); });
  rendezvous_->Cancel();
  rendezvous_->Cancel();
  EXPECT_TRUE(Leave().ok());
}

INSTANTIATE_TEST_SUITE_P(Rendezvous, RendezvousConformanceTest, ::testing::Values("Fake", "Redis"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace ddp::elastic
