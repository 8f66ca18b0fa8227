// Random collectives on each backend, compared bit for bit with LibTorch's Gloo and with the
// definition of the collective.
//
// A block of cases shares its world size and runs with a random number of operations in progress.
// Its seed fixes everything about it, and stands in the message of a failure. The environment sets:
//   DDP_CONFORMANCE_CASES   the number of cases of each backend; 300 by default
//   DDP_CONFORMANCE_SEED    the seed of the first block; 1 by default
// For example `bazel test --test_env=DDP_CONFORMANCE_CASES=10000`. One block of seed 77 alone:
// `--test_env=DDP_CONFORMANCE_SEED=77 --test_env=DDP_CONFORMANCE_CASES=1`.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ddp/comm/conformance/case_run.h"
#include "ddp/comm/conformance/collective_case.h"
#include "ddp/comm/conformance/test_backends.h"
#include "ddp/comm/conformance/test_group.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

constexpr size_t kCasesOfABlock = 12;
constexpr int kSizes[] = {1, 2, 3, 4, 8};

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  uint64_t value = 0;
  EXPECT_TRUE(absl::SimpleAtoi(text, &value)) << name << " is not a number: " << text;
  return value;
}

// Cases of one world size.
struct Block {
  int size = 1;
  size_t depth = 1;  // operations in progress at a time
  std::vector<Case> cases;
};

class RandomBlocks {
 public:
  RandomBlocks(uint64_t seed, const Claims& claims) : seed_(seed), random_(seed), claims_(claims) {}

  Block Next() {
    Block block{.size = Pick(kSizes), .depth = size_t{1} << Below(4)};
    while (block.cases.size() < kCasesOfABlock) {
      const Case c = NextCase(block.size);
      if (c.operation == Operation::kReceiveAny) continue;  // has no one result
      if (c.operation == Operation::kSendReceive && block.size == 1) continue;
      if (Claimed(claims_, c)) block.cases.push_back(c);
    }
    return block;
  }

 private:
  Case NextCase(int size) {
    Case c{.operation = static_cast<Operation>(Below(std::size(kOperationNames))),
           .type = Pick(kAllTypes),
           .reduction = Pick(kAllReductions),
           .count = Count(),
           .root = static_cast<int>(Below(size)),
           .seed = seed_ * 1000 + Below(1000),
           .strided = Below(4) == 0};
    // Elsewhere the order of addition may differ from Gloo's.
    c.random_floats = (size <= 2 || claims_.tree_order) && Below(2) == 0;
    return c;
  }

  // Mostly small; one in sixty has more than a chunk.
  int64_t Count() {
    switch (Below(60)) {
      case 0:
        return 20000 + static_cast<int64_t>(Below(60000));
      case 1:
      case 2:
        return 0;
      default:
        return 1 + static_cast<int64_t>(Below(uint64_t{1} << Below(13)));
    }
  }

  uint64_t Below(uint64_t limit) { return random_() % limit; }

  template <typename T, size_t N>
  T Pick(const T (&from)[N]) {
    return from[Below(N)];
  }

  const uint64_t seed_;
  std::mt19937_64 random_;
  const Claims& claims_;
};

// The groups of one backend, by size.
class Groups {
 public:
  explicit Groups(const TestedBackend& kind) : kind_(kind) {}

  TestGroup& OfSize(int size) {
    std::unique_ptr<TestGroup>& group = groups_[size];
    if (!group) group = std::make_unique<TestGroup>(kind_, size);
    return *group;
  }

 private:
  const TestedBackend& kind_;
  std::map<int, std::unique_ptr<TestGroup>> groups_;
};

// The outcomes of a block: outcomes[rank][case].
using Outcomes = std::vector<std::vector<Outcome>>;

Outcomes RunBlock(Groups& groups, const Block& block) {
  Outcomes outcomes(block.size);
  groups.OfSize(block.size).Run([&](TestRank& self) {
    outcomes[self.rank] = RunCases(self, block.cases, block.depth);
  });
  return outcomes;
}

// Returns whether Gloo gives the same bits by its contract.
bool Comparable(const Claims& gloo, const Case& c, int size) {
  return Claimed(gloo, c) && (!c.random_floats || !Reduces(c.operation) || size <= 2);
}

class BackendDifferentialTest : public ::testing::TestWithParam<TestedBackend> {};

TEST_P(BackendDifferentialTest, EqualsGlooAndTheDefinition) {
  const TestedBackend gloo = TestedGloo();
  Groups groups(GetParam());
  Groups gloo_groups(gloo);
  const bool other = GetParam().name != gloo.name;
  const uint64_t count = FromEnvironment("DDP_CONFORMANCE_CASES", 300);
  uint64_t seed = FromEnvironment("DDP_CONFORMANCE_SEED", 1);
  uint64_t run = 0;
  uint64_t compared = 0;
  for (; run < count && !HasFailure(); ++seed) {
    const Block block = RandomBlocks(seed, GetParam().claims).Next();
    const Outcomes actual = RunBlock(groups, block);
    Block for_gloo = block;
    std::vector<size_t> index_in_gloo(block.cases.size());
    for_gloo.cases.clear();
    for (size_t i = 0; i < block.cases.size(); ++i) {
      index_in_gloo[i] = for_gloo.cases.size();
      if (other && Comparable(gloo.claims, block.cases[i], block.size)) {
        for_gloo.cases.push_back(block.cases[i]);
      }
    }
    const Outcomes of_gloo = RunBlock(gloo_groups, for_gloo);
    for (size_t i = 0; i < block.cases.size(); ++i, ++run) {
      const Case& c = block.cases[i];
      const AllInputs inputs = AllInputsOf(c, block.size);
      const bool both = other && Comparable(gloo.claims, c, block.size);
      compared += both ? 1 : 0;
      for (int rank = 0; rank < block.size; ++rank) {
        SCOPED_TRACE(absl::StrCat("block of seed ", seed, ": ", Describe(c, block.size),
                                  ", on rank ", rank));
        const Outcome& outcome = actual[rank][i];
        const std::vector<at::Tensor> expected = ExpectedOf(c, inputs, rank);
        EXPECT_EQ(outcome.error, "");
        EXPECT_EQ(Difference(outcome.outputs, expected), "");
        if (!both) continue;
        const Outcome& peer = of_gloo[rank][index_in_gloo[i]];
        EXPECT_EQ(peer.error, "") << "Gloo";
        // Where c10d leaves the output open, there is nothing to compare.
        if (!expected.empty()) {
          EXPECT_EQ(Difference(outcome.outputs, peer.outputs), "") << "from Gloo";
        }
      }
    }
  }
  RecordProperty("cases", static_cast<int>(run));
  RecordProperty("compared_with_gloo", static_cast<int>(compared));
  EXPECT_TRUE(!other || count < 100 || compared > run / 4) << "Gloo ran " << compared;
}

INSTANTIATE_TEST_SUITE_P(Backends, BackendDifferentialTest, ::testing::ValuesIn(TestedBackends()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ddp::internal
