#include "ddp/comm/meeting/attempt_name.h"

#include <set>
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
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kTimeout = absl::Minutes(1);

// Returns the name on which the ranks agree.
std::string NameOf(FakeGroupStore& store, int size) {
  std::vector<std::string> names(size);
  RunThreads(size, [&](int rank) { names[rank] = *AgreeOnAttempt(store, rank, size, kTimeout); });
  const std::set<std::string> different(names.begin(), names.end());
  EXPECT_EQ(different.size(), 1u);
  return names[0];
}

TEST(AttemptNameTest, EachAttemptHasAnotherName) {
  FakeGroupStore store;
  std::set<std::string> names;
  for (const int size : {1, 2, 5, 5, 3}) names.insert(NameOf(store, size));
  EXPECT_EQ(names.size(), 5u);
  EXPECT_FALSE(names.contains(""));
  EXPECT_THAT(store.Keys(), IsEmpty());
}

// Ranks that ended in the middle leave any part of the keys behind.
TEST(AttemptNameTest, KeysOfAnAttemptThatEndedEarlyAreNotTakenForOwn) {
  FakeGroupStore store;
  for (int rank = 1; rank < 4; ++rank) {
    const std::string number = absl::StrCat("old", rank);
    store.Set(absl::StrCat("attempt/number/", rank), number);
    if (rank > 1) store.Set(absl::StrCat("attempt/answer/", number), "old-name");
    if (rank > 2) store.Set(absl::StrCat("attempt/confirmed/old-name/", rank), "");
  }
  EXPECT_NE(NameOf(store, 4), "old-name");
}

TEST(AttemptNameTest, ARankThatDoesNotComeIsNamed) {
  FakeGroupStore store;
  const absl::Duration soon = absl::Milliseconds(50);
  store.Set("attempt/number/1", "of an earlier attempt");
  EXPECT_THAT(std::string(AgreeOnAttempt(store, 0, 2, soon).status().message()),
              HasSubstr("rank 0: rank 1 has not come within 50ms"));
  EXPECT_THAT(std::string(AgreeOnAttempt(store, 2, 3, soon).status().message()),
              HasSubstr("rank 2: rank 0 has not come within 50ms"));
}

}  // namespace
}  // namespace ddp::internal
