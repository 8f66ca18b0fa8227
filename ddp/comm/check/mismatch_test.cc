#include "ddp/comm/check/mismatch.h"

#include <string>
#include <thread>

#include "ddp/comm/check/collective_log.h"
#include "ddp/comm/check/collective_record.h"
#include "ddp/common/rpc_place.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

CollectiveCall Bucket(int index, int64_t elements = 1 << 20) {
  return {.operation = "all-reduce (sum)",
          .dtype = "Float",
          .elements = elements,
          .bytes = elements * 4,
          .what = {"the all-reduce of gradient bucket", index}};
}

CollectiveCall Buffers() {
  return {.operation = "broadcast",
          .dtype = "Float",
          .elements = 10,
          .bytes = 40,
          .root = 0,
          .what = "the broadcast of buffers"};
}

CollectiveCall JoinExchange() {
  return {.operation = "all-reduce (sum)",
          .dtype = "Long",
          .elements = 2,
          .bytes = 16,
          .what = "the exchange of a Join"};
}

CollectiveRecord Sum(const std::string& shape) {
  return {.operation = "all-reduce (sum)",
          .what = "the all-reduce of gradient bucket 3",
          .dtype = "Float",
          .shape = shape,
          .layout = "Strided",
          .device = "cpu"};
}

TEST(DescribeDifferenceTest, EqualOnesAreFine) {
  EXPECT_EQ(DescribeDifference(0, {}), "");
  EXPECT_EQ(DescribeDifference(0, {Sum("[2]"), Sum("[2]"), Sum("[2]")}), "");
}

TEST(DescribeDifferenceTest, NamesTheFewAndWhatDiffers) {
  CollectiveRecord other = Sum("[7]");
  other.dtype = "Double";
  EXPECT_EQ(DescribeDifference(5, {other, Sum("[2, 3]"), Sum("[2, 3]"), other, Sum("[2, 3]")}),
            "Detected mismatch between collectives on ranks: as collective 5, ranks 1, 2, 4 run "
            "all-reduce (sum) of a Float tensor of shape [2, 3] on cpu (the all-reduce of gradient "
            "bucket 3); but ranks 0, 3 run all-reduce (sum) of a Double tensor of shape [7] on cpu "
            "(the all-reduce of gradient bucket 3): they differ in dtype, shape. All ranks must "
            "call the same collectives in the same order");
}

TEST(DescribeDifferenceTest, EveryAspectCounts) {
  const auto differing = [](void (*change)(CollectiveRecord&)) {
    CollectiveRecord other = Sum("[2]");
    change(other);
    return DescribeDifference(0, {Sum("[2]"), other});
  };
  EXPECT_THAT(differing([](auto& f) { f.operation = "broadcast"; }), HasSubstr("in operation."));
  EXPECT_THAT(differing([](auto& f) { f.layout = "Sparse"; }),
              AllOf(HasSubstr("in layout."), HasSubstr("a Sparse Float tensor")));
  EXPECT_THAT(differing([](auto& f) { f.device = "cuda"; }), HasSubstr("in device type."));
  EXPECT_THAT(differing([](auto& f) { f.root = 1; }),
              AllOf(HasSubstr("in root."), HasSubstr("from rank 1")));
  EXPECT_THAT(differing([](auto& f) { f.what = "a barrier"; }), HasSubstr("in purpose."));
}

TEST(DescribeDifferenceTest, ATieGoesToTheLowestRank) {
  EXPECT_THAT(DescribeDifference(0, {Sum("[1]"), Sum("[2]")}),
              AllOf(HasSubstr("rank 0 runs"), HasSubstr("but rank 1 runs")));
}

TEST(DescribeMismatchTest, RanksThatAreApartByAStepAreNoMismatch) {
  CollectiveLog ahead;
  CollectiveLog behind;
  for (int i = 0; i < 20; ++i) {
    ahead.Add(Bucket(i));
    if (i < 15) behind.Add(Bucket(i));
    behind.SetCompleteBefore(behind.launched());
  }
  ahead.SetCompleteBefore(15);
  EXPECT_EQ(DescribeMismatch({{0, ahead.Position()}, {1, behind.Position()}}, 0, 15), "");
  EXPECT_EQ(DescribeMismatch({{0, ahead.Position()}}, 0, 15), "");
  EXPECT_EQ(DescribeMismatch({{0, ahead.Position()}, {1, RankPosition()}}, 0, 15), "");
}

TEST(DescribeMismatchTest, NamesRanksCollectivesAndRemedy) {
  CollectiveLog zero;
  CollectiveLog one;
  CollectiveLog two;
  for (CollectiveLog* log : {&zero, &one, &two}) {
    for (int i = 0; i < 12; ++i) log->Add(Bucket(i));
    log->SetCompleteBefore(12);
  }
  zero.Add(Buffers());
  one.Add(Bucket(0));
  two.Add(Buffers());
  const std::string text =
      DescribeMismatch({{0, zero.Position()}, {1, one.Position()}, {2, two.Position()}}, 1, 12);
  EXPECT_THAT(text, AllOf(HasSubstr("ranks 0, 2 are in collective 12, the broadcast of buffers"),
                          HasSubstr("rank 1 is in collective 12, the all-reduce of gradient bucket "
                                    "0 (all-reduce (sum), 4.0 MiB of Float)"),
                          HasSubstr("different numbers of batches"), HasSubstr("ddp::Join")));
}

TEST(DescribeMismatchTest, TheRemedyFitsTheMistake) {
  CollectiveLog joined;
  CollectiveLog alone;
  joined.Add(JoinExchange());
  alone.Add(Bucket(0));
  EXPECT_THAT(DescribeMismatch({{0, joined.Position()}, {1, alone.Position()}}, 0, 0),
              HasSubstr("JoinOptions (enable among them)"));
  CollectiveLog normalizing;
  normalizing.Add({.operation = "all-reduce (sum)",
                   .dtype = "Double",
                   .what = "the batch statistics of a SyncBatchNorm"});
  EXPECT_THAT(DescribeMismatch({{0, normalizing.Position()}, {1, alone.Position()}}, 0, 0),
              HasSubstr("call train() and eval() on every rank alike"));
  CollectiveLog changed;
  CollectiveLog changed_too;
  const std::string what = "the comparison of models after a change of parameter ";
  changed.Add({.operation = "all-reduce (minimum)", .what = what + "w (was Float)"});
  changed_too.Add({.operation = "all-reduce (minimum)", .what = what + "v (was Double)"});
  EXPECT_THAT(DescribeMismatch({{0, changed.Position()}, {1, alone.Position()}}, 0, 0),
              AllOf(HasSubstr("w (was Float)"), HasSubstr("changed a parameter of the model")));
  EXPECT_EQ(DescribeMismatch({{0, changed.Position()}, {1, changed_too.Position()}}, 0, 0), "")
      << "the comparison itself names the difference";
  CollectiveLog large;
  large.Add(Bucket(0, 77));
  EXPECT_THAT(DescribeMismatch({{0, large.Position()}, {1, alone.Position()}}, 0, 0),
              HasSubstr("tensors of different size, type or layout"));
}

TEST(DescribeMismatchTest, ARankInAMonitoredBarrierWillNotCome) {
  CollectiveLog waiting;
  CollectiveLog in_barrier;
  waiting.Add(Bucket(0));
  in_barrier.Add({.operation = "monitored barrier", .what = "a monitored barrier"});
  EXPECT_THAT(DescribeMismatch({{0, waiting.Position()}, {1, in_barrier.Position()}}, 0, 0),
              AllOf(HasSubstr("rank 0 is in collective 0, the all-reduce of gradient bucket 0"),
                    HasSubstr("rank 1 is in collective 0, a monitored barrier: ")));
}

// Here all ranks are in this process, whose place a real rank has for itself.
TEST(DescribeMismatchTest, ARankInAMeetingOfRemoteCallsWillNotCome) {
  CollectiveLog waiting;
  CollectiveLog in_meeting;
  for (CollectiveLog* log : {&waiting, &in_meeting}) log->Add(Bucket(0));
  waiting.Add(Bucket(1));
  OwnRpcPlace::SetWorld(7);
  RankPosition asker = waiting.Position();
  const RpcPlace own = asker.rpc;
  EXPECT_EQ(own, (RpcPlace{.world = 7, .meetings = own.meetings}));
  RankPosition other;
  {
    const OwnRpcPlace::Waiting scope(RpcPlace::Meeting::kShutdown);
    other = in_meeting.Position();
    EXPECT_EQ(other.rpc.meetings, own.meetings + 1);
    EXPECT_EQ(other.rpc.waits_in, RpcPlace::Meeting::kShutdown);
    // A thread that only ends the remote calls does not keep the one that launches from going on.
    CollectiveLog elsewhere;
    std::thread([&] { elsewhere.Add(Bucket(0)); }).join();
    EXPECT_EQ(elsewhere.Position().rpc.waits_in, RpcPlace::Meeting::kNone);
  }
  EXPECT_EQ(in_meeting.Position().rpc.waits_in, RpcPlace::Meeting::kNone);

  const auto text = [&] { return DescribeMismatch({{0, other}, {1, asker}}, 1, 1); };
  EXPECT_THAT(text(), AllOf(HasSubstr("rank 1 is in collective 1, the all-reduce of gradient "
                                      "bucket 1 (all-reduce (sum), 4.0 MiB of Float)"),
                            HasSubstr("rank 0 is in rpc::Workers::shutdown(): the ranks ran "
                                      "different numbers of batches"),
                            HasSubstr("ddp::Join")));
  const RankPosition stuck = other;
  other.rpc.waits_in = RpcPlace::Meeting::kBarrier;
  EXPECT_THAT(text(), HasSubstr("rank 0 is in rpc::Workers::barrier(): "));
  // A rank that has launched the awaited collective holds nobody up.
  other.launched = 2;
  EXPECT_EQ(text(), "");
  other = stuck;
  // The asker is no worker, or one of others: the meeting does not wait for it.
  asker.rpc = {};
  EXPECT_EQ(text(), "");
  asker.rpc = {.world = 8, .meetings = own.meetings};
  EXPECT_EQ(text(), "");
  // The asker has been in the same meeting, so the other rank is about to leave it.
  asker.rpc = stuck.rpc;
  EXPECT_EQ(text(), "");
}

}  // namespace
}  // namespace ddp::internal
