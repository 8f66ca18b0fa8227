#include "elastic/checkpoint/group/agree_on.h"

#include <string>
#include <vector>

#include "elastic/checkpoint/group/in_process_group.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

// Returns what each rank gets when rank r passes `mine[r]`.
std::vector<absl::Status> Agree(const std::vector<absl::Status>& mine) {
  std::vector<absl::Status> results(mine.size(), absl::UnknownError("not called"));
  RunRanks(static_cast<int>(mine.size()), [&](CheckpointGroup& group) {
    const auto rank = static_cast<size_t>(group.rank());
    results[rank] = AgreeOn(group, mine[rank]);
  });
  return results;
}

TEST(AgreeOnTest, NoErrorIsOkOnEveryRank) {
  for (const absl::Status& result : Agree({absl::OkStatus(), absl::OkStatus(), absl::OkStatus()})) {
    EXPECT_TRUE(result.ok()) << result;
  }
}

TEST(AgreeOnTest, TheLowestRanksErrorIsEveryRanksResult) {
  for (const absl::Status& result :
       Agree({absl::OkStatus(), absl::DataLossError("rng.cpu.1 is no state"),
              absl::InternalError("out of memory")})) {
    EXPECT_EQ(result, absl::DataLossError("rank 1: rng.cpu.1 is no state"));
  }
}

// A group whose other ranks cannot be reached.
class BrokenGroup final : public CheckpointGroup {
 public:
  int rank() const override { return 1; }
  int world_size() const override { return 2; }
  absl::StatusOr<std::string> Decide(const std::string&, const Decision&) override {
    return absl::UnavailableError("the store is gone");
  }
};

TEST(AgreeOnTest, AnErrorOfTheGroupIsTheResult) {
  BrokenGroup group;
  EXPECT_EQ(AgreeOn(group, absl::OkStatus()), absl::UnavailableError("the store is gone"));
}

}  // namespace
}  // namespace ddp::elastic
