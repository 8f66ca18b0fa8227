#include "elastic/rendezvous/round.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;

// The second of three nodes; the third has another role.
NodePlacement Placement() {
  return {.group_rank = 1,
          .group_world_size = 3,
          .local_world_size = 3,
          .first_rank = 2,
          .world_size = 10,
          .first_role_rank = 2,
          .role_world_size = 5,
          .master_addr = "10.0.0.1",
          .master_port = 20'000};
}

TEST(RoundTest, TakesAPlacementThatCouldBe) { EXPECT_TRUE(ValidatePlacement(Placement()).ok()); }

TEST(RoundTest, RefusesPlacementsThatCannotBe) {
  const auto refuses = [](auto change, const std::string& why) {
    NodePlacement placement = Placement();
    change(placement);
    const absl::Status status = ValidatePlacement(placement);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  };
  refuses([](NodePlacement& p) { p.local_world_size = 0; }, "0 workers");
  refuses([](NodePlacement& p) { p.group_rank = 3; }, "group rank 3 of 3 nodes");
  refuses([](NodePlacement& p) { p.group_rank = -1; }, "group rank -1");
  refuses([](NodePlacement& p) { p.first_rank = 8; }, "rank 8 and 3 workers of 10");
  refuses([](NodePlacement& p) { p.world_size = 2'000'000'000; }, "of 2000000000");
  refuses([](NodePlacement& p) { p.first_role_rank = 3; }, "role rank 3");
  refuses([](NodePlacement& p) { p.role_world_size = 11; }, "of 11");
  refuses([](NodePlacement& p) { p.master_port = 0; }, "port is 0");
}

TEST(RoundTest, RefusesOffersThatNobodyCanUse) {
  const NodeOffer good = {.nproc = 8, .role = "default", .host = "a", .master_port = 65535};
  EXPECT_TRUE(ValidateOffer(good).ok());
  NodeOffer offer = good;
  offer.nproc = 0;
  EXPECT_EQ(ValidateOffer(offer).code(), absl::StatusCode::kInvalidArgument);
  offer = good;
  offer.master_port = 0;
  EXPECT_THAT(std::string(ValidateOffer(offer).message()), HasSubstr("port 0"));
}

}  // namespace
}  // namespace ddp::elastic
