#include "ddp/comm/reports/report_log.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "ddp/common/membership.h"
#include "ddp/health/group_failure.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;
using ::testing::Pair;

constexpr absl::Duration kDeadline = absl::Seconds(60);

// Keeps the last failure.
class RecordingReader : public ReportLog::Reader {
 public:
  void OnFailureRead(int64_t incarnation, const GroupFailure& failure) override {
    MutexLock lock(mutex_);
    last_ = absl::StrCat(incarnation, ": ", failure.ToString());
    changed_.NotifyAll();
  }
  std::string OnAsked(int64_t incarnation) override { return absl::StrCat("at ", incarnation); }

  std::string AwaitFailure() {
    MutexLock lock(mutex_);
    while (last_.empty() && changed_.WaitFor(mutex_, kDeadline)) {
    }
    return std::exchange(last_, "");
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::string last_ ABSL_GUARDED_BY(mutex_);
};

// A rank of a group.
struct Rank {
  Rank(const std::shared_ptr<FakeGroupStore>& store, const Membership& membership)
      : log(store, store->Clone(), membership, reader) {}

  RecordingReader reader;
  ReportLog log;
};

class ReportLogTest : public ::testing::Test {
 protected:
  static LogEntry Failure(int rank, int64_t incarnation = 0) {
    return {.kind = LogEntry::Kind::kFailure,
            .incarnation = incarnation,
            .rank = rank,
            .reason = "disk full"};
  }

  // Asks all ranks, and waits for the answer of `rank`. Returns the question's number.
  static int64_t AskAndAwait(ReportLog& log, int rank) {
    const std::optional<int64_t> question = log.AskWhere(0, INT64_MAX);
    EXPECT_TRUE(question.has_value());
    while (!log.ReadAnswers(*question).by_rank.contains(rank)) std::this_thread::yield();
    return *question;
  }

  const std::shared_ptr<FakeGroupStore> store_ = std::make_shared<FakeGroupStore>();
};

TEST_F(ReportLogTest, EveryRankReadsAnEntry) {
  Rank zero(store_, {.rank = 0, .size = 2});
  Rank one(store_, {.rank = 1, .size = 2});
  EXPECT_EQ(zero.log.Append(Failure(0)), std::nullopt);
  EXPECT_EQ(zero.reader.AwaitFailure(), "0: rank 0 failed: disk full");
  EXPECT_EQ(one.reader.AwaitFailure(), "0: rank 0 failed: disk full");
}

TEST_F(ReportLogTest, OneReportOfAnIncarnationIsEnough) {
  store_->Set("log/0", Failure(1).Serialize());  // no rank has read it yet
  Rank zero(store_, {.rank = 0, .size = 2});
  const std::optional<LogEntry> earlier = zero.log.Append(Failure(0));
  ASSERT_TRUE(earlier.has_value());
  EXPECT_EQ(earlier->rank, 1);
  EXPECT_EQ(zero.log.Append(Failure(0, 1)), std::nullopt) << "the next incarnation";
}

// An author died between the entry and the wake keys: the next author wakes the ranks for both.
TEST_F(ReportLogTest, AnEntryWithoutWakeKeysIsRead) {
  store_->Set("log/0", Failure(2).Serialize());
  Rank zero(store_, {.rank = 0, .size = 3});
  EXPECT_TRUE(zero.log.AskWhere(0, INT64_MAX).has_value());
  EXPECT_EQ(zero.reader.AwaitFailure(), "0: rank 2 failed: disk full");
}

TEST_F(ReportLogTest, TheThreadAnswersForItsRank) {
  Rank zero(store_, {.rank = 0, .size = 3});
  Rank one(store_, {.rank = 1, .size = 3});
  const ReportLog::Answers answers = zero.log.ReadAnswers(AskAndAwait(zero.log, 1));
  EXPECT_THAT(answers.by_rank, ElementsAre(Pair(1, "at 0")));
  EXPECT_THAT(answers.silent, ElementsAre(2));
  EXPECT_EQ(one.log.AskWhere(0, 0), std::nullopt) << "rank 0 has asked since";
}

// A rank may ask again before its own thread has read the first question.
TEST_F(ReportLogTest, EveryQuestionHasItsNumber) {
  Rank zero(store_, {.rank = 0, .size = 2});
  for (int64_t number = 1; number <= 20; ++number) {
    EXPECT_EQ(zero.log.AskWhere(0, INT64_MAX), number);
  }
}

// Two ranks ask one after the other: the later answer is one to both questions.
TEST_F(ReportLogTest, ALaterQuestionTakesNoAnswerAway) {
  Rank zero(store_, {.rank = 0, .size = 2});
  Rank one(store_, {.rank = 1, .size = 2});
  const int64_t first = AskAndAwait(zero.log, 1);
  const int64_t second = AskAndAwait(zero.log, 1);
  EXPECT_LT(first, second);
  EXPECT_TRUE(zero.log.ReadAnswers(first).silent.empty());
}

TEST_F(ReportLogTest, ARankThatLeavesSaysSo) {
  Rank one(store_, {.rank = 1, .size = 2, .incarnation = 3});
  EXPECT_EQ(store_->Get(ReportLog::StandingKey(1)).rfind("process ", 0), 0);
  one.log.Leave(3, 12);
  one.log.Leave(3, 99);
  EXPECT_EQ(store_->Get(ReportLog::StandingKey(1)), "left 3 12");
  const auto gone = ReportLog::ParseGoneVerdict(store_->Get("renewal/4/verdict"));
  ASSERT_TRUE(gone.has_value());
  EXPECT_EQ(gone->rank, 1);
  EXPECT_EQ(gone->reason, "it has left the process group");
  EXPECT_EQ(ReportLog::ParseGoneVerdict("met"), std::nullopt);
}

TEST_F(ReportLogTest, LeavesNoWakeKeys) {
  {
    Rank alone(store_, {});
    EXPECT_TRUE(alone.log.AskWhere(0, INT64_MAX).has_value());
    EXPECT_TRUE(store_->Wait(ReportLog::AnswerKey(0), kDeadline));
  }
  for (const std::string& key : store_->Keys()) EXPECT_NE(key.rfind("wake/", 0), 0) << key;
}

TEST_F(ReportLogTest, EndsWhenTheStoreIsLost) {
  auto zero = std::make_unique<Rank>(store_, Membership{.rank = 0, .size = 2});
  store_->SetLost(true);
  EXPECT_ANY_THROW(zero->log.Append(Failure(0)));
  zero.reset();
}

// A destructor must not wait for the network while an exception unwinds its thread.
TEST_F(ReportLogTest, AnUnwindingThreadDoesNotCallTheStore) {
  Rank zero(store_, {.rank = 0, .size = 2});
  const std::thread::id unwinding = std::this_thread::get_id();
  try {
    Rank one(store_, {.rank = 1, .size = 2});
    struct Reporter {
      ReportLog& log;
      ~Reporter() {
        log.writes().Run([this] { log.Append(Failure(1)); });
        log.Leave(0, 0);
      }
    };
    const Reporter reporter{one.log};
    store_->ForgetCallers();
    throw std::runtime_error("unwinds");
  } catch (const std::runtime_error&) {
    EXPECT_THAT(store_->Callers(), Not(Contains(unwinding)));
  }
  EXPECT_EQ(zero.reader.AwaitFailure(), "0: rank 1 failed: disk full");
  EXPECT_EQ(store_->Get(ReportLog::StandingKey(1)), "left 0 0");
  EXPECT_THAT(store_->Keys(), Not(Contains("wake/1/0")));
}

TEST(LogEntryTest, FailureKeepsItsText) {
  const LogEntry sent{.kind = LogEntry::Kind::kFailure,
                      .incarnation = 12,
                      .rank = 3,
                      .reason = "rank 3: two words\nand a second line "};
  const auto read = LogEntry::Parse(sent.Serialize());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->kind, LogEntry::Kind::kFailure);
  EXPECT_EQ(read->incarnation, 12);
  EXPECT_EQ(read->rank, 3);
  EXPECT_EQ(read->reason, sent.reason);
}

TEST(LogEntryTest, AnEmptyReasonIsOne) {
  const auto read = LogEntry::Parse(LogEntry{.rank = 1}.Serialize());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->reason, "");
}

TEST(LogEntryTest, AQuestionKeepsItsNumber) {
  const LogEntry sent{.kind = LogEntry::Kind::kWhere, .incarnation = 1, .rank = 1000, .number = 7};
  const auto read = LogEntry::Parse(sent.Serialize());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->kind, LogEntry::Kind::kWhere);
  EXPECT_EQ(read->number, 7);
  EXPECT_EQ(read->rank, 1000);
}

TEST(LogEntryTest, OtherTextsAreRefused) {
  for (const char* text : {"", "failure", "failure x 1 why", "failure 0 one why", "where 0 1",
                           "where 0 1 x", "hello 0 1 2"}) {
    EXPECT_FALSE(LogEntry::Parse(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace ddp::internal
