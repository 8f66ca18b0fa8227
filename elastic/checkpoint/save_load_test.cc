// Tests saves and loads under every fault that a synchronous save can have. The file system is in
// memory and loses unsynced data as a disk does. "Row N" is row N of the failure table of the
// checkpoint design.
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/checkpoint_storage.h"
#include "elastic/checkpoint/in_process_group.h"
#include "elastic/checkpoint/load_checkpoint.h"
#include "elastic/checkpoint/save_checkpoint.h"
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

constexpr char kRoot[] = "/jobs/digits";

// A small training state whose values depend on the step.
struct State {
  explicit State(int64_t step, int rank = 0)
      : step(step),
        weight(absl::StrCat("weight of step ", 1000 + step)),
        moment(absl::StrCat("moment of step ", 1000 + step)),
        rng(absl::StrCat("rng of rank ", rank, " at step ", 1000 + step)) {}

  // Returns views of this state, which must outlive them.
  CheckpointContents Contents(uint64_t generation) const {
    CheckpointContents contents;
    contents.description.id = {step, generation};
    contents.description.epoch = step / 10;
    contents.description.run_id = "digits";
    contents.parameters = {View("fc.weight", weight)};
    contents.buffers = {View("bn.mean", rng)};  // differs between ranks; rank 0's is saved
    contents.optimizer = {View("state.fc.weight.exp_avg", moment)};
    contents.extra = {View("rng.cpu", rng)};
    return contents;
  }

  static TensorView View(const std::string& name, const std::string& bytes) {
    return {name, {Dtype::kU8, {bytes.size()}}, bytes.data(), bytes.size()};
  }

  int64_t step;
  std::string weight;
  std::string moment;
  std::string rng;
};

std::string Text(const std::map<std::string, TensorView>& tensors, const std::string& name) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) return "none";
  return std::string(found->second.data, found->second.bytes);
}

std::vector<std::string> FitsAlways(const Manifest&) { return {}; }

// Returns options for retries without pauses.
LoadOptions AtOnce() {
  return {.pause = [](absl::Duration) {}};
}

CheckpointOwner Owner(uint64_t generation) {
  return {"digits", generation, absl::StrCat("nonce", generation)};
}

// The only process of one generation.
class Process {
 public:
  Process(FileSystem* file_system, uint64_t generation)
      : file_system_(file_system), storage_(file_system, kRoot), generation_(generation) {}

  absl::StatusOr<std::string> Save(int64_t step) {
    SoloGroup group;
    return SaveCheckpoint(*file_system_, storage_, group, {.owner = Owner(generation_)},
                          State(step).Contents(generation_));
  }

  absl::StatusOr<std::optional<LoadedCheckpoint>> Load() {
    SoloGroup group;
    return LoadNewestCheckpoint(storage_, group, FitsAlways, AtOnce());
  }

  // Loads the newest checkpoint, checks its values, and returns its step; -1: there is none.
  int64_t LoadedStep() {
    absl::StatusOr<std::optional<LoadedCheckpoint>> loaded = Load();
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    if (!loaded.ok() || !loaded->has_value()) return -1;
    const LoadedCheckpoint& checkpoint = **loaded;
    const State state(checkpoint.manifest.id.step);
    EXPECT_EQ(Text(checkpoint.model, "fc.weight"), state.weight);
    EXPECT_EQ(Text(checkpoint.model, "bn.mean"), state.rng);
    EXPECT_EQ(Text(checkpoint.optimizer, "state.fc.weight.exp_avg"), state.moment);
    EXPECT_EQ(Text(checkpoint.extra, "rng.cpu"), state.rng);
    EXPECT_EQ(checkpoint.manifest.epoch, state.step / 10);
    return checkpoint.manifest.id.step;
  }

 private:
  FileSystem* const file_system_;
  CheckpointStorage storage_;
  const uint64_t generation_;
};

std::vector<std::string> Names(MemoryFileSystem& file_system) {
  return *file_system.ListDirectory(kRoot);
}

// Makes a folder with one file of a save.
void MakeLeftover(MemoryFileSystem& file_system, const std::string& name) {
  ASSERT_TRUE(file_system.MakeDirectory(name).ok());
  ASSERT_TRUE(file_system.CreateFile(name + "/extra-00000.safetensors").ok());
}

bool Exists(MemoryFileSystem& file_system, const std::string& path) {
  return file_system.KindOf(path).ok();
}

class SaveLoadTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Process process(&file_system_, 1);
    ASSERT_TRUE(process.Save(1).ok());
    ASSERT_TRUE(process.Save(2).ok());
  }

  std::string Path(int64_t step, const std::string& file) {
    return absl::StrCat(kRoot, "/", FolderName({step, 1}), "/", file);
  }

  // Checks that step 1 loads, and that step 2 was passed over because of `reason`.
  void ExpectFallsBack(const std::string& reason) {
    Process process(&file_system_, 2);
    EXPECT_EQ(process.LoadedStep(), 1);
    const auto loaded = process.Load();
    ASSERT_TRUE(loaded.ok() && loaded->has_value());
    EXPECT_THAT((*loaded)->passed_over, ElementsAre(HasSubstr(reason)));
  }

  MemoryFileSystem file_system_;
};

TEST(SaveLoadEmptyTest, NoFolderIsNoCheckpoint) {
  MemoryFileSystem file_system;
  EXPECT_EQ(Process(&file_system, 1).LoadedStep(), -1);
}

TEST(SaveLoadEmptyTest, FolderWithOtherThingsIsNoCheckpoint) {
  MemoryFileSystem file_system;
  ASSERT_TRUE(file_system.MakeDirectory("/jobs").ok());
  ASSERT_TRUE(file_system.MakeDirectory(kRoot).ok());
  ASSERT_TRUE(file_system.MakeDirectory(absl::StrCat(kRoot, "/LATEST")).ok());
  EXPECT_EQ(Process(&file_system, 1).LoadedStep(), -1);
}

TEST_F(SaveLoadTest, NewestLoads) {
  EXPECT_EQ(Process(&file_system_, 2).LoadedStep(), 2);
  EXPECT_THAT(Names(file_system_),
              ElementsAre(".owner", "step-000000000001.g0001", "step-000000000002.g0001"));
  EXPECT_THAT(
      *file_system_.ListDirectory(absl::StrCat(kRoot, "/step-000000000002.g0001")),
      ElementsAre("MANIFEST.json", "extra-00000.safetensors", "model-00001-of-00001.safetensors",
                  "optimizer-00001-of-00001.safetensors"));
}

TEST_F(SaveLoadTest, EqualStateGivesEqualFilesInEveryGeneration) {
  ASSERT_TRUE(Process(&file_system_, 9).Save(2).ok());
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
      ASSERT_TRUE(Process(&file_system, 1).Save(1).ok());
      Process process(&file_system, 2);
      file_system.FailFromCall(file_system.calls() + call, absl::InternalError("dead"));
      survived = process.Save(2).ok();
      file_system.PowerCut(loss);
      Process next(&file_system, 3);
      const int64_t step = next.LoadedStep();
      ASSERT_TRUE(step == 2 || (step == 1 && !survived)) << "call " << call << " step " << step;

      file_system.FailFromCall(file_system.calls() + 1 + call % 13, absl::InternalError("dead"));
      (void)next.Save(3).ok();
      file_system.PowerCut(loss);
      Process last(&file_system, 4);
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
    Process process(&file_system, 1);
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
    Process process(&file_system, 1);
    file_system.FailCall(call, absl::ResourceExhaustedError("no space left on device"));
    (void)process.Save(1).ok();
    if (file_system.calls() < call) break;
    ASSERT_TRUE(process.Save(1).ok()) << "call " << call;
    ASSERT_EQ(process.LoadedStep(), 1);
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
  EXPECT_EQ(Process(&file_system_, 2).LoadedStep(), 2);
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
  const auto loaded = Process(&file_system_, 2).Load();
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(loaded.status().message()),
              AllOf(HasSubstr("none of the checkpoints in /jobs/digits can be read"),
                    HasSubstr(Path(1, "MANIFEST.json")), HasSubstr(Path(2, "MANIFEST.json"))));
}

// Row 9: an earlier generation continues after a later generation has claimed the folder.
TEST(SaveLoadFencingTest, EarlierGenerationCannotCommitAfterALaterOneHasSaved) {
  MemoryFileSystem file_system;
  Process earlier(&file_system, 1);
  Process later(&file_system, 2);
  ASSERT_TRUE(earlier.Save(1).ok());
  ASSERT_TRUE(later.Save(2).ok());
  const absl::StatusOr<std::string> refused = earlier.Save(3);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("another generation"), HasSubstr("\"generation\":2")));
  EXPECT_EQ(later.LoadedStep(), 2);
  EXPECT_TRUE(later.Save(3).ok());
}

TEST(SaveLoadFencingTest, SaveThatIsUnderWayLosesItsFolderToALaterGeneration) {
  MemoryFileSystem file_system;
  CheckpointStorage earlier(&file_system, kRoot);
  const absl::StatusOr<std::string> folder = earlier.Begin(Owner(1), {5, 1});
  ASSERT_TRUE(folder.ok());
  ASSERT_TRUE(Process(&file_system, 2).Save(4).ok());
  Manifest manifest;
  manifest.id = {5, 1};
  EXPECT_FALSE(earlier.Commit(Owner(1), *folder, manifest).ok());
  EXPECT_EQ(Process(&file_system, 3).LoadedStep(), 4);
}

// Generation 1 is suspended before each of its calls in turn. Meanwhile generation 2 saves and
// begins another save. When generation 1 continues, generation 2 must lose nothing.
TEST(SaveLoadFencingTest, AStalledWriterUndoesNothingOfALaterGeneration) {
  int refused = 0;
  for (int64_t call = 1;; ++call) {
    MemoryFileSystem file_system;
    Process earlier(&file_system, 1);
    Process later(&file_system, 2);
    CheckpointStorage later_storage(&file_system, kRoot);
    bool stalled = false;
    bool had_committed = false;
    std::string in_progress;
    file_system.RunBeforeCall(call, [&] {
      stalled = true;
      had_committed = Exists(file_system, absl::StrCat(kRoot, "/step-000000000005.g0001"));
      ASSERT_TRUE(later.Save(4).ok()) << "call " << call;
      const auto begun = later_storage.Begin(Owner(2), {6, 2});
      ASSERT_TRUE(begun.ok()) << begun.status();
      in_progress = *begun;
    });
    const absl::StatusOr<std::string> saved = earlier.Save(5);
    if (!stalled) break;
    ASSERT_EQ(saved.ok(), had_committed) << "call " << call << ": " << saved.status();
    refused += saved.ok() ? 0 : 1;
    ASSERT_TRUE(Exists(file_system, in_progress)) << "call " << call;
    ASSERT_TRUE(later.Save(7).ok()) << "call " << call;
    ASSERT_FALSE(earlier.Save(8).ok()) << "call " << call;
    ASSERT_EQ(later.LoadedStep(), 7) << "call " << call;
  }
  EXPECT_GT(refused, 25);
}

// Generation 1 is suspended, then generation 2 too, and generation 3 saves.
TEST(SaveLoadFencingTest, TwoStalledWritersUndoNothingOfALaterGeneration) {
  bool all_done = false;
  for (int64_t first = 1; !all_done; first += 3) {
    bool first_done = false;
    for (int64_t second = 1; !first_done; second += 5) {
      MemoryFileSystem file_system;
      Process one(&file_system, 1);
      Process two(&file_system, 2);
      Process three(&file_system, 3);
      bool one_stalled = false;
      bool two_stalled = false;
      file_system.RunBeforeCall(first, [&] {
        one_stalled = true;
        file_system.RunBeforeCall(file_system.calls() + second, [&] {
          two_stalled = true;
          ASSERT_TRUE(three.Save(3).ok());
        });
        (void)two.Save(4).ok();
      });
      (void)one.Save(5).ok();
      all_done = !one_stalled;
      first_done = !two_stalled;
      if (first_done) continue;
      ASSERT_TRUE(three.Save(6).ok()) << "calls " << first << " and " << second;
      ASSERT_FALSE(one.Save(7).ok());
      ASSERT_FALSE(two.Save(7).ok());
      ASSERT_EQ(three.LoadedStep(), 6);
    }
  }
}

TEST(SaveLoadFencingTest, AnOlderGenerationIsRefusedByNumberEvenInItsFirstSave) {
  MemoryFileSystem file_system;
  ASSERT_TRUE(Process(&file_system, 2).Save(2).ok());
  const absl::StatusOr<std::string> refused = Process(&file_system, 1).Save(3);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("generation 1 (nonce1)"), HasSubstr("is older than"),
                    HasSubstr("generation 2 (nonce2)")));
}

TEST(SaveLoadFencingTest, AJobThatIsStartedAnewFollowsWhateverItsNumbersAre) {
  MemoryFileSystem file_system;
  const auto save = [&file_system](CheckpointOwner owner, int64_t step, AskRendezvous ask) {
    CheckpointStorage storage(&file_system, kRoot, std::move(ask));
    SoloGroup group;
    return SaveCheckpoint(file_system, storage, group, {.owner = owner},
                          State(step).Contents(owner.generation));
  };
  const auto job = [](const std::string& token) {
    return [token] { return absl::StatusOr<std::string>(token); };
  };
  ASSERT_TRUE(save({"run", 7, "a", 1}, 1, job("first")).ok());
  EXPECT_FALSE(save({"run", 6, "b", 1}, 2, job("first")).ok());
  EXPECT_TRUE(save({"run", 1, "c", 1}, 3, job("second")).ok());
  EXPECT_FALSE(save({"run", 9, "d", 1}, 4, [] {
                 return absl::StatusOr<std::string>(
                     absl::FailedPreconditionError("generation 10 has begun"));
               }).ok());
  // The rendezvous does not answer: (instance, generation) decides.
  const auto silent = [] { return absl::StatusOr<std::string>(absl::UnavailableError("down")); };
  EXPECT_FALSE(save({"run", 0, "e", 1}, 5, silent).ok());
  EXPECT_TRUE(save({"run", 2, "f", 1}, 6, silent).ok());
  EXPECT_TRUE(save({"other", 1, "g", 1}, 7, silent).ok());
}

// The rendezvous starts another generation while a save writes its files.
TEST(SaveLoadFencingTest, ACommitIsAskedOfTheRendezvousToo) {
  MemoryFileSystem file_system;
  int asked = 0;
  CheckpointStorage storage(&file_system, kRoot, [&asked]() -> absl::StatusOr<std::string> {
    if (++asked == 1) return "job";
    return absl::FailedPreconditionError("generation 2 has begun");
  });
  SoloGroup group;
  const auto saved =
      SaveCheckpoint(file_system, storage, group, {.owner = Owner(1)}, State(1).Contents(1));
  EXPECT_THAT(std::string(saved.status().message()), HasSubstr("generation 2 has begun"));
  EXPECT_EQ(Process(&file_system, 2).LoadedStep(), -1);
  EXPECT_THAT(Names(file_system), ElementsAre(".owner"));
}

TEST(SaveLoadFencingTest, OneStepOfTwoGenerationsIsTwoCheckpointsAndTheLaterLoads) {
  MemoryFileSystem file_system;
  ASSERT_TRUE(Process(&file_system, 1).Save(7).ok());
  ASSERT_TRUE(Process(&file_system, 2).Save(7).ok());
  const auto loaded = Process(&file_system, 3).Load();
  ASSERT_TRUE(loaded.ok() && loaded->has_value());
  EXPECT_EQ((*loaded)->manifest.id.generation, 2u);
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
  ASSERT_TRUE(Process(&file_system_, 2).Save(9).ok());
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
  ASSERT_TRUE(Process(&file_system_, 2).Save(9).ok());
  EXPECT_THAT(*file_system_.ListDirectory(folder),
              ::testing::UnorderedElementsAre("notes.txt", "model.safetensors", "more",
                                              "extra-00001.safetensors",
                                              "model-00001-of-00001.safetensors"));
  EXPECT_TRUE(Exists(file_system_, "/precious"));
  EXPECT_EQ(Process(&file_system_, 3).LoadedStep(), 9);
}

TEST_F(SaveLoadTest, AForeignFileInADamagedCheckpointOutlivesItsReplacement) {
  file_system_.Corrupt(Path(2, "model-00001-of-00001.safetensors"),
                       [](std::string& text) { text.back() ^= 1; });
  ASSERT_TRUE(file_system_.CreateFile(Path(2, "notes.txt")).ok());
  ASSERT_TRUE(Process(&file_system_, 1).Save(2).ok());
  EXPECT_EQ(Process(&file_system_, 2).LoadedStep(), 2);
  EXPECT_THAT(
      *file_system_.ListDirectory(absl::StrCat(kRoot, "/.del-step-000000000002.g0001.not-whole")),
      ElementsAre("notes.txt"));
}

TEST_F(SaveLoadTest, AWriterFollowsNoLinkOfTheRoot) {
  const std::string root = kRoot;
  ASSERT_TRUE(file_system_.MakeDirectory("/elsewhere").ok());
  // The link has the name of the work folder of the next save.
  file_system_.MakeLink(root + "/.tmp-step-000000000003.g0002.nonce2", "/elsewhere");
  const auto saved = Process(&file_system_, 2).Save(3);
  EXPECT_FALSE(saved.ok());
  EXPECT_THAT(std::string(saved.status().message()), HasSubstr(".tmp-step-000000000003.g0002"));
  EXPECT_THAT(*file_system_.ListDirectory("/elsewhere"), IsEmpty());

  auto file = file_system_.CreateFile("/precious");
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->Append("text", 4).ok());
  ASSERT_TRUE(file_system_.RemoveFile(root + "/.owner").ok());
  file_system_.MakeLink(root + "/.owner", "/precious");
  const auto refused = Process(&file_system_, 3).Save(4);
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
                     State(2).Contents(1));
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(file_system_.Content(path), before);
  EXPECT_THAT(Names(file_system_),
              ElementsAre(".owner", "step-000000000001.g0001", "step-000000000002.g0001"));
}

TEST_F(SaveLoadTest, AnotherStateNeverReplacesAWholeCheckpoint) {
  CheckpointStorage storage(&file_system_, kRoot);
  SoloGroup group;
  const State state(2);
  CheckpointContents contents = state.Contents(1);
  const std::string other = "another weight......";
  contents.parameters = {State::View("fc.weight", other)};
  const auto saved = SaveCheckpoint(file_system_, storage, group, {.owner = Owner(1)}, contents);
  EXPECT_EQ(saved.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(saved.status().message()), HasSubstr("save into another folder"));
  EXPECT_EQ(Process(&file_system_, 2).LoadedStep(), 2);
  EXPECT_THAT(Names(file_system_), Not(::testing::Contains(HasSubstr(".tmp-"))));
}

TEST_F(SaveLoadTest, OptionsAndGeneratorsAreAnotherStateToo) {
  CheckpointStorage storage(&file_system_, kRoot);
  const State state(2);
  const std::string other_rng = "rng of rank 0 at another moment";
  const std::vector<std::function<void(CheckpointContents&)>> changes = {
      [](CheckpointContents& c) {
        c.description.optimizer = OptimizerRecord{"SGD", {{{"fc.weight"}, {{"lr", 0.5}}}}, {}};
      },
      [&](CheckpointContents& c) { c.extra = {State::View("rng.cpu", other_rng)}; },
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
        SaveCheckpoint(file_system_, storage, group, {.owner = Owner(1)}, State(3).Contents(1));
    EXPECT_FALSE(saved.ok());
    EXPECT_THAT(std::string(saved.status().message()), HasSubstr(reason));
    EXPECT_EQ(Process(&file_system_, 2).LoadedStep(), 2);
  }
}

TEST_F(SaveLoadTest, AnOptionThatIsNoNumberIsNotCommitted) {
  CheckpointStorage storage(&file_system_, kRoot);
  SoloGroup group;
  const State state(3);
  CheckpointContents contents = state.Contents(1);
  contents.description.optimizer =
      OptimizerRecord{"SGD", {{{"fc.weight"}, {{"lr", std::nan("")}}}}, {}};
  const auto saved = SaveCheckpoint(file_system_, storage, group, {.owner = Owner(1)}, contents);
  EXPECT_EQ(saved.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(saved.status().message()), HasSubstr("option \"lr\""));
  EXPECT_EQ(Process(&file_system_, 2).LoadedStep(), 2);
  EXPECT_THAT(Names(file_system_), Not(::testing::Contains(HasSubstr(".tmp-"))));
}

TEST_F(SaveLoadTest, DamagedCheckpointMakesWayForItsRepetition) {
  file_system_.Corrupt(Path(2, "model-00001-of-00001.safetensors"),
                       [](std::string& text) { text.back() ^= 1; });
  ASSERT_TRUE(Process(&file_system_, 1).Save(2).ok());
  EXPECT_EQ(Process(&file_system_, 2).LoadedStep(), 2);
  EXPECT_THAT(Names(file_system_), Not(::testing::Contains(HasSubstr(".tmp-"))));
}

TEST(SaveLoadFaultTest, FolderThatWasEmptiedBetweenSavesIsFilledAgain) {
  MemoryFileSystem file_system;
  Process process(&file_system, 1);
  ASSERT_TRUE(process.Save(1).ok());
  ASSERT_TRUE(file_system.Rename("/jobs", "/trash").ok());
  ASSERT_TRUE(process.Save(2).ok());
  EXPECT_EQ(process.LoadedStep(), 2);
}

// Row 17: strange names and many entries in the folder.
TEST_F(SaveLoadTest, StrangeNamesAndManyOldEntriesAreNoTrouble) {
  for (const char* name : {"step-00000000000\n3.g0001", "step-x.g0001", "LATEST", ".tmp"}) {
    ASSERT_TRUE(file_system_.MakeDirectory(absl::StrCat(kRoot, "/", name)).ok());
  }
  for (int i = 0; i < 20'000; ++i) {
    ASSERT_TRUE(file_system_.MakeDirectory(absl::StrCat(kRoot, "/old-", i)).ok());
  }
  EXPECT_EQ(Process(&file_system_, 2).LoadedStep(), 2);
  ASSERT_TRUE(Process(&file_system_, 2).Save(3).ok());
}

// ---- Several ranks ----

// A view of a file system that hides files whose path contains a text. OpenFile() of such a file
// returns `status`, or kNotFound when `status` is OK; CreateFile() fails.
class BlindFileSystem final : public FileSystem {
 public:
  BlindFileSystem(FileSystem* real, std::string hidden, absl::Status status = absl::OkStatus())
      : real_(real), hidden_(std::move(hidden)), status_(std::move(status)) {}

  // Lets OpenFile() succeed after `tries` more failures.
  void RecoverAfter(int tries) { tries_ = tries; }

  absl::StatusOr<std::unique_ptr<WritableFile>> CreateFile(const std::string& path) override {
    if (Hides(path)) return absl::ResourceExhaustedError(absl::StrCat(path, ": no space left"));
    return real_->CreateFile(path);
  }
  absl::StatusOr<std::unique_ptr<ReadableFile>> OpenFile(const std::string& path) override {
    if (Hides(path) && tries_ != 0) {
      if (tries_ > 0) --tries_;
      if (status_.ok()) return absl::NotFoundError(absl::StrCat(path, ": no such file"));
      return absl::Status(status_.code(), absl::StrCat(path, ": ", status_.message()));
    }
    return real_->OpenFile(path);
  }
  absl::Status MakeDirectory(const std::string& path) override {
    return real_->MakeDirectory(path);
  }
  absl::StatusOr<EntryKind> KindOf(const std::string& path) override {
    if (Hides(path)) return absl::NotFoundError(absl::StrCat(path, ": no such file"));
    return real_->KindOf(path);
  }
  absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) override {
    if (Hides(path)) return std::vector<std::string>();
    return real_->ListDirectory(path);
  }
  absl::Status SyncDirectory(const std::string& path) override {
    return real_->SyncDirectory(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return real_->Rename(from, to);
  }
  absl::Status ReplaceFile(const std::string& from, const std::string& to) override {
    return real_->ReplaceFile(from, to);
  }
  absl::Status RemoveFile(const std::string& path) override { return real_->RemoveFile(path); }
  absl::Status RemoveDirectory(const std::string& path) override {
    return real_->RemoveDirectory(path);
  }

 private:
  bool Hides(const std::string& path) const {
    return !hidden_.empty() && absl::StrContains(path, hidden_);
  }

  FileSystem* const real_;
  const std::string hidden_;
  const absl::Status status_;
  int tries_ = -1;
};

class RanksTest : public ::testing::Test {
 protected:
  // Saves on all ranks and returns each rank's result. `change` edits the contents of each rank.
  std::vector<absl::StatusOr<std::string>> Save(
      int world_size, int64_t step, uint64_t generation,
      const std::function<void(int, absl::StatusOr<CheckpointContents>&)>& change = nullptr) {
    std::vector<absl::StatusOr<std::string>> results(static_cast<size_t>(world_size));
    RunRanks(world_size, [&](CheckpointGroup& group) {
      BlindFileSystem file_system(&file_system_, Hidden(group.rank()));
      CheckpointStorage storage(&file_system, kRoot);
      const State state(step, group.rank());
      absl::StatusOr<CheckpointContents> contents = state.Contents(generation);
      if (change != nullptr) change(group.rank(), contents);
      results[static_cast<size_t>(group.rank())] =
          SaveCheckpoint(file_system, storage, group,
                         {.owner = Owner(generation), .file_bytes_max = 20}, contents);
    });
    return results;
  }

  struct Loaded {
    absl::Status status;
    int64_t step = -1;
    std::string weight;
    std::string rng;
    std::vector<std::string> passed_over;
  };

  std::vector<Loaded> Load(int world_size) {
    std::vector<Loaded> results(static_cast<size_t>(world_size));
    RunRanks(world_size, [&](CheckpointGroup& group) {
      BlindFileSystem file_system(&file_system_, Hidden(group.rank()), obstacle_);
      if (group.rank() == 0) file_system.RecoverAfter(tries_of_rank_0_);
      const CheckpointStorage storage(&file_system, kRoot);
      Loaded& result = results[static_cast<size_t>(group.rank())];
      const auto loaded = LoadNewestCheckpoint(storage, group, FitsAlways, AtOnce());
      result.status = loaded.status();
      if (!loaded.ok() || !loaded->has_value()) return;
      result.step = (*loaded)->manifest.id.step;
      result.weight = Text((*loaded)->model, "fc.weight");
      result.rng = Text((*loaded)->extra, "rng.cpu");
      result.passed_over = (*loaded)->passed_over;
    });
    return results;
  }

  std::string Hidden(int rank) const {
    const auto found = hidden_.find(rank);
    return found == hidden_.end() ? "" : found->second;
  }

  MemoryFileSystem file_system_;
  std::map<int, std::string> hidden_;  // by rank: the text in the paths of hidden files
  absl::Status obstacle_;              // error of opening a hidden file; OK: kNotFound
  int tries_of_rank_0_ = -1;           // until rank 0 sees the hidden files; -1: never
};

TEST_F(RanksTest, RanksShareTheWorkAndEachGetsItsOwnBack) {
  for (const auto& saved : Save(3, 5, 1)) {
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_EQ(*saved, "/jobs/digits/step-000000000005.g0001");
  }
  const std::vector<Loaded> loaded = Load(3);
  for (int rank = 0; rank < 3; ++rank) {
    const State state(5, rank);
    EXPECT_EQ(loaded[static_cast<size_t>(rank)].step, 5);
    EXPECT_EQ(loaded[static_cast<size_t>(rank)].weight, state.weight);
    EXPECT_EQ(loaded[static_cast<size_t>(rank)].rng, state.rng);
  }
}

// Row 13: a restart with another world size.
TEST_F(RanksTest, AnotherWorldSizeLoads) {
  ASSERT_TRUE(Save(2, 5, 1)[0].ok());
  for (const int world_size : {1, 2, 4}) {
    const std::vector<Loaded> loaded = Load(world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(loaded[static_cast<size_t>(rank)].step, 5);
      EXPECT_EQ(loaded[static_cast<size_t>(rank)].rng, rank < 2 ? State(5, rank).rng : "none");
    }
  }
}

TEST_F(RanksTest, AnotherWorldSizeIsAnotherState) {
  ASSERT_TRUE(Save(2, 5, 1)[0].ok());
  EXPECT_EQ(Save(1, 5, 1)[0].status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(RanksTest, ModelAndOptimizerFilesDoNotDependOnTheWorldSize) {
  ASSERT_TRUE(Save(1, 5, 1)[0].ok());
  ASSERT_TRUE(Save(3, 5, 2)[0].ok());
  const auto names = *file_system_.ListDirectory(absl::StrCat(kRoot, "/step-000000000005.g0001"));
  int compared = 0;
  for (const std::string& name : names) {
    if (!absl::StartsWith(name, "model-") && !absl::StartsWith(name, "optimizer-")) continue;
    ++compared;
    EXPECT_EQ(file_system_.Content(absl::StrCat(kRoot, "/step-000000000005.g0001/", name)),
              file_system_.Content(absl::StrCat(kRoot, "/step-000000000005.g0002/", name)))
        << name;
  }
  EXPECT_EQ(compared, 3);  // file_bytes_max cuts the model in two
}

TEST_F(RanksTest, RanksThatDisagreeAreToldHow) {
  const auto results = Save(2, 5, 1, [](int rank, absl::StatusOr<CheckpointContents>& contents) {
    if (rank == 1) contents->description.id.step = 6;
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(result.status().message()),
                AllOf(HasSubstr("rank 0 has step 5"), HasSubstr("rank 1 has step 6")));
  }
  EXPECT_EQ(Load(1)[0].step, -1);
}

TEST_F(RanksTest, RankThatCannotSaveTellsTheOthersWhy) {
  const auto results = Save(3, 5, 1, [](int rank, absl::StatusOr<CheckpointContents>& contents) {
    if (rank == 2) contents = absl::InvalidArgumentError("tensor x has no safetensors dtype");
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.status().message(), "rank 2: tensor x has no safetensors dtype");
  }
}

TEST_F(RanksTest, FullDiskOnOneRankFailsTheSaveEverywhereAndLeavesNothing) {
  ASSERT_TRUE(Save(3, 4, 1)[0].ok());
  hidden_[2] = "extra-00002";
  for (const auto& result : Save(3, 5, 1)) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(result.status().message()),
                AllOf(HasSubstr("rank 2: "), HasSubstr("extra-00002.safetensors: no space left")));
  }
  hidden_.clear();
  EXPECT_THAT(Names(file_system_), ElementsAre(".owner", "step-000000000004.g0001"));
  EXPECT_EQ(Load(3)[2].step, 4);
}

TEST_F(RanksTest, AllTakeTheNewestThatIsDamagedForNoRank) {
  for (const int64_t step : {1, 2, 3, 4}) ASSERT_TRUE(Save(3, step, 1)[0].ok());
  hidden_[1] = "step-000000000004.g0001/model";
  hidden_[2] = "step-000000000003.g0001/MANIFEST";
  obstacle_ = absl::DataLossError("the disk lies");
  for (const Loaded& loaded : Load(3)) {
    EXPECT_EQ(loaded.step, 2) << loaded.status;
    EXPECT_THAT(loaded.passed_over,
                ElementsAre(AllOf(HasSubstr("rank 1: "), HasSubstr("step-000000000004")),
                            AllOf(HasSubstr("rank 2: "), HasSubstr("step-000000000003"))));
  }
}

TEST_F(RanksTest, AFileThatIsMissingToOneRankFailsByNameAndTakesNoOlderOne) {
  for (const int64_t step : {3, 4}) ASSERT_TRUE(Save(3, step, 1)[0].ok());
  for (const char* file : {"step-000000000004.g0001/model", "step-000000000004.g0001/MANIFEST",
                           "step-000000000004.g0001/extra-00001"}) {
    hidden_[1] = file;
    for (const Loaded& loaded : Load(3)) {
      EXPECT_EQ(loaded.step, -1);
      EXPECT_EQ(loaded.status.code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(std::string(loaded.status.message()),
                  AllOf(HasSubstr("rank 1: /jobs/digits/step-000000000004"), HasSubstr(file)));
    }
  }
}

TEST_F(RanksTest, AFileThatIsMissingToEveryRankIsPassedOverWithTheReason) {
  for (const int64_t step : {3, 4}) ASSERT_TRUE(Save(3, step, 1)[0].ok());
  const std::string path = absl::StrCat(kRoot, "/step-000000000004.g0001/extra-00001.safetensors");
  ASSERT_TRUE(file_system_.RemoveFile(path).ok());
  for (const int world_size : {1, 3}) {
    for (const Loaded& loaded : Load(world_size)) {
      EXPECT_EQ(loaded.step, 3) << loaded.status;
      EXPECT_THAT(loaded.passed_over, ElementsAre(path + ": no rank sees such a file"));
    }
  }
}

TEST_F(RanksTest, PassingErrorsAreRetriedAndThenFailByName) {
  for (const int64_t step : {3, 4}) ASSERT_TRUE(Save(2, step, 1)[0].ok());
  hidden_[0] = "step-000000000004.g0001/model";
  for (const absl::Status& error :
       {absl::ResourceExhaustedError("Too many open files"),
        absl::PermissionDeniedError("Permission denied"), absl::InternalError("Stale file handle"),
        absl::UnimplementedError("it has format version 2, this program knows 1")}) {
    obstacle_ = error;
    tries_of_rank_0_ = -1;
    for (const Loaded& loaded : Load(2)) {
      EXPECT_EQ(loaded.step, -1) << error;
      EXPECT_THAT(std::string(loaded.status.message()),
                  AllOf(HasSubstr("rank 0: /jobs/digits/step-000000000004.g0001/model-0000"),
                        HasSubstr(std::string(error.message()))));
    }
    tries_of_rank_0_ = 3;
    for (const Loaded& loaded : Load(2)) {
      EXPECT_EQ(loaded.step, 4) << loaded.status;
      EXPECT_THAT(loaded.passed_over, IsEmpty());
    }
  }
}

TEST_F(RanksTest, RankThatSeesAnotherFolderIsNamed) {
  ASSERT_TRUE(Save(3, 5, 1)[0].ok());
  hidden_[1] = kRoot;
  for (const Loaded& loaded : Load(3)) {
    EXPECT_THAT(std::string(loaded.status.message()),
                HasSubstr("rank 1 of 3 see no checkpoint in /jobs/digits"));
  }
}

TEST_F(RanksTest, EveryExtraFileIsCheckedBySomebody) {
  ASSERT_TRUE(Save(4, 5, 1)[0].ok());
  ASSERT_TRUE(Save(4, 6, 1)[0].ok());
  for (const char* name : {"extra-00000", "extra-00001", "extra-00002", "extra-00003"}) {
    const std::string path = absl::StrCat(kRoot, "/step-000000000006.g0001/", name, ".safetensors");
    const std::string whole = *file_system_.Content(path);
    file_system_.Corrupt(path, [](std::string& text) { text.back() ^= 1; });
    for (const int world_size : {1, 3}) {
      for (const Loaded& loaded : Load(world_size)) EXPECT_EQ(loaded.step, 5) << name;
    }
    file_system_.Corrupt(path, [&](std::string& text) { text = whole; });
  }
}

// Row 14: a checkpoint that does not fit is an error that lists every mismatch. No older checkpoint
// is loaded.
TEST_F(RanksTest, CheckpointThatDoesNotFitIsAnErrorWithEveryMismatch) {
  ASSERT_TRUE(Save(2, 5, 1)[0].ok());
  RunRanks(2, [&](CheckpointGroup& group) {
    const CheckpointStorage storage(&file_system_, kRoot);
    const auto loaded = LoadNewestCheckpoint(storage, group, [](const Manifest&) {
      return std::vector<std::string>{"fc.weight: shape differs", "fc.bias: missing"};
    });
    EXPECT_EQ(loaded.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(loaded.status().message()),
                AllOf(HasSubstr("nothing was loaded"), HasSubstr("fc.weight: shape differs"),
                      HasSubstr("fc.bias: missing"), Not(HasSubstr("rank"))));
  });
}

}  // namespace
}  // namespace ddp::elastic
