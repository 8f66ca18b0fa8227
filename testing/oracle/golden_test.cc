// Compares our DistributedDataParallel with PyTorch's, scenario by scenario: see README.md.
//
// By default the test uses the committed values, which were made on another machine. With
// DDP_ORACLE_DIRECTORY it uses the values that generate.py has just written there, and strict
// bounds.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "elastic/checkpoint/file_system/posix_file_system.h"
#include "elastic/checkpoint/format/safetensors_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "testing/oracle/comparison.h"
#include "testing/oracle/error_runner.h"
#include "testing/oracle/scenario.h"
#include "testing/oracle/scenario_runner.h"
#include "testing/ranks/rank_harness.h"
#include "testing/ranks/rank_test.h"

namespace ddp::testing {
namespace {

using Json = nlohmann::json;

constexpr char kFolder[] = "testing/oracle/";

// Largest allowed differences between our values and PyTorch's. A float's last digits depend on the
// processor, so the bounds are stricter on the machine where PyTorch's values were made.
struct Bounds {
  double loss_relative = 1e-4;
  double gradient_of_model = 1e-4;  // relative to the model's largest gradient
  double final_of_tensor = 1e-4;    // relative to the tensor's largest element
  int64_t ulps = 0;                 // not checked with committed values
  double of_tensor = 0;             // or relative to the tensor's largest element
  double of_model = 0;              // or relative to the model's largest gradient
  double final_absolute = 1e-9;     // allowed beside final_of_tensor
};

// One run of every scenario: the number of ranks, and ProcessGroupOptions::backend.
using Setting = std::pair<int, std::string>;

// Returns true when sums over the ranks are added in PyTorch's order. Its Gloo adds round a ring,
// shared memory in a tree. Two numbers have the same sum in both.
bool AddsInTheirOrder(const Setting& setting) {
  return setting.first == 2 || setting.second == "gloo";
}

// Largest difference of two sums in different orders, relative to the largest number of the model:
// a unit of a 16-bit type for each addition of numbers that a hook has rounded to it.
double BoundOfOrder(const Scenario& scenario, int world_size) {
  if (absl::StrContains(scenario.hook, "fp16")) return (world_size - 1) * 0x1p-11;
  return absl::StrContains(scenario.hook, "bf16") ? (world_size - 1) * 0x1p-8 : 1e-6;
}

Bounds StrictBounds(int world_size) {
  return {.loss_relative = 1e-6,
          .final_of_tensor = 1e-6,
          .ulps = world_size == 2 ? 2 : 4,
          .of_tensor = world_size == 2 ? 0 : 1e-6};
}

std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Returns the JSON object in a file, or an empty one when there is none.
Json ReadJson(const std::string& path) {
  Json json = Json::parse(ReadText(path), nullptr, /*allow_exceptions=*/false);
  return json.is_object() ? json : Json::object();
}

// Replaces the rank in `text`, because either rank may find the error first.
std::string WithoutRank(const std::string& text) {
  return absl::StrReplaceAll(
      text,
      {{"rank 0", "rank R"}, {"rank 1", "rank R"}, {"Rank 0", "Rank R"}, {"Rank 1", "Rank R"}});
}

std::string FreshDirectory() {
  const char* directory = std::getenv("DDP_ORACLE_DIRECTORY");
  return directory == nullptr ? "" : directory;
}

// Returns the folder with PyTorch's values.
std::string GoldenDirectory() {
  return FreshDirectory().empty() ? absl::StrCat(kFolder, "golden") : FreshDirectory();
}

// Makes a folder for the values of our ranks.
std::string MakeResultsDirectory() {
  std::string results = absl::StrCat(::testing::TempDir(), "/oracle_XXXXXX");
  EXPECT_NE(mkdtemp(results.data()), nullptr) << results;
  return results;
}

std::vector<Scenario> Scenarios() {
  auto scenarios = ParseScenarios(ReadText(absl::StrCat(kFolder, "scenarios.json")));
  return scenarios.ok() ? *std::move(scenarios) : std::vector<Scenario>();
}

// Tensors of one file, by name.
class TensorFile {
 public:
  // Empty when there is no such file.
  explicit TensorFile(const std::string& path) {
    elastic::PosixFileSystem files;
    const auto opened = files.OpenFile(path);
    if (!opened.ok()) return;
    auto loaded = elastic::LoadSafetensors(**opened, path);
    if (!loaded.ok()) return;
    file_ = *std::move(loaded);
    for (const elastic::TensorView& view : file_.tensors) views_[view.name] = &view;
  }

  const elastic::TensorView* Find(const std::string& name) const {
    const auto found = views_.find(name);
    return found == views_.end() ? nullptr : found->second;
  }

  // Returns the rest of each name that begins with `prefix`.
  std::set<std::string> NamesUnder(const std::string& prefix) const {
    std::set<std::string> names;
    for (const auto& [name, view] : views_) {
      if (absl::StartsWith(name, prefix)) names.insert(name.substr(prefix.size()));
    }
    return names;
  }

 private:
  elastic::LoadedFile file_;
  std::map<std::string, const elastic::TensorView*> views_;
};

Difference Compare(const elastic::TensorView& ours, const elastic::TensorView& theirs) {
  return CompareFloats(reinterpret_cast<const float*>(ours.data),
                       reinterpret_cast<const float*>(theirs.data), ours.bytes / sizeof(float));
}

bool SameBits(const elastic::TensorView& a, const elastic::TensorView& b) {
  return a.type == b.type && std::memcmp(a.data, b.data, a.bytes) == 0;
}

RANK_BODY(Scenarios) { EXPECT_EQ(RunOracleScenarios(), 0); }

RANK_BODY(Rpc) { EXPECT_EQ(RunOracleRpc(), 0); }

RANK_BODY(Errors) { EXPECT_EQ(RunOracleErrors(), 0); }

// Results of all scenarios on one number of ranks: ours, run here, and PyTorch's.
struct World {
  RankRun run;
  std::vector<std::unique_ptr<TensorFile>> ours;  // of each rank
  std::vector<Json> our_facts;
  std::unique_ptr<TensorFile> theirs;
  Json their_facts;
};

std::vector<Setting> Settings() { return {{2, "gloo"}, {3, "gloo"}, {2, "shm"}, {3, "shm"}}; }

class GoldenTest : public ::testing::TestWithParam<std::tuple<Scenario, Setting>> {
 protected:
  static void SetUpTestSuite() {
    for (const Setting& setting : Settings()) worlds_[setting] = RunWorld(setting);
  }
  static void TearDownTestSuite() { worlds_.clear(); }

  static std::unique_ptr<World> RunWorld(const Setting& setting) {
    const auto& [world_size, backend] = setting;
    const std::string golden = GoldenDirectory();
    const std::string results = MakeResultsDirectory();
    auto world = std::make_unique<World>();
    world->run =
        RunRanks({.world_size = world_size,
                  .body = "Scenarios",
                  .store_url = NewStoreUrl(),
                  .environment = {{kOracleTable, absl::StrCat(kFolder, "scenarios.json")},
                                  {kOracleBackend, backend},
                                  {kOracleModels, absl::StrCat(golden, "/models.safetensors")},
                                  {kOracleResults, results}}});
    for (int rank = 0; rank < world_size; ++rank) {
      world->ours.push_back(
          std::make_unique<TensorFile>(absl::StrCat(results, "/tensors_", rank, ".safetensors")));
      world->our_facts.push_back(ReadJson(absl::StrCat(results, "/facts_", rank, ".json")));
    }
    world->theirs =
        std::make_unique<TensorFile>(absl::StrCat(golden, "/results_", world_size, ".safetensors"));
    world->their_facts = ReadJson(absl::StrCat(golden, "/facts_", world_size, ".json"));
    return world;
  }

  void CompareFacts() const;
  void CompareLosses() const;
  void CompareGradients();
  void CompareFinals();
  void CompareRanks() const;

  const Scenario& scenario() const { return std::get<0>(GetParam()); }
  const Setting& setting() const { return std::get<1>(GetParam()); }
  int world_size() const { return setting().first; }
  const World& world() const { return *worlds_.at(setting()); }
  int recorded_rank() const { return scenario().RecordedRank(world_size()); }
  const TensorFile& ours() const { return *world().ours[static_cast<size_t>(recorded_rank())]; }
  std::string Path(const std::string& rest) const {
    return absl::StrCat(scenario().name, "/", rest);
  }
  std::string TheirPath(const std::string& rest) const {
    return absl::StrCat(scenario().PyTorchName(), "/", rest);
  }
  bool scattered() const { return scenario().zero == "scatter"; }

  const Bounds bounds_ = MakeBounds();
  Difference worst_;

 private:
  static std::map<Setting, std::unique_ptr<World>> worlds_;

  Bounds MakeBounds() const;
  double LargestGradient() const;
};
std::map<Setting, std::unique_ptr<World>> GoldenTest::worlds_;

Bounds GoldenTest::MakeBounds() const {
  const bool committed = FreshDirectory().empty();
  Bounds bounds = committed ? Bounds() : StrictBounds(world_size());
  const double of_order = BoundOfOrder(scenario(), world_size());
  // Where two processors differ in the last digit of a float, a hook may round it to the next
  // number of its 16-bit type.
  if (committed && world_size() > 2)
    bounds.gradient_of_model = std::max(bounds.gradient_of_model, of_order);
  if (AddsInTheirOrder(setting())) return bounds;
  for (double* const bound :
       {&bounds.loss_relative, &bounds.gradient_of_model, &bounds.final_of_tensor}) {
    *bound = std::max(*bound, of_order);
  }
  bounds.of_model = of_order;
  // A gradient that is zero but for rounding, like that of a bias before a normalization, has no
  // digit in common in two orders. Five steps sum up such differences.
  bounds.final_absolute = of_order;
  return bounds;
}

// Compares exactly: the buckets, the undefined gradients, and the sparse gradients.
void GoldenTest::CompareFacts() const {
  const Json& theirs = world().their_facts.at(scenario().PyTorchName());
  const Json& ours = world().our_facts[static_cast<size_t>(recorded_rank())].at(scenario().name);
  for (const char* fact : {"buckets", "undefined", "sparse"}) {
    if (scattered() && fact == std::string("buckets")) continue;  // the optimizer's own
    EXPECT_EQ(ours.at(fact), theirs.at(fact)) << fact;
  }
}

void GoldenTest::CompareLosses() const {
  for (int rank = 0; rank < world_size(); ++rank) {
    const auto* ours = world().ours[static_cast<size_t>(rank)]->Find(Path("loss"));
    const auto* theirs = world().theirs->Find(TheirPath(absl::StrCat("loss/", rank)));
    ASSERT_TRUE(ours != nullptr && theirs != nullptr) << "rank " << rank;
    ASSERT_EQ(ours->type, theirs->type) << "rank " << rank;
    EXPECT_LE(Compare(*ours, *theirs).relative, bounds_.loss_relative) << "rank " << rank;
  }
}

double GoldenTest::LargestGradient() const {
  Difference all;
  for (const std::string& name : world().theirs->NamesUnder(TheirPath("grad/0/"))) {
    const auto* tensor = world().theirs->Find(TheirPath("grad/0/" + name));
    all.Include(Compare(*tensor, *tensor));
  }
  return all.largest;
}

// Compares the gradients of every step that the golden values have.
void GoldenTest::CompareGradients() {
  const double largest = LargestGradient();
  for (const std::string& name : world().theirs->NamesUnder(TheirPath("grad/"))) {
    const auto* theirs = world().theirs->Find(TheirPath("grad/" + name));
    const auto* mine = ours().Find(Path("grad/" + name));
    ASSERT_NE(mine, nullptr) << name << " has no gradient here";
    ASSERT_EQ(mine->type, theirs->type) << name;
    const Difference difference = Compare(*mine, *theirs);
    worst_.Include(difference);
    if (absl::StartsWith(name, "0/")) {
      EXPECT_LE(difference.absolute, bounds_.gradient_of_model * largest) << name;
    }
    if (bounds_.ulps > 0) {
      EXPECT_TRUE(difference.ulps <= bounds_.ulps ||
                  difference.absolute <= bounds_.of_tensor * difference.largest ||
                  difference.absolute <= bounds_.of_model * largest)
          << name << ": " << difference.ulps << " ulp, " << difference.absolute << " of "
          << difference.largest;
    }
  }
}

// Compares weights and buffers after the last step, where the golden values have them.
void GoldenTest::CompareFinals() {
  for (const std::string& name : world().theirs->NamesUnder(TheirPath("final/"))) {
    const auto* theirs = world().theirs->Find(TheirPath("final/" + name));
    const auto* mine = ours().Find(Path("final/" + name));
    ASSERT_NE(mine, nullptr) << name;
    ASSERT_EQ(mine->type, theirs->type) << name;
    if (theirs->type.dtype != elastic::Dtype::kF32) {
      EXPECT_TRUE(SameBits(*mine, *theirs)) << name;
      continue;
    }
    const Difference difference = Compare(*mine, *theirs);
    EXPECT_LE(difference.absolute,
              std::max(bounds_.final_of_tensor * difference.largest, bounds_.final_absolute))
        << name;
  }
}

// Checks that all our ranks have bit-equal gradients at every step, and bit-equal final weights.
void GoldenTest::CompareRanks() const {
  const std::set<std::string> gradients = ours().NamesUnder(Path("grad/"));
  for (int rank = 0; rank < world_size(); ++rank) {
    const TensorFile& other = *world().ours[static_cast<size_t>(rank)];
    for (const std::string& name : gradients) {
      if (std::atoi(name.c_str()) >= scenario().StepsOf(rank)) continue;
      const auto* gradient = other.Find(Path("grad/" + name));
      ASSERT_NE(gradient, nullptr) << name << " on rank " << rank;
      EXPECT_TRUE(SameBits(*ours().Find(Path("grad/" + name)), *gradient))
          << name << " on rank " << rank;
    }
    for (const std::string& name : ours().NamesUnder(Path("final/"))) {
      // Without a join, the running statistics of every rank include its own last batch.
      const bool buffer = absl::StrContains(name, "running_");
      if (buffer && scenario().batches.empty()) continue;
      EXPECT_TRUE(SameBits(*ours().Find(Path("final/" + name)), *other.Find(Path("final/" + name))))
          << name << " on rank " << rank;
    }
  }
}

TEST_P(GoldenTest, EqualsPyTorch) {
  for (int rank = 0; rank < world_size(); ++rank) {
    const Json& facts = world().our_facts[static_cast<size_t>(rank)];
    ASSERT_TRUE(facts.contains(scenario().name)) << world().run.Describe();
    const Json& fact = facts.at(scenario().name);
    ASSERT_FALSE(fact.contains("error")) << "rank " << rank << ": " << fact.at("error");
  }
  ASSERT_TRUE(world().their_facts.contains(scenario().PyTorchName()))
      << "no golden values: generate.py";
  CompareFacts();
  CompareLosses();
  if (!scattered()) CompareGradients();
  CompareFinals();
  CompareRanks();
  std::cout << "measured: " << scenario().name << " on " << world_size() << " ranks of "
            << setting().second << ": largest difference " << worst_.ulps << " ulp, "
            << worst_.absolute << "\n";
}

INSTANTIATE_TEST_SUITE_P(All, GoldenTest,
                         ::testing::Combine(::testing::ValuesIn(Scenarios()),
                                            ::testing::ValuesIn(Settings())),
                         [](const auto& info) {
                           const Setting& setting = std::get<1>(info.param);
                           return absl::StrCat(std::get<0>(info.param).name, "On", setting.first,
                                               "_", setting.second);
                         });

// Compares remote calls, contexts and optimizers with PyTorch's: losses of both trainers, and the
// parameters after the last step, which are equal on both.
TEST(GoldenRpcTest, EqualsPyTorch) {
  const std::string golden = GoldenDirectory(), results = MakeResultsDirectory();
  ASSERT_TRUE(
      RanksSucceed({.world_size = 3,
                    .body = "Rpc",
                    .store_url = NewStoreUrl(),
                    .environment = {{kOracleModels, absl::StrCat(golden, "/models.safetensors")},
                                    {kOracleResults, results}}}));
  const bool fresh = !FreshDirectory().empty();
  const TensorFile theirs(absl::StrCat(golden, "/rpc.safetensors"));
  const std::set<std::string> names = theirs.NamesUnder("");
  EXPECT_EQ(names.size(), 2u * (2 + 7));  // of a run: losses, and the table and 6 dense parameters
  Difference worst;
  for (const int rank : {0, 1}) {
    const TensorFile ours(absl::StrCat(results, "/rpc_", rank, ".safetensors"));
    for (const std::string& name : names) {
      const bool loss = absl::StrContains(name, "/loss/");
      if (loss && !absl::EndsWith(name, absl::StrCat("/", rank))) continue;
      const auto* mine = ours.Find(name);
      ASSERT_NE(mine, nullptr) << name;
      ASSERT_EQ(mine->type, theirs.Find(name)->type) << name;
      const Difference difference = Compare(*mine, *theirs.Find(name));
      worst.Include(difference);
      if (fresh) {
        EXPECT_EQ(difference.ulps, 0) << name;
      } else {
        EXPECT_LE(difference.absolute, Bounds().final_of_tensor * difference.largest) << name;
      }
    }
  }
  std::cout << "measured: remote calls: largest difference " << worst.ulps << " ulp\n";
}

// Compares our errors of misuse with the golden values. Each rank's error contains the expected
// text, the error of one rank is exactly that text, and all name the parameters that PyTorch names.
TEST(GoldenErrorsTest, AreAsUseful) {
  const std::string results = MakeResultsDirectory();
  ASSERT_TRUE(RanksSucceed({.world_size = 2,
                            .body = "Errors",
                            .store_url = NewStoreUrl(),
                            .environment = {{kOracleResults, results}}}));
  const Json golden = ReadJson(absl::StrCat(kFolder, "golden/errors.json"));
  ASSERT_FALSE(golden.empty());
  const std::vector<Json> ours = {ReadJson(absl::StrCat(results, "/errors_0.json")),
                                  ReadJson(absl::StrCat(results, "/errors_1.json"))};
  for (const auto& [name, expected] : golden.items()) {
    bool said = false;
    for (size_t rank = 0; rank < ours.size(); ++rank) {
      SCOPED_TRACE(absl::StrCat(name, " on rank ", rank));
      const std::string mine = WithoutRank(ours[rank].at(name));
      const std::string text = WithoutRank(expected.at("ours").at(rank));
      // A rank may get its peer's failure report first; its text then begins with the report.
      EXPECT_THAT(mine, ::testing::HasSubstr(text));
      said |= mine == text;
      for (const std::string parameter : expected.at("names")) {
        EXPECT_THAT(mine, ::testing::HasSubstr(parameter));
      }
    }
    EXPECT_TRUE(said) << name;
  }
}

TEST(GoldenTableTest, IsThere) { EXPECT_GT(Scenarios().size(), 40u); }

}  // namespace
}  // namespace ddp::testing
