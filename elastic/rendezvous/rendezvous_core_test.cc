// Cases that the stories in testing/scenarios/rendezvous do not cover: pauses, time limits, and
// replies that make no sense.
#include "elastic/rendezvous/rendezvous_core.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Core = RendezvousCore;
using store::RedisReply;

constexpr absl::Duration kLease = absl::Seconds(3);

class RendezvousCoreTest : public ::testing::Test {
 protected:
  RendezvousCoreTest() { MakeCore(); }

  void MakeCore(absl::Duration pause_max = absl::InfiniteDuration()) {
    Core::Options options;
    options.node = "a";
    options.job.run_id = "digits";
    options.endpoint.host = "redis";
    options.job.rules.lease = kLease;
    options.pause_max = pause_max;
    core_.emplace(options);
  }

  void Step(const Core::Event& event) { actions_ = core_->Step(event, now_); }
  void Reply(const std::vector<std::string>& texts) {
    std::vector<RedisReply> parts;
    for (const std::string& text : texts) parts.push_back(RedisReply::String(text));
    Step(Core::Replied{RedisReply::Array(std::move(parts))});
  }
  void Fail() { Step(Core::Replied{absl::UnavailableError("the connection broke")}); }
  void WaitForDeadline() {
    now_ = std::max(now_, core_->next_deadline());
    Step(Core::Tick{});
  }

  template <typename Action>
  const Action* Find() const {
    for (const Core::Action& action : actions_) {
      if (const auto* found = std::get_if<Action>(&action)) return found;
    }
    return nullptr;
  }
  std::optional<ScriptName> Called() const {
    const auto* call = Find<Core::CallScript>();
    return call == nullptr ? std::nullopt : std::optional<ScriptName>(call->script);
  }
  // Returns an argument of the called script.
  std::string Argument(absl::string_view name) const {
    const auto* call = Find<Core::CallScript>();
    return call->args.at(ArgumentIndex(call->script, name));
  }
  std::optional<News::Kind> Told() const {
    const auto* tell = Find<Core::Notify>();
    return tell == nullptr ? std::nullopt : std::optional<News::Kind>(tell->news.kind);
  }

  void Join(absl::Duration timeout = absl::Minutes(10)) {
    const NodeOffer offer = {.nproc = 2, .role = "default", .host = "h", .master_port = 20'000};
    Step(Core::Ask{JoinRequest{offer}, timeout});
  }
  void Open() {
    EXPECT_EQ(Called(), ScriptName::kOpenInstance);
    Reply({"1", "token", "3000", "3", "1", "2", ""});
    Step(Core::Subscribed{});
  }
  void JoinAndRun(const std::string& row = kRow) {
    Join();
    Open();
    Reply({"round", "1", "n1", "0", row, "", "0"});
    ASSERT_NE(Find<Core::Answer>(), nullptr);
    ASSERT_TRUE(Find<Core::Answer>()->answer.ok());
  }

  static constexpr char kRow[] = "0 1 2 0 2 0 2 20000\ndefault\nh\n10.0.0.1";
  std::optional<Core> core_;
  absl::Time now_ = absl::FromUnixSeconds(1'000'000);
  std::vector<Core::Action> actions_;
};

TEST_F(RendezvousCoreTest, OpensItsJobBeforeTheFirstRequest) {
  Join();
  ASSERT_EQ(Called(), ScriptName::kOpenInstance);
  EXPECT_EQ(core_->instance(), 0);
  Reply({"7", "token", "3000", "3", "1", "2", ""});
  EXPECT_EQ(core_->instance(), 7);
  ASSERT_NE(Find<Core::Subscribe>(), nullptr);
  EXPECT_EQ(Find<Core::Subscribe>()->channel, "ddp:{digits}:i7:news");
  ASSERT_EQ(Called(), ScriptName::kJoin);
  EXPECT_EQ(Find<Core::CallScript>()->keys[0], "ddp:{digits}:i7:job");
}

TEST_F(RendezvousCoreTest, PausesHaveFullJitterUpToASixthOfTheLease) {
  JoinAndRun();
  WaitForDeadline();
  absl::Duration longest;
  int short_ones = 0;
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(Called(), ScriptName::kHeartbeat);
    Fail();
    const absl::Duration pause = core_->next_deadline() - now_;
    EXPECT_GT(pause, absl::ZeroDuration());
    longest = std::max(longest, pause);
    short_ones += pause < kLease / 12;
    WaitForDeadline();
  }
  EXPECT_LE(longest, kLease / 6);
  EXPECT_GT(longest, kLease / 8);
  EXPECT_GT(short_ones, 50);
}

TEST_F(RendezvousCoreTest, PausesHaveTheirOwnLimitToo) {
  MakeCore(/*pause_max=*/absl::Milliseconds(40));
  JoinAndRun();
  WaitForDeadline();
  absl::Duration longest;
  for (int i = 0; i < 200; ++i) {
    Fail();
    longest = std::max(longest, core_->next_deadline() - now_);
    WaitForDeadline();
  }
  EXPECT_LE(longest, absl::Milliseconds(40));
  EXPECT_GT(longest, absl::Milliseconds(30));
}

TEST_F(RendezvousCoreTest, OutOfReachIsToldOnceAfterThreeFailures) {
  JoinAndRun();
  for (int failures = 1; failures <= 10; ++failures) {
    WaitForDeadline();
    Fail();
    EXPECT_EQ(Told().has_value(), failures == 3) << failures;
    if (failures == 3) {
      EXPECT_EQ(Told(), News::Kind::kOutOfReach);
    }
  }
  WaitForDeadline();
  Reply({"ok", "1", "n1", "0", "-1"});
  EXPECT_EQ(Told(), News::Kind::kBackInReach);
}

TEST_F(RendezvousCoreTest, AHeartbeatEverySixthOfTheLeaseTellsTheMedian) {
  JoinAndRun();
  EXPECT_EQ(core_->median_busy_us(), -1);
  for (int i = 0; i < 10; ++i) {
    const absl::Time before = now_;
    WaitForDeadline();
    EXPECT_LE(now_ - before, kLease / 6 * 1.1);
    ASSERT_EQ(Called(), ScriptName::kHeartbeat);
    Reply({"ok", "1", "n1", "0", "1234"});
  }
  EXPECT_EQ(core_->median_busy_us(), 1234);
}

TEST_F(RendezvousCoreTest, ManyThatWaitAreHeardLessOften) {
  Join();
  Open();
  const auto pace_of = [&](const char* waiting, const char* outcome = "waiting") {
    Reply({outcome, "0", "", "0", "only some of 10000 nodes have joined", waiting});
    const absl::Duration pace = core_->next_deadline() - now_;
    WaitForDeadline();
    EXPECT_EQ(Called(), ScriptName::kJoin);
    return pace;
  };
  EXPECT_LE(pace_of("32"), kLease / 6 * 1.1);
  EXPECT_GE(pace_of("33"), kLease / 4 * 0.9);
  EXPECT_LE(pace_of("33"), kLease / 4 * 1.1);
  EXPECT_LE(pace_of("1"), kLease / 6 * 1.1);
  EXPECT_GE(pace_of("33", "spare"), kLease / 4 * 0.9);
}

TEST_F(RendezvousCoreTest, ARestoredSubscriptionIsFollowedByAHeartbeatAtOnce) {
  JoinAndRun();
  WaitForDeadline();
  Reply({"ok", "1", "n1", "0", "-1"});
  Step(Core::SubscriptionEnded{});
  while (Find<Core::Subscribe>() == nullptr) WaitForDeadline();
  Step(Core::Subscribed{});
  EXPECT_EQ(Called(), ScriptName::kHeartbeat) << "asks at once what was missed";
}

TEST_F(RendezvousCoreTest, AMendedConnectionIsListenedToAtOnce) {
  JoinAndRun();
  WaitForDeadline();
  Step(Core::SubscriptionEnded{});
  Fail();
  while (Called() != ScriptName::kHeartbeat) WaitForDeadline();
  Reply({"ok", "1", "n1", "0", "-1"});
  EXPECT_EQ(core_->next_deadline(), now_);
  WaitForDeadline();
  EXPECT_NE(Find<Core::Subscribe>(), nullptr);
}

TEST_F(RendezvousCoreTest, AfterAPushThatTellsNotAllAHeartbeatIsSentAtOnce) {
  JoinAndRun();
  WaitForDeadline();
  Reply({"ok", "1", "n1", "0", "-1"});
  ASSERT_EQ(Called(), std::nullopt);
  Step(Core::Pushed{"token\nround\n2\nn2"});
  EXPECT_EQ(Called(), ScriptName::kHeartbeat);
  // The push arrives while a heartbeat is in flight.
  Step(Core::Pushed{"token\nround\n2\nn2"});
  EXPECT_EQ(Called(), std::nullopt);
  Reply({"ok", "1", "n1", "0", "-1"});
  EXPECT_EQ(Called(), ScriptName::kHeartbeat);
}

TEST_F(RendezvousCoreTest, SaysOfItselfOnlyWhatIsNewAndNotTooOften) {
  JoinAndRun();
  core_->SetReport({.step = 5, .steps_per_second = 2.5, .busy_us = 1000, .row = "{1}"});
  int with_row = 0;
  for (const absl::Time end = now_ + absl::Seconds(10); now_ < end;) {
    WaitForDeadline();
    ASSERT_EQ(Called(), ScriptName::kHeartbeat);
    EXPECT_EQ(Argument("step"), "5");
    EXPECT_EQ(Argument("rate"), "2.500");
    with_row += !Argument("report").empty();
    EXPECT_EQ(Argument("busy_us").empty(), Argument("report").empty());
    Reply({"ok", "1", "n1", "0", "-1"});
  }
  EXPECT_EQ(with_row, 1);
  for (int i = 0; i < 100; ++i) {
    core_->SetReport({.step = 5, .busy_us = 1001, .row = absl::StrCat("{", i, "}")});
    WaitForDeadline();
    with_row += !Argument("report").empty();
    EXPECT_EQ(Argument("busy_us"), "") << "hardly changed";
    Reply({"ok", "1", "n1", "0", "-1"});
  }
  EXPECT_LT(with_row, 70);
  EXPECT_GT(with_row, 10);
}

TEST_F(RendezvousCoreTest, ARequestEndsAtItsTimeoutWhileTheStoreIsSilent) {
  Join(absl::Seconds(5));
  EXPECT_LE(core_->next_deadline(), now_ + absl::Seconds(5));
  WaitForDeadline();
  ASSERT_NE(Find<Core::Answer>(), nullptr);
  const absl::Status status = Find<Core::Answer>()->answer.status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("in 5s and 1 try: none came yet"));
}

TEST_F(RendezvousCoreTest, AnAnswerToACancelledRequestIsDropped) {
  Join();
  Open();
  Step(Core::CancelRequest{});
  Step(Core::Ask{LeaveRequest{}, absl::Seconds(2)});
  EXPECT_FALSE(Called().has_value()) << "one script at a time";
  Reply({"round", "1", "n1", "0", kRow, "", "0"});
  EXPECT_EQ(Find<Core::Answer>(), nullptr);
  ASSERT_EQ(Called(), ScriptName::kLeave);
  Reply({"ok", "1", "n1", "0"});
  ASSERT_NE(Find<Core::Answer>(), nullptr);
  EXPECT_EQ(core_->next_deadline(), absl::InfiniteFuture());
}

TEST_F(RendezvousCoreTest, WhoWasNeverThereNeedNotLeave) {
  Step(Core::Ask{LeaveRequest{}, absl::Seconds(2)});
  ASSERT_NE(Find<Core::Answer>(), nullptr);
  EXPECT_TRUE(Find<Core::Answer>()->answer.ok());
  EXPECT_FALSE(Called().has_value());
}

TEST_F(RendezvousCoreTest, AnOfferThatNobodyCanUseIsRefusedAtOnce) {
  Step(Core::Ask{JoinRequest{{.nproc = 0}}, absl::Minutes(10)});
  ASSERT_NE(Find<Core::Answer>(), nullptr);
  EXPECT_EQ(Find<Core::Answer>()->answer.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(RendezvousCoreTest, NonsenseFailsARequestAndNotTheHeartbeats) {
  JoinAndRun();
  WaitForDeadline();
  Reply({"ok"});
  EXPECT_EQ(Told(), News::Kind::kOutOfReach);
  WaitForDeadline();
  Reply({"what?", "1", "n1", "0"});
  WaitForDeadline();
  ASSERT_EQ(Called(), ScriptName::kHeartbeat);
  Step(Core::Ask{CompleteRequest{{1, "n1"}}, absl::Seconds(5)});
  Reply({"ok", "1", "n1", "0", "-1"});
  ASSERT_EQ(Called(), ScriptName::kComplete);
  Step(Core::Replied{RedisReply::Integer(7)});
  ASSERT_NE(Find<Core::Answer>(), nullptr);
  EXPECT_EQ(Find<Core::Answer>()->answer.status().code(), absl::StatusCode::kInternal);
}

TEST_F(RendezvousCoreTest, PushesOfAnotherJobOrGenerationAreNoNews) {
  JoinAndRun();
  for (const char* text : {"other\nover\n1\nn1\nx", "token\nover\n1\nn2\nx",
                           "token\nover\n2\nn1\nx", "token\ndrain\n2\nn2\n5\nx",
                           "other\nended\n1\nn1\nclosed\n1\nx", "", "token\nover\n1\nn1"}) {
    Step(Core::Pushed{text});
    EXPECT_EQ(Told().has_value(), std::string(text) == "token\nover\n1\nn1") << text;
  }
  Step(Core::Pushed{"token\nover\n1\nn1\nx"});
  EXPECT_FALSE(Told().has_value()) << "told once";
}

TEST_F(RendezvousCoreTest, ANewGenerationThatIsPushedMakesAStrangerAsk) {
  JoinAndRun();
  Step(Core::Pushed{"token\nround\n2\nn2"});
  ASSERT_EQ(Called(), ScriptName::kHeartbeat) << "at once";
  Reply({"evicted", "2", "n2", "0", "generation 2 has begun without it"});
  EXPECT_EQ(Told(), News::Kind::kEvicted);
  EXPECT_EQ(core_->next_deadline(), absl::InfiniteFuture()) << "it has nothing to say any more";
}

TEST_F(RendezvousCoreTest, ABrokenSubscriptionIsMendedAndWhatWasMissedIsAsked) {
  JoinAndRun();
  Step(Core::SubscriptionEnded{});
  const absl::Time before = now_;
  while (Find<Core::Subscribe>() == nullptr) {
    if (Called() == ScriptName::kHeartbeat) Reply({"ok", "1", "n1", "0", "-1"});
    WaitForDeadline();
    ASSERT_LE(now_ - before, kLease);
  }
  if (Called() == ScriptName::kHeartbeat) Reply({"ok", "1", "n1", "0", "-1"});
  Step(Core::Subscribed{});
  EXPECT_EQ(Called(), ScriptName::kHeartbeat);
}

TEST_F(RendezvousCoreTest, ASparesTimeLimitStandsStill) {
  Join(absl::Seconds(5));
  Open();
  for (const absl::Time end = now_ + absl::Minutes(5); now_ < end;) {
    Reply({"spare", "1", "n1", "0", "as a spare: all 2 seats are taken"});
    ASSERT_LT(core_->next_deadline(), absl::InfiniteFuture());
    WaitForDeadline();
  }
  Reply({"waiting", "1", "n1", "0", "only 1 of 2 nodes have joined"});
  const absl::Time begun = now_;
  while (Find<Core::Answer>() == nullptr) {
    if (Called() == ScriptName::kJoin) Reply({"same", "1", "n1", "0"});
    WaitForDeadline();
  }
  EXPECT_EQ(now_ - begun, absl::Seconds(5));
  EXPECT_THAT(std::string(Find<Core::Answer>()->answer.status().message()),
              StartsWith("only 1 of 2 nodes have joined after"));
}

TEST_F(RendezvousCoreTest, TheStoresAddressCarriesTheGenerationAndNoSecret) {
  JoinAndRun();
  const auto& round = std::get<Round>(*Find<Core::Answer>()->answer);
  EXPECT_THAT(round.store_url, HasSubstr("redis://redis:6379"));
  EXPECT_THAT(round.store_url, HasSubstr("g1.n1:store:"));
}

}  // namespace
}  // namespace ddp::elastic
