#include "ddp/comm/check/inquiry.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/process/process_identity.h"
#include "ddp/comm/check/collective_log.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/comm/reports/report_log.h"
#include "ddp/common/membership.h"
#include "ddp/health/group_failure.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

CollectiveCall Bucket(int index) {
  return {.operation = "all-reduce (sum)",
          .dtype = "Float",
          .elements = 4,
          .bytes = 16,
          .what = {"the all-reduce of gradient bucket", index}};
}

// One rank of a group: its monitor, its collectives and its inquiry.
struct Rank {
  Rank(const std::shared_ptr<FakeGroupStore>& store, const Membership& self)
      : monitor(std::make_shared<FailureMonitor>(store, self)), inquiry(monitor, log, self) {
    monitor->SetPositionSource(log);
  }

  const std::shared_ptr<CollectiveLog> log = std::make_shared<CollectiveLog>();
  const std::shared_ptr<FailureMonitor> monitor;
  Inquiry inquiry;
};

class InquiryTest : public ::testing::Test {
 protected:
  // Rank 0 asks, and reads the answers when all but those of `silent` are there.
  static bool Ask(Rank& rank, const std::vector<int>& silent) {
    EXPECT_TRUE(rank.inquiry.Ask(INT64_MAX));
    bool all = rank.inquiry.ReadAnswers();
    while (rank.inquiry.silent() != silent) all = rank.inquiry.ReadAnswers();
    return all;
  }

  const std::shared_ptr<FakeGroupStore> store_ = std::make_shared<FakeGroupStore>();
};

TEST_F(InquiryTest, RanksInDifferentCollectivesAreNamed) {
  Rank zero(store_, {.rank = 0, .size = 2});
  Rank one(store_, {.rank = 1, .size = 2});
  zero.log->Add(Bucket(0));
  one.log->Add(Bucket(1));
  EXPECT_TRUE(Ask(zero, {}));
  const auto failure = zero.inquiry.Judge({.sequence = 0, .needs_all_ranks = true, .what = "sum"});
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->rank, -1);
  EXPECT_THAT(failure->reason, AllOf(HasSubstr("the ranks are in different collectives"),
                                     HasSubstr("gradient bucket 0"), HasSubstr("bucket 1")));
}

TEST_F(InquiryTest, ALateRankIsNoFailure) {
  Rank zero(store_, {.rank = 0, .size = 2});
  Rank one(store_, {.rank = 1, .size = 2});
  zero.log->Add(Bucket(0));
  EXPECT_TRUE(Ask(zero, {}));
  const Inquiry::Awaited awaited{.sequence = 0, .needs_all_ranks = true, .what = "sum"};
  EXPECT_FALSE(zero.inquiry.Judge(awaited).has_value());
  EXPECT_EQ(zero.inquiry.DescribeLate(awaited),
            ". This is collective 0; rank 1 is alive and has launched 0 collectives");
}

TEST_F(InquiryTest, ARankThatLeftIsTheCause) {
  Rank zero(store_, {.rank = 0, .size = 2});
  std::make_unique<Rank>(store_, Membership{.rank = 1, .size = 2}).reset();
  zero.log->Add(Bucket(0));
  EXPECT_FALSE(Ask(zero, {1}));
  EXPECT_THAT(zero.inquiry.silent(), ElementsAre(1));
  const Inquiry::Awaited awaited{.sequence = 0, .what = "the all-reduce"};
  const auto failure = zero.inquiry.Judge(awaited);
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->rank, 1);
  EXPECT_THAT(failure->reason,
              AllOf(HasSubstr("it has left the process group"), HasSubstr("after 0 collectives"),
                    HasSubstr("rank 0 was in collective 0, the all-reduce")));
  EXPECT_EQ(zero.inquiry.DescribeLate(awaited), ". This is collective 0; no answer from rank 1");
}

// A rank that left after it had launched the collective does not hold it up.
TEST_F(InquiryTest, ARankThatLeftAfterTheCollectiveIsNoCause) {
  Rank zero(store_, {.rank = 0, .size = 2});
  zero.log->Add(Bucket(0));
  store_->Set(ReportLog::StandingKey(1), "left 0 1");
  EXPECT_FALSE(Ask(zero, {1}));
  EXPECT_FALSE(zero.inquiry.Judge({.sequence = 0, .what = "sum"}).has_value());
  const auto failure = zero.inquiry.Judge({.sequence = -1, .peer = 1, .what = "a message"});
  ASSERT_TRUE(failure.has_value());
  EXPECT_THAT(failure->reason, HasSubstr("Each receive needs a send of its peer"));
}

// The process id is that of this process, which did not start then: the other one has ended.
TEST_F(InquiryTest, AnEndedProcessOfThisHostIsTheCause) {
  Rank zero(store_, {.rank = 0, .size = 2, .local_begin = 0, .local_end = 2});
  const std::string self = ProcessIdentity();
  store_->Set(ReportLog::StandingKey(1),
              absl::StrCat("process ", self.substr(0, self.rfind(' ')), " 1"));
  const auto cause = zero.inquiry.Explain({.sequence = -1, .what = "a barrier"}, "broken pipe");
  ASSERT_TRUE(cause.has_value());
  EXPECT_EQ(cause->rank, 1);
  EXPECT_THAT(cause->reason, AllOf(HasSubstr("the process of rank 1 has ended"),
                                   HasSubstr("while rank 0 was in a barrier")));
}

TEST_F(InquiryTest, AFailureReportIsTheCause) {
  Rank zero(store_, {.rank = 0, .size = 2});
  Rank one(store_, {.rank = 1, .size = 2});
  one.monitor->Report("disk full");
  EXPECT_FALSE(zero.inquiry.Explain({.sequence = -1, .what = "a barrier"}, "reset").has_value());
  EXPECT_EQ(zero.monitor->failure()->reason, "disk full");
}

TEST_F(InquiryTest, TheServerOfALostStoreIsTheCause) {
  Rank one(store_, {.rank = 1, .size = 2, .store_is_rank_0 = true});
  store_->SetLost(true);
  const auto cause = one.inquiry.Explain({.sequence = -1, .what = "a barrier"}, "broken pipe");
  ASSERT_TRUE(cause.has_value());
  EXPECT_EQ(cause->rank, 0);
  EXPECT_THAT(cause->reason, HasSubstr("its connections and the store, which it serves, are gone"));
}

// A wait of another rank with the same question need not be asked again.
TEST_F(InquiryTest, OneRankAsksForAll) {
  Rank zero(store_, {.rank = 0, .size = 2});
  Rank one(store_, {.rank = 1, .size = 2});
  EXPECT_TRUE(Ask(zero, {}));
  EXPECT_FALSE(one.inquiry.Ask(0));
  EXPECT_FALSE(one.inquiry.ReadAnswers());
}

}  // namespace
}  // namespace ddp::internal
