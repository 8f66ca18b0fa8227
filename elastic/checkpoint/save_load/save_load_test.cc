// Tests saves and loads of one rank under every fault that a synchronous save can have. The file
// system is in memory and loses unsynced data as a disk does. "Row N" is row N of the failure table
// of the checkpoint design. save_load_fencing_test has several writers, save_load_ranks_test
// several ranks.
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/folder/checkpoint_storage.h"
#include "elastic/checkpoint/format/checkpoint_id.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/group/checkpoint_group.h"
#include "elastic/checkpoint/save_load/save_checkpoint.h"
#include "elastic/checkpoint/save_load/test_process.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/file_system/memory_file_system.h"

namespace ddp::elastic {
namespace {

using ::ddp::testing::MemoryFileSystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Loss = MemoryFileSystem::Loss;

// Makes a folder with one file of a save.
void MakeLeftover(MemoryFileSystem& file_system, const std::string& name) {
  ASSERT_TRUE(file_system.MakeDirectory(name).ok());
  ASSERT_TRUE(file_system.CreateFile(name + "/extra-00000.safetensors").ok());
}

class SaveLoadTest : public ::testing::Test {
 protected:
  void SetUp() override {
    TestProcess process(&file_system_, 1);
    ASSERT_TRUE(process.Save(1).ok());
    ASSERT_TRUE(process.Save(2).ok());
  }

  std::string Path(int64_t step, const std::string& file) {
    return absl::StrCat(kRoot, "/", FolderName({step, 1}), "/", file);
  }

  // Checks that step 1 loads, and that step 2 was passed over because of `reason`.
  void ExpectFallsBack(const std::string& reason) {
    TestProcess process(&file_system_, 2);
    EXPECT_EQ(process.LoadedStep(), 1);
    const auto loaded = process.Load();
    ASSERT_TRUE(loaded.ok() && loaded->has_value());
    EXPECT_THAT((*loaded)->passed_over, ElementsAre(HasSubstr(reason)));
  }

  MemoryFileSystem file_system_;
};

TEST(SaveLoadEmptyTest, NoFolderIsNoCheckpoint) {
  MemoryFileSystem file_system;
  EXPECT_EQ(TestProcess(&file_system, 1).LoadedStep(), -1);
}

TEST(SaveLoadEmptyTest, FolderWithOtherThingsIsNoCheckpoint) {
  MemoryFileSystem file_system;
  ASSERT_TRUE(file_system.MakeDirectory("/jobs").ok());
  ASSERT_TRUE(file_system.MakeDirectory(kRoot).ok());
  ASSERT_TRUE(file_system.MakeDirectory(absl::StrCat(kRoot, "/LATEST")).ok());
  EXPECT_EQ(TestProcess(&file_system, 1).LoadedStep(), -1);
}

TEST_F(SaveLoadTest, NewestLoads) {
  EXPECT_EQ(TestProcess(&file_system_, 2).LoadedStep(), 2);
  EXPECT_THAT(Names(file_system_),
              ElementsAre(".owner", "step-000000000001.g0001", "step-000000000002.g0001"));
  EXPECT_THAT(
      *file_system_.ListDirectory(absl::StrCat(kRoot, "/step-000000000002.g0001")),
      ElementsAre("MANIFEST.json", "extra-00000.safetensors", "model-00001-of-00001.safetensors",
                  "optimizer-00001-of-00001.safetensors"));
}

TEST_F(SaveLoadTest, EqualStateGivesEqualFilesInEveryGeneration) {
  ASSERT_TRUE(TestProcess(&file_system_, 9).Save(2).ok());
  for (const char* name : {"model-00001-of-00001.safetensors",
                           "optimizer-00001-of-00001.safetensors", "extra-00000.safetensors"}) {
    EXPECT_EQ(file_system_.Content(Path(2, name)),
              file_system_.Content(absl::StrCat(kRoot, "/step-000000000002.g0009/", name)));
  }
}

// Rows 1, 2 and 12: the process dies at every call, with one of several losses of unsynced data.
// The next generation dies at some call too, before a third generation loads.
TEST(SaveLoadFaultTest, DeathAtEveryCallLeavesThePreviousOrTheNew) {
  for (const Loss loss :
       {Loss::kNothing, Loss::kEverythingUnsynced, Loss::kUnsyncedContent, Loss::kUnsyncedNames}) {
    bool survived = false;
    for (int64_t call = 1; !survived; ++call) {
      MemoryFileSystem file_system;
      ASSERT_TRUE(TestProcess(&file_system, 1).Save(1).ok());
      TestProcess process(&file_system, 2);
      file_system.FailFromCall(file_system.calls() + call, absl::InternalError("dead"));
      survived = process.Save(2).ok();
      file_system.PowerCut(loss);
      TestProcess next(&file_system, 3);
      const int64_t step = next.LoadedStep();
      ASSERT_TRUE(step == 2 || (step == 1 && !survived)) << "call " << call << " step " << step;

      file_system.FailFromCall(file_system.calls() + 1 + call % 13, absl::InternalError("dead"));
      (void)next.Save(3).ok();
      file_system.PowerCut(loss);
      TestProcess last(&file_system, 4);
      ASSERT_GE(last.LoadedStep(), step) << "call " << call;
      ASSERT_TRUE(last.Save(4).ok());
      ASSERT_EQ(last.LoadedStep(), 4);
      for (const std::string& name : Names(file_system)) {
        ASSERT_TRUE(name == ".owner" || absl::StartsWith(name, "step-")) << name;
      }
    }
  }
}

// Row 6: every single call fails once, and the process continues.
TEST(SaveLoadFaultTest, FailureOfEveryCallIsReportedAndTheNextSaveWorks) {
  int64_t failed = 0;
  for (int64_t call = 1;; ++call) {
    MemoryFileSystem file_system;
    TestProcess process(&file_system, 1);
    ASSERT_TRUE(process.Save(1).ok());
    const int64_t first = file_system.calls();
    file_system.FailCall(first + call, absl::ResourceExhaustedError("no space left on device"));
    const absl::StatusOr<std::string> saved = process.Save(2);
    if (file_system.calls() < first + call) break;
    if (!saved.ok()) {
      ++failed;
      EXPECT_THAT(std::string(saved.status().message()), HasSubstr("no space left"));
    }
    const int64_t step = process.LoadedStep();
    ASSERT_TRUE(step == 2 || (step == 1 && !saved.ok())) << "call " << call;
    ASSERT_TRUE(process.Save(3).ok()) << "call " << call;
    ASSERT_EQ(process.LoadedStep(), 3);
  }
  EXPECT_GT(failed, 15);
}

TEST(SaveLoadFaultTest, FailedSaveCanBeRepeatedAtTheSameStep) {
  for (int64_t call = 1;; ++call) {
    MemoryFileSystem file_system;
    TestProcess process(&file_system, 1);
    file_system.FailCall(call, absl::ResourceExhaustedError("no space left on device"));
    (void)process.Save(1).ok();
    if (file_system.calls() < call) break;
    ASSERT_TRUE(process.Save(1).ok()) << "call " << call;
    ASSERT_EQ(process.LoadedStep(), 1);
  }
}

// The disk fails, and so the removal of the unfinished checkpoint fails too. Then it recovers.
TEST(SaveLoadFaultTest, TheNextSaveRemovesWhatAFailedSaveCouldNot) {
  bool survived = false;
  for (int64_t call = 1; !survived; ++call) {
    MemoryFileSystem file_system;
    TestProcess process(&file_system, 1);
    ASSERT_TRUE(process.Save(1).ok());
    file_system.FailFromCall(file_system.calls() + call, absl::InternalError("I/O error"));
    survived = process.Save(2).ok();
    file_system.PowerCut(Loss::kNothing);  // ends the faults
    ASSERT_TRUE(process.Save(3).ok()) << "call " << call;
    for (const std::string& name : Names(file_system)) {
      ASSERT_TRUE(name == ".owner" || absl::StartsWith(name, "step-"))
          << "call " << call << ": " << name;
    }
  }
}

// The first process dies, for instance between the creation of the root and its sync.
TEST(SaveLoadFaultTest, TheRootIsDurableAfterADeathInTheFirstSave) {
  for (int64_t call = 1;; ++call) {
    MemoryFileSystem file_system;
    file_system.FailCall(call, absl::InternalError("dead"));
    (void)TestProcess(&file_system, 1).Save(1).ok();
    if (file_system.calls() < call) break;
    ASSERT_TRUE(TestProcess(&file_system, 2).Save(2).ok()) << "call " << call;
    file_system.PowerCut(Loss::kEverythingUnsynced);
    ASSERT_EQ(TestProcess(&file_system, 3).LoadedStep(), 2) << "call " << call;
  }
}

// Rows 3, 4 and 5: wrong lengths, flipped bits and zeroed blocks.
TEST_F(SaveLoadTest, EveryDamageToEveryFileIsFoundAndNamed) {
  for (const char* name : {"MANIFEST.json", "model-00001-of-00001.safetensors",
                           "optimizer-00001-of-00001.safetensors", "extra-00000.safetensors"}) {
    const std::string path = Path(2, name);
    const std::string whole = *file_system_.Content(path);
    std::vector<std::string> damaged = {"", whole.substr(0, 1), whole + "x",
                                        whole.substr(0, whole.size() - 1),
                                        whole.substr(0, whole.size() / 2)};
    for (size_t byte = 0; byte < whole.size(); byte += byte < 40 || byte > 4090 ? 5 : 777) {
      damaged.push_back(whole);
      damaged.back()[byte] ^= static_cast<char>(1 << (byte % 8));
    }
    damaged.push_back(whole);
    for (size_t i = whole.size() / 2; i < whole.size(); ++i) damaged.back()[i] = '\0';
    for (const std::string& content : damaged) {
      file_system_.Corrupt(path, [&](std::string& text) { text = content; });
      ExpectFallsBack(path);
    }
    file_system_.Corrupt(path, [&](std::string& text) { text = whole; });
  }
}

TEST_F(SaveLoadTest, DamagedTensorIsNamed) {
  file_system_.Corrupt(Path(2, "model-00001-of-00001.safetensors"),
                       [](std::string& text) { text.back() ^= 1; });
  ExpectFallsBack("tensor fc.weight is damaged");
}

// Row 8: missing and unknown files.
TEST_F(SaveLoadTest, MissingFileIsFoundAndUnknownFileIsIgnored) {
  ASSERT_TRUE(file_system_
                  .Rename(Path(2, "optimizer-00001-of-00001.safetensors"),
                          Path(2, "optimizer-00001-of-00002.safetensors"))
                  .ok());
  ExpectFallsBack("optimizer-00001-of-00001.safetensors");
  ASSERT_TRUE(file_system_
                  .Rename(Path(2, "optimizer-00001-of-00002.safetensors"),
                          Path(2, "optimizer-00001-of-00001.safetensors"))
                  .ok());
  ASSERT_TRUE(file_system_.CreateFile(Path(2, "NOTES.txt")).ok());
  EXPECT_EQ(TestProcess(&file_system_, 2).LoadedStep(), 2);
  ASSERT_TRUE(file_system_.RemoveFile(Path(2, "MANIFEST.json")).ok());
  ExpectFallsBack("MANIFEST.json");
}

TEST_F(SaveLoadTest, ManifestOfAnotherCheckpointIsRefused) {
  const std::string other = *file_system_.Content(Path(1, "MANIFEST.json"));
  file_system_.Corrupt(Path(2, "MANIFEST.json"), [&](std::string& text) { text = other; });
  ExpectFallsBack("is the manifest of step-000000000001.g0001");
}

TEST_F(SaveLoadTest, NothingReadableIsAnErrorAndNotAFreshStart) {
  for (const int64_t step : {1, 2}) {
    ASSERT_TRUE(file_system_.RemoveFile(Path(step, "MANIFEST.json")).ok());
  }
  const auto loaded = TestProcess(&file_system_, 2).Load();
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(loaded.status().message()),
              AllOf(HasSubstr("none of the checkpoints in /jobs/digits can be read"),
                    HasSubstr(Path(1, "MANIFEST.json")), HasSubstr(Path(2, "MANIFEST.json"))));
}

TEST_F(SaveLoadTest, LeftoversOfASaveAreRemovedAndNothingElseIs) {
  const std::string root = kRoot;
  MakeLeftover(file_system_, root + "/.tmp-step-000000000003.g0001.nonce1");
  MakeLeftover(file_system_, root + "/.del-step-000000000003.g0001.nonce1");
  MakeLeftover(file_system_, root + "/.tmp-mine");
  MakeLeftover(file_system_, root + "/.del-mine");
  MakeLeftover(file_system_, root + "/.tmp-step-000000000003.g0001");
  MakeLeftover(file_system_, "/precious");
  file_system_.MakeLink(root + "/.tmp-x", "/precious");
  file_system_.MakeLink(root + "/.tmp-step-000000000004.g0001.nonce1", "/precious");
  ASSERT_TRUE(file_system_.CreateFile(root + "/.tmp-step-000000000005.g0001.nonce1").ok());
  ASSERT_TRUE(file_system_.CreateFile(root + "/.owner-notes.txt").ok());
  ASSERT_TRUE(TestProcess(&file_system_, 2).Save(9).ok());
  EXPECT_THAT(Names(file_system_),
              ::testing::UnorderedElementsAre(
                  ".owner", "step-000000000001.g0001", "step-000000000002.g0001",
                  "step-000000000009.g0002", ".tmp-mine", ".del-mine",
                  ".tmp-step-000000000003.g0001", ".tmp-x", ".tmp-step-000000000004.g0001.nonce1",
                  ".tmp-step-000000000005.g0001.nonce1", ".owner-notes.txt"));
  EXPECT_TRUE(Exists(file_system_, "/precious/extra-00000.safetensors"));
  EXPECT_TRUE(Exists(file_system_, root + "/.tmp-mine/extra-00000.safetensors"));
}

TEST_F(SaveLoadTest, OnlyFilesOfASaveAreRemovedFromALeftover) {
  const std::string folder = absl::StrCat(kRoot, "/.tmp-step-000000000003.g0001.nonce1");
  MakeLeftover(file_system_, folder);
  ASSERT_TRUE(file_system_.CreateFile("/precious").ok());
  ASSERT_TRUE(file_system_.CreateFile(folder + "/MANIFEST.json").ok());
  ASSERT_TRUE(file_system_.CreateFile(folder + "/notes.txt").ok());
  ASSERT_TRUE(file_system_.CreateFile(folder + "/model.safetensors").ok());
  ASSERT_TRUE(file_system_.MakeDirectory(folder + "/more").ok());
  ASSERT_TRUE(file_system_.MakeDirectory(folder + "/extra-00001.safetensors").ok());
  file_system_.MakeLink(folder + "/model-00001-of-00001.safetensors", "/precious");
  ASSERT_TRUE(TestProcess(&file_system_, 2).Save(9).ok());
  EXPECT_THAT(*file_system_.ListDirectory(folder),
              ::testing::UnorderedElementsAre("notes.txt", "model.safetensors", "more",
                                              "extra-00001.safetensors",
                                              "model-00001-of-00001.safetensors"));
  EXPECT_TRUE(Exists(file_system_, "/precious"));
  EXPECT_EQ(TestProcess(&file_system_, 3).LoadedStep(), 9);
}

TEST_F(SaveLoadTest, AForeignFileInADamagedCheckpointOutlivesItsReplacement) {
  file_system_.Corrupt(Path(2, "model-00001-of-00001.safetensors"),
                       [](std::string& text) { text.back() ^= 1; });
  ASSERT_TRUE(file_system_.CreateFile(Path(2, "notes.txt")).ok());
  ASSERT_TRUE(TestProcess(&file_system_, 1).Save(2).ok());
  EXPECT_EQ(TestProcess(&file_system_, 2).LoadedStep(), 2);
  EXPECT_THAT(
      *file_system_.ListDirectory(absl::StrCat(kRoot, "/.del-step-000000000002.g0001.not-whole")),
      ElementsAre("notes.txt"));
}

TEST_F(SaveLoadTest, AWriterFollowsNoLinkOfTheRoot) {
  const std::string root = kRoot;
  ASSERT_TRUE(file_system_.MakeDirectory("/elsewhere").ok());
  // The link has the name of the work folder of the next save.
  file_system_.MakeLink(root + "/.tmp-step-000000000003.g0002.nonce2", "/elsewhere");
  const auto saved = TestProcess(&file_system_, 2).Save(3);
  EXPECT_FALSE(saved.ok());
  EXPECT_THAT(std::string(saved.status().message()), HasSubstr(".tmp-step-000000000003.g0002"));
  EXPECT_THAT(*file_system_.ListDirectory("/elsewhere"), IsEmpty());

  auto file = file_system_.CreateFile("/precious");
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->Append("text", 4).ok());
  ASSERT_TRUE(file_system_.RemoveFile(root + "/.owner").ok());
  file_system_.MakeLink(root + "/.owner", "/precious");
  const auto refused = TestProcess(&file_system_, 3).Save(4);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("/.owner is not a plain file: remove it"));
  EXPECT_EQ(file_system_.Content("/precious"), "text");
}

// Another job counts its generations from 1 again, so its checkpoint has the same ID.
TEST_F(SaveLoadTest, SavingTheSameStateOnceMoreIsNoFault) {
  const std::string path = Path(2, "MANIFEST.json");
  const std::string before = *file_system_.Content(path);
  MemoryFileSystem* file_system = &file_system_;
  CheckpointStorage storage(file_system, kRoot);
  SoloGroup group;
  const auto saved =
      SaveCheckpoint(file_system_, storage, group, {.owner = {"other run", 1, "othernonce"}},
                     TestState(2).Contents(1));
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(file_system_.Content(path), before);
  EXPECT_THAT(Names(file_system_),
              ElementsAre(".owner", "step-000000000001.g0001", "step-000000000002.g0001"));
}

TEST_F(SaveLoadTest, AnotherStateNeverReplacesAWholeCheckpoint) {
  CheckpointStorage storage(&file_system_, kRoot);
  SoloGroup group;
  const TestState state(2);
  CheckpointContents contents = state.Contents(1);
  const std::string other = "another weight......";
  contents.parameters = {TestState::View("fc.weight", other)};
  const auto saved = SaveCheckpoint(file_system_, storage, group, {.owner = Owner(1)}, contents);
  EXPECT_EQ(saved.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(saved.status().message()), HasSubstr("save into another folder"));
  EXPECT_EQ(TestProcess(&file_system_, 2).LoadedStep(), 2);
  EXPECT_THAT(Names(file_system_), Not(::testing::Contains(HasSubstr(".tmp-"))));
}

TEST_F(SaveLoadTest, OptionsAndGeneratorsAreAnotherStateToo) {
  CheckpointStorage storage(&file_system_, kRoot);
  const TestState state(2);
  const std::string other_rng = "rng of rank 0 at another moment";
  const std::vector<std::function<void(CheckpointContents&)>> changes = {
      [](CheckpointContents& c) {
        c.description.optimizer = OptimizerRecord{"SGD", {{{"fc.weight"}, {{"lr", 0.5}}}}, {}};
      },
      [&](CheckpointContents& c) { c.extra = {TestState::View("rng.cpu", other_rng)}; },
      [](CheckpointContents& c) { c.description.bucket_layout = {{"fc.weight"}}; }};
  for (const auto& change : changes) {
    SoloGroup group;
    CheckpointContents contents = state.Contents(1);
    change(contents);
    const auto saved = SaveCheckpoint(file_system_, storage, group, {.owner = Owner(1)}, contents);
    EXPECT_EQ(saved.status().code(), absl::StatusCode::kAlreadyExists) << saved.status();
  }
}

// A group of one rank that calls `meddle` between the writing of the files and the commit.
class MeddlingGroup final : public CheckpointGroup {
 public:
  explicit MeddlingGroup(std::function<void()> meddle) : meddle_(std::move(meddle)) {}
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  absl::StatusOr<std::string> Decide(const std::string& value, const Decision& decide) override {
    if (++decisions_ == 2) meddle_();
    return decide({value});
  }

 private:
  const std::function<void()> meddle_;
  int decisions_ = 0;
};

TEST_F(SaveLoadTest, ACommitLooksAtEveryFileFirst) {
  const std::string file =
      absl::StrCat(kRoot, "/.tmp-step-000000000003.g0001.nonce1/model-00001-of-00001.safetensors");
  const std::vector<std::pair<std::function<void()>, std::string>> cases = {
      {[&] { file_system_.Corrupt(file, [](std::string& text) { text.pop_back(); }); },
       "bytes, and "},
      {[&] { ASSERT_TRUE(file_system_.RemoveFile(file).ok()); }, "model-00001-of-00001"}};
  for (const auto& [meddle, reason] : cases) {
    CheckpointStorage storage(&file_system_, kRoot);
    MeddlingGroup group(meddle);
    const auto saved =
        SaveCheckpoint(file_system_, storage, group, {.owner = Owner(1)}, TestState(3).Contents(1));
    EXPECT_FALSE(saved.ok());
    EXPECT_THAT(std::string(saved.status().message()), HasSubstr(reason));
    EXPECT_EQ(TestProcess(&file_system_, 2).LoadedStep(), 2);
  }
}

TEST_F(SaveLoadTest, AnOptionThatIsNoNumberIsNotCommitted) {
  CheckpointStorage storage(&file_system_, kRoot);
  SoloGroup group;
  const TestState state(3);
  CheckpointContents contents = state.Contents(1);
  contents.description.optimizer =
      OptimizerRecord{"SGD", {{{"fc.weight"}, {{"lr", std::nan("")}}}}, {}};
  const auto saved = SaveCheckpoint(file_system_, storage, group, {.owner = Owner(1)}, contents);
  EXPECT_EQ(saved.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(saved.status().message()), HasSubstr("option \"lr\""));
  EXPECT_EQ(TestProcess(&file_system_, 2).LoadedStep(), 2);
  EXPECT_THAT(Names(file_system_), Not(::testing::Contains(HasSubstr(".tmp-"))));
}

TEST_F(SaveLoadTest, DamagedCheckpointMakesWayForItsRepetition) {
  file_system_.Corrupt(Path(2, "model-00001-of-00001.safetensors"),
                       [](std::string& text) { text.back() ^= 1; });
  ASSERT_TRUE(TestProcess(&file_system_, 1).Save(2).ok());
  EXPECT_EQ(TestProcess(&file_system_, 2).LoadedStep(), 2);
  EXPECT_THAT(Names(file_system_), Not(::testing::Contains(HasSubstr(".tmp-"))));
}

TEST(SaveLoadFaultTest, FolderThatWasEmptiedBetweenSavesIsFilledAgain) {
  MemoryFileSystem file_system;
  TestProcess process(&file_system, 1);
  ASSERT_TRUE(process.Save(1).ok());
  ASSERT_TRUE(file_system.Rename("/jobs", "/trash").ok());
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(process.Save(2).ok());
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("/jobs/digits was missing and is made anew"));
  EXPECT_EQ(process.LoadedStep(), 2);
}

// Row 17: strange names and many entries in the folder.
TEST_F(SaveLoadTest, AFileWithTheNameOfACheckpointIsNamedAndHidesNoOlderOne) {
  const std::string litter = absl::StrCat(kRoot, "/step-000000000099.g0001");
  ASSERT_TRUE(file_system_.CreateFile(litter).ok());
  TestProcess process(&file_system_, 2);
  const auto loaded = process.Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ASSERT_TRUE(loaded->has_value());
  EXPECT_THAT((*loaded)->passed_over,
              ElementsAre(absl::StrCat(litter, " is a file, and a checkpoint a folder")));
}

TEST_F(SaveLoadTest, StrangeNamesAndManyOldEntriesAreNoTrouble) {
  for (const char* name : {"step-00000000000\n3.g0001", "step-x.g0001", "LATEST", ".tmp"}) {
    ASSERT_TRUE(file_system_.MakeDirectory(absl::StrCat(kRoot, "/", name)).ok());
  }
  for (int i = 0; i < 20'000; ++i) {
    ASSERT_TRUE(file_system_.MakeDirectory(absl::StrCat(kRoot, "/old-", i)).ok());
  }
  EXPECT_EQ(TestProcess(&file_system_, 2).LoadedStep(), 2);
  ASSERT_TRUE(TestProcess(&file_system_, 2).Save(3).ok());
}

}  // namespace
}  // namespace ddp::elastic
