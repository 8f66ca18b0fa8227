#include "elastic/checkpoint/checkpoint_selection.h"

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

TEST(CheckpointSelectionTest, LowestProposalBoundsTheNextRound) {
  const Verdict verdict = SelectCheckpoint({Has(5), Has(3), Has(4)}, "/c");
  EXPECT_EQ(verdict.kind, Verdict::Kind::kTryOlder);
  EXPECT_EQ(verdict.bound, (CheckpointId{3, 1}));
  EXPECT_TRUE(verdict.bound_included);
}

TEST(CheckpointSelectionTest, DifferentManifestsOfOneCheckpointExcludeIt) {
  const Verdict verdict = SelectCheckpoint({Has(5, "a"), Has(5, "b")}, "/c");
  EXPECT_EQ(verdict.kind, Verdict::Kind::kTryOlder);
  EXPECT_EQ(verdict.bound, (CheckpointId{5, 1}));
  EXPECT_FALSE(verdict.bound_included);
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
