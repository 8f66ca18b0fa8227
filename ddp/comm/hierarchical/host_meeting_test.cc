#include "ddp/comm/hierarchical/host_meeting.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::ddp::testing::RunThreads;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSubsetOf;

constexpr absl::Duration kTimeout = absl::Seconds(60);
constexpr absl::Duration kShortTimeout = absl::Milliseconds(200);

// Returns what each rank learns when rank r gives `places[r]`.
std::vector<absl::StatusOr<std::vector<RankRange>>> Find(const std::vector<RankRange>& places) {
  FakeGroupStore store;
  const int size = static_cast<int>(places.size());
  std::vector<absl::StatusOr<std::vector<RankRange>>> found(size);
  RunThreads(size,
             [&](int rank) { found[rank] = FindHosts(store, rank, size, places[rank], kTimeout); });
  EXPECT_THAT(store.Keys(), IsSubsetOf(HostsKeys(size)));
  return found;
}

// Returns "local rank: first-end" for each rank, when rank r stands on hosts[r].
std::vector<std::string> PlacesOn(const std::vector<std::string>& hosts) {
  FakeGroupStore store;
  const int size = static_cast<int>(hosts.size());
  std::vector<std::string> places(size);
  RunThreads(size, [&](int rank) {
    const auto identities = ExchangeHosts(store, rank, size, hosts[rank], kTimeout);
    ASSERT_TRUE(identities.ok()) << identities.status();
    const HostPlace place = HostPlaceOf(*identities, rank);
    places[rank] = absl::StrCat(place.local_rank, ": ", place.local.begin, "-", place.local.end);
  });
  EXPECT_THAT(store.Keys(), IsSubsetOf(HostsKeys(size)));
  return places;
}

TEST(HostMeetingTest, RanksFindTheirPlacesByTheHostsThatTheyStandOn) {
  EXPECT_THAT(PlacesOn({"a", "a", "b", "b", "b"}),
              ElementsAre("0: 0-2", "1: 0-2", "0: 2-5", "1: 2-5", "2: 2-5"));
  EXPECT_THAT(PlacesOn({"a", "a"}), ElementsAre("0: 0-2", "1: 0-2"));
  EXPECT_THAT(PlacesOn({"a", "b"}), ElementsAre("0: 0-1", "0: 1-2"));
  // As `mpirun --map-by node` numbers them.
  EXPECT_THAT(PlacesOn({"a", "b", "a", "b"}), ElementsAre("0: 0-0", "0: 0-0", "1: 0-0", "1: 0-0"));
}

TEST(HostMeetingTest, TwoProcessesOfOneHostHaveOneIdentity) {
  EXPECT_EQ(HostIdentity(), HostIdentity());
  EXPECT_GT(HostIdentity().size(), 36) << "a boot's number and more";
}

TEST(HostMeetingTest, EveryRankFindsTheSameHosts) {
  for (const auto& found : Find({{0, 2}, {0, 2}, {2, 3}})) {
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(*found, (std::vector<RankRange>{{0, 2}, {2, 3}}));
  }
}

TEST(HostMeetingTest, ARankThatDoesNotKnowItsHostIsAnErrorOnEveryRank) {
  for (const auto& found : Find({{0, 2}, {0, 2}, {}})) {
    EXPECT_EQ(found.status().code(), absl::StatusCode::kFailedPrecondition);
  }
}

TEST(HostMeetingTest, RanksThatContradictEachOtherAreAnErrorOnEveryRank) {
  for (const auto& found : Find({{0, 2}, {1, 2}, {2, 3}})) {
    EXPECT_EQ(found.status().code(), absl::StatusCode::kFailedPrecondition);
  }
}

TEST(HostMeetingTest, ARankThatDoesNotComeIsNamed) {
  FakeGroupStore store;
  const auto found = FindHosts(store, 0, 2, {0, 1}, kShortTimeout);
  EXPECT_EQ(found.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(found.status().message()), HasSubstr("rank 1 has not come"));
}

// A rank's commands do not grow with the ranks.
TEST(HostMeetingTest, HostsAreFoundWithAFewCommandsForEachRank) {
  for (const int size : {2, 8, 64}) {
    FakeGroupStore store;
    RunThreads(size, [&](int rank) {
      ASSERT_TRUE(FindHosts(store, rank, size, {rank, rank + 1}, kTimeout).ok());
    });
    EXPECT_LE(store.Commands(), 5 * size + 1) << size;
  }
}

}  // namespace
}  // namespace ddp::internal
