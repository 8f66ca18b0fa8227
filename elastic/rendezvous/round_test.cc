#include "elastic/rendezvous/round.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;

RoundMember Member(int group_rank, int nproc, const std::string& role) {
  return {.node = "node-" + std::to_string(group_rank),
          .group_rank = group_rank,
          .offer = {.nproc = nproc,
                    .role = role,
                    .master_addr = "10.0.0." + std::to_string(group_rank),
                    .master_port = 20'000 + group_rank}};
}

Round MakeRound(std::vector<RoundMember> members, int self) {
  return {.generation = {.number = 1, .nonce = "00"},
          .restarts = 0,
          .members = std::move(members),
          .self = self,
          .store_url = ""};
}

TEST(RoundTest, OneNodeHoldsAllRanks) {
  const NodePlacement placement = PlaceNode(MakeRound({Member(0, 4, "default")}, 0));
  EXPECT_EQ(placement.first_rank, 0);
  EXPECT_EQ(placement.world_size, 4);
  EXPECT_EQ(placement.local_world_size, 4);
  EXPECT_EQ(placement.group_world_size, 1);
  EXPECT_EQ(placement.role_world_size, 4);
}

TEST(RoundTest, RanksAreContiguousAcrossNodesOfDifferentSizes) {
  const std::vector<RoundMember> members = {Member(0, 2, "a"), Member(1, 3, "b"),
                                            Member(2, 5, "a")};
  const NodePlacement placement = PlaceNode(MakeRound(members, 2));
  EXPECT_EQ(placement.group_rank, 2);
  EXPECT_EQ(placement.first_rank, 5);
  EXPECT_EQ(placement.world_size, 10);
  EXPECT_EQ(placement.first_role_rank, 2);
  EXPECT_EQ(placement.role_world_size, 7);
  EXPECT_EQ(placement.master_addr, "10.0.0.0");
  EXPECT_EQ(placement.master_port, 20'000);
}

TEST(RoundTest, AnOfferSurvivesItsText) {
  const NodeOffer offer = {
      .nproc = 8, .role = "with \"quotes\" and \n", .master_addr = "fe80::1", .master_port = 65535};
  const absl::StatusOr<NodeOffer> parsed = ParseOffer(FormatOffer(offer));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, offer);
}

TEST(RoundTest, RefusesOffersOfAnotherShape) {
  for (const char* text :
       {"", "7", "[]", "{}", "{\"nproc\":1", R"({"nproc":"1","role":"r","master_addr":"a"})",
        R"({"nproc":1.5,"role":"r","master_addr":"a","master_port":1})",
        R"({"nproc":99999999999,"role":"r","master_addr":"a","master_port":1})",
        R"({"nproc":-1,"role":"r","master_addr":"a","master_port":1})",
        R"({"nproc":1,"role":7,"master_addr":"a","master_port":1})"}) {
    EXPECT_EQ(ParseOffer(text).status().code(), absl::StatusCode::kInternal) << text;
  }
  EXPECT_FALSE(ParseOffer(std::string(100'000, '[')).ok());
}

TEST(RoundTest, ValidatesWhatCameOverTheWire) {
  EXPECT_TRUE(ValidateRound(MakeRound({Member(0, 1, "a"), Member(1, 1, "a")}, 1)).ok());
  EXPECT_THAT(ValidateRound(MakeRound({}, 0)).message(), HasSubstr("0 nodes"));
  EXPECT_THAT(ValidateRound(MakeRound({Member(1, 1, "a")}, 0)).message(),
              HasSubstr("group rank 1 in place 0"));
  EXPECT_THAT(ValidateRound(MakeRound({Member(0, 0, "a")}, 0)).message(),
              HasSubstr("offers 0 workers"));
  EXPECT_THAT(ValidateRound(MakeRound({Member(0, 1, "a")}, 1)).message(), HasSubstr("no member"));
  Round without_port = MakeRound({Member(0, 1, "a")}, 0);
  without_port.members[0].offer.master_port = 0;
  EXPECT_FALSE(ValidateRound(without_port).ok());
}

}  // namespace
}  // namespace ddp::elastic
