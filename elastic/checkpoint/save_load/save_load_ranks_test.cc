// Tests saves and loads of several ranks, each a thread with its own view of one file system.
// "Row N" as in save_load_test.cc.
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/folder/checkpoint_storage.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/group/in_process_group.h"
#include "elastic/checkpoint/save_load/load_checkpoint.h"
#include "elastic/checkpoint/save_load/save_checkpoint.h"
#include "elastic/checkpoint/save_load/test_process.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/file_system/memory_file_system.h"

namespace ddp::elastic {
namespace {

using ::ddp::testing::MemoryFileSystem;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

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
  absl::StatusOr<std::unique_ptr<FileLock>> LockFile(const std::string& path,
                                                     LockKind kind) override {
    return real_->LockFile(path, kind);
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
      const TestState state(step, group.rank());
      absl::StatusOr<CheckpointContents> contents = state.Contents(generation);
      if (change != nullptr) change(group.rank(), contents);
      results[static_cast<size_t>(group.rank())] =
          SaveCheckpoint(file_system, storage, group,
                         {.owner = Owner(generation),
                          .file_bytes_max = 20,
                          .folder_is_shared = folder_is_shared_,
                          .wait_for_folder = AtOnce()},
                         contents);
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
  bool folder_is_shared_ = false;
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
    const TestState state(5, rank);
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
      EXPECT_EQ(loaded[static_cast<size_t>(rank)].rng, rank < 2 ? TestState(5, rank).rng : "none");
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

// As with an optimizer whose state is divided among the ranks.
TEST_F(RanksTest, ARankNeedsTheValuesOfTheTensorsThatItWrites) {
  const std::string values = "0123456789abcdefghijklmnopqrst";
  std::vector<std::vector<bool>> written(3);
  const auto results = Save(3, 5, 1, [&](int rank, absl::StatusOr<CheckpointContents>& contents) {
    contents->optimizer.clear();
    for (size_t i = 0; i < 6; ++i) {
      contents->optimizer.push_back(TestState::View(absl::StrCat("state.", i), values));
    }
    written[rank] = WrittenTensors(*contents, rank, 3, /*file_bytes_max=*/20).optimizer;
    for (size_t i = 0; i < 6; ++i) {
      if (!written[rank][i]) contents->optimizer[i].data = nullptr;
    }
  });
  for (const auto& saved : results) EXPECT_TRUE(saved.ok()) << saved.status();
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(written[0][i] + written[1][i] + written[2][i], 1) << i;
  for (int rank = 0; rank < 3; ++rank) EXPECT_THAT(written[rank], Contains(true)) << rank;
  TestProcess process(&file_system_, 2);
  const auto loaded = process.Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(Text((*loaded)->optimizer, absl::StrCat("state.", i)), values);
  }
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

TEST_F(RanksTest, RanksWithAnotherFolderAreNamedInTheFirstSave) {
  hidden_ = {{1, ".tmp-"}, {3, ".tmp-"}};
  for (const auto& result : Save(4, 1, 1)) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
    EXPECT_THAT(std::string(result.status().message()),
                AllOf(HasSubstr("all ranks need the same checkpoint folder"),
                      HasSubstr("ranks 1, 3 of 4 cannot find /jobs/digits/.tmp-")));
  }
  EXPECT_THAT(Names(file_system_), ElementsAre(".owner"));
  // Later it may pass: a folder that all ranks have seen is away for a moment.
  folder_is_shared_ = true;
  for (const auto& result : Save(4, 1, 1)) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable) << result.status();
  }
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
