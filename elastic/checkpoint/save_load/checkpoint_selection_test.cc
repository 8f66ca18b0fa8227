#include "elastic/checkpoint/save_load/checkpoint_selection.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Proposal Has(int64_t step, const std::string& hash = "h") {
  return {.listed = 3, .id = CheckpointId{step, 1}, .manifest_hash = hash};
}

TEST(CheckpointSelectionTest, SameOneEverywhereLoads) {
  EXPECT_EQ(SelectCheckpoint({Has(5), Has(5)}, "/c").kind, Verdict::Kind::kLoad);
}

Proposal IsStoppedAt(int64_t step, const std::string& file, const std::string& message) {
  return {.listed = 3,
          .obstacle =
              Proposal::Obstacle{.id = CheckpointId{step, 1}, .file = file, .message = message}};
}

TEST(CheckpointSelectionTest, DamageForOneRankExcludesACheckpoint) {
  Proposal damaged = Has(3);
  damaged.damaged = {{5, 1}};
  const Verdict verdict = SelectCheckpoint({Has(5), damaged, Has(5)}, "/c");
  EXPECT_EQ(verdict.kind, Verdict::Kind::kTryOlder);
  EXPECT_EQ(verdict.bound, (CheckpointId{5, 1}));
}

TEST(CheckpointSelectionTest, ACheckpointThatOneRankDoesNotSeeIsNeverPassedOver) {
  const Verdict retry = SelectCheckpoint({Has(5), Has(4)}, "/c", /*may_retry=*/true);
  EXPECT_EQ(retry.kind, Verdict::Kind::kRetry);
  EXPECT_THAT(retry.look_for, ElementsAre("/c/step-000000000005.g0001/MANIFEST.json"));
  const Verdict verdict = SelectCheckpoint({Has(5), Has(4)}, "/c");
  EXPECT_EQ(verdict.kind, Verdict::Kind::kFail);
  EXPECT_FALSE(verdict.is_damage);
  EXPECT_THAT(verdict.reason,
              HasSubstr("rank 1: /c/step-000000000005.g0001/MANIFEST.json: no such file"));
}

TEST(CheckpointSelectionTest, AFileThatIsMissingToEveryRankExcludesACheckpoint) {
  Proposal stopped = IsStoppedAt(5, "/c/x", "/c/x: no such file");
  const Verdict look = SelectCheckpoint({stopped, Has(5)}, "/c", /*may_retry=*/true);
  EXPECT_EQ(look.kind, Verdict::Kind::kRetry);
  EXPECT_THAT(look.look_for, ElementsAre("/c/x"));
  Proposal other = Has(5);
  stopped.absent = other.absent = {"/c/x"};
  const Verdict verdict = SelectCheckpoint({stopped, other}, "/c", /*may_retry=*/true);
  EXPECT_EQ(verdict.kind, Verdict::Kind::kTryOlder);
  EXPECT_EQ(verdict.bound, (CheckpointId{5, 1}));
  EXPECT_EQ(verdict.reason, "/c/x: no rank sees such a file");
  other.absent.clear();
  EXPECT_EQ(SelectCheckpoint({stopped, other}, "/c").kind, Verdict::Kind::kFail);
}

TEST(CheckpointSelectionTest, AnotherObstacleIsRetriedAndThenFailsByName) {
  const Proposal stopped = IsStoppedAt(5, "", "cannot open /c/x: Too many open files");
  EXPECT_EQ(SelectCheckpoint({Has(5), stopped}, "/c", true).kind, Verdict::Kind::kRetry);
  const Verdict verdict = SelectCheckpoint({Has(5), stopped}, "/c");
  EXPECT_EQ(verdict.kind, Verdict::Kind::kFail);
  EXPECT_THAT(verdict.reason, HasSubstr("rank 1: cannot open /c/x: Too many open files"));
  const Proposal unlisted = {.listed = 1,
                             .obstacle = Proposal::Obstacle{.message = "cannot list /c"}};
  EXPECT_EQ(SelectCheckpoint({Has(5), unlisted}, "/c", true).kind, Verdict::Kind::kRetry);
  EXPECT_THAT(SelectCheckpoint({Has(5), unlisted}, "/c").reason,
              HasSubstr("rank 1: cannot list /c"));
}

TEST(CheckpointSelectionTest, DifferentManifestsOfOneCheckpointAreNoReasonToTakeAnOlderOne) {
  const Verdict retry = SelectCheckpoint({Has(5, "a"), Has(5, "b")}, "/c", true);
  EXPECT_EQ(retry.kind, Verdict::Kind::kRetry);
  EXPECT_TRUE(retry.read_again);
  const Verdict verdict = SelectCheckpoint({Has(5, "a"), Has(5, "b")}, "/c");
  EXPECT_EQ(verdict.kind, Verdict::Kind::kFail);
  EXPECT_THAT(verdict.reason, HasSubstr("different manifests"));
}

TEST(CheckpointSelectionTest, NothingAnywhereIsEmptyAndNothingSomewhereIsAnError) {
  EXPECT_EQ(SelectCheckpoint({{}, {}}, "/c").kind, Verdict::Kind::kEmpty);
  const Verdict verdict = SelectCheckpoint({Has(5), {}}, "/c");
  EXPECT_EQ(verdict.kind, Verdict::Kind::kFail);
  EXPECT_THAT(verdict.reason, HasSubstr("rank 1 of 2 see no checkpoint in /c"));
}

TEST(CheckpointSelectionTest, NoneReadableIsAnErrorThatSaysWhy) {
  const Proposal none = {.listed = 1, .passed_over = {"x is damaged"}};
  const Verdict verdict = SelectCheckpoint({none, none}, "/c");
  EXPECT_EQ(verdict.kind, Verdict::Kind::kFail);
  EXPECT_FALSE(verdict.does_not_fit);
  EXPECT_TRUE(verdict.is_damage);
  EXPECT_THAT(verdict.reason, HasSubstr("x is damaged"));
}

TEST(CheckpointSelectionTest, ReasonsAreMergedWithTheRanksThatGiveThem) {
  Proposal first = Has(5);
  first.passed_over = {"a", "b"};
  Proposal second = Has(5);
  second.passed_over = {"b", "c"};
  EXPECT_THAT(SelectCheckpoint({first, second}, "/c").passed_over,
              ElementsAre("rank 0: a", "b", "rank 1: c"));
}

TEST(CheckpointSelectionTest, MessagesComeBack) {
  Proposal proposal = Has(5);
  proposal.passed_over = {"a\n\"b\""};
  proposal.mismatches = {"c"};
  proposal.damaged = {{7, 2}};
  proposal.absent = {"/c/x"};
  proposal.obstacle = Proposal::Obstacle{.id = CheckpointId{6, 1}, .file = "f", .message = "m"};
  const auto parsed = ParseProposal(EncodeProposal(proposal));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(EncodeProposal(*parsed), EncodeProposal(proposal));
  EXPECT_FALSE(ParseProposal(EncodeProposal({}))->id.has_value());
  const Verdict verdict = SelectCheckpoint({Has(5), Has(3)}, "/c");
  const auto parsed_verdict = ParseVerdict(EncodeVerdict(verdict));
  ASSERT_TRUE(parsed_verdict.ok()) << parsed_verdict.status();
  EXPECT_EQ(EncodeVerdict(*parsed_verdict), EncodeVerdict(verdict));
}

TEST(CheckpointSelectionTest, MessagesThatAreNoneAreRefused) {
  for (const char* text : {"", "[]", "{}", "5", R"({"listed":-1})", R"({"listed":"x"})",
                           R"({"kind":99,"bound":{},"reason":""})"}) {
    EXPECT_FALSE(ParseProposal(text).ok()) << text;
    EXPECT_FALSE(ParseVerdict(text).ok()) << text;
  }
}

}  // namespace
}  // namespace ddp::elastic
