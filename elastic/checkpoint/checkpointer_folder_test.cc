// Tests Checkpointer on its folder: foreign files, a full disk, other generations and other jobs.
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/checkpointer.h"
#include "elastic/checkpoint/checkpointer_fixture.h"
#include "elastic/worker/worker_session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

using CheckpointerFolderTest = CheckpointerFixture;

TEST_F(CheckpointerFolderTest, FolderThatCannotBeMadeIsNamed) {
  const std::string file = absl::StrCat(::testing::TempDir(), "/a_file");
  std::ofstream(file) << "not a folder";
  Checkpointer::Options options = Options();
  options.folder = file + "/checkpoints";
  Trainer trainer(Sgd());
  try {
    Checkpointer(options).save(trainer.state);
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("the checkpoint of step 0 was not saved"),
                                    HasSubstr(options.folder), HasSubstr("Not a directory")));
  }
}

TEST_F(CheckpointerFolderTest, FolderMayBeALink) {
  const std::string real = folder_ + "-real";
  ASSERT_EQ(mkdir(real.c_str(), 0700), 0);
  ASSERT_EQ(symlink(real.c_str(), folder_.c_str()), 0);
  Trainer trainer(Sgd());
  Checkpointer(Options()).save(trainer.state);
  EXPECT_TRUE(Checkpointer(Options(2)).restore(trainer.state).has_value());
}

TEST_F(CheckpointerFolderTest, ForeignFilesInTheFolderOutliveEverySave) {
  const std::string precious = folder_ + "-precious";
  std::filesystem::create_directories(precious + "/inner");
  std::ofstream(precious + "/model-00001-of-00001.safetensors") << "text";
  std::ofstream(precious + "/MANIFEST.json") << "text";
  std::filesystem::create_directories(folder_ + "/.tmp-mine");
  std::ofstream(folder_ + "/.tmp-mine/notes.txt") << "text";
  const std::string leftover = folder_ + "/.tmp-step-000000000007.g0001.gone";
  std::filesystem::create_directories(leftover + "/inner");
  std::ofstream(leftover + "/extra-00000.safetensors") << "text";
  const std::string swept = folder_ + "/.tmp-step-000000000008.g0001.gone";
  std::filesystem::create_directories(swept);
  std::ofstream(swept + "/extra-00000.safetensors") << "text";
  for (const char* link : {"/.tmp-x", "/.tmp-step-000000000009.g0001.gone", "/.del-x"}) {
    ASSERT_EQ(symlink(precious.c_str(), (folder_ + link).c_str()), 0);
  }
  const std::string file = precious + "/MANIFEST.json";
  ASSERT_EQ(symlink(file.c_str(), (leftover + "/MANIFEST.json").c_str()), 0);

  Trainer trainer(Sgd());
  Checkpointer(Options(2)).save(trainer.state);
  EXPECT_THAT(NamesIn(precious), ::testing::UnorderedElementsAre(
                                     "inner", "MANIFEST.json", "model-00001-of-00001.safetensors"));
  EXPECT_EQ(Contents(file), "text");
  EXPECT_THAT(NamesIn(folder_ + "/.tmp-mine"), ElementsAre("notes.txt"));
  EXPECT_THAT(NamesIn(leftover), ::testing::UnorderedElementsAre("inner", "MANIFEST.json"));
  EXPECT_THAT(NamesIn(folder_),
              ::testing::UnorderedElementsAre(
                  ".owner", "step-000000000000.g0002", ".tmp-mine", ".tmp-x", ".del-x",
                  ".tmp-step-000000000007.g0001.gone", ".tmp-step-000000000009.g0001.gone"));
}

// Bounds the size of every file that this process writes: a write beyond it fails, as on a full
// disk.
class FullDisk {
 public:
  FullDisk() {
    (void)signal(SIGXFSZ, SIG_IGN);
    EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &before_), 0);
    const rlimit small = {.rlim_cur = 2000, .rlim_max = before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  }
  ~FullDisk() { EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &before_), 0); }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit before_{};
};

TEST_F(CheckpointerFolderTest, AFullDiskFailsASaveAndNotTheJob) {
  Checkpointer::Options options = Options();
  options.retry_pause = std::chrono::hours(1);
  options.retry_pause_max = std::chrono::hours(1);
  Checkpointer checkpointer(options);
  Trainer trainer(Sgd());
  const std::string first = checkpointer.save(trainer.state);
  {
    const FullDisk full;
    trainer.Train(1);
    EXPECT_EQ(checkpointer.save(trainer.state), "");
  }
  EXPECT_EQ(checkpointer.stats().failed, 1);
  EXPECT_EQ(checkpointer.stats().failed_in_a_row, 1);
  EXPECT_THAT(checkpointer.stats().last_error,
              AllOf(HasSubstr(".safetensors"), HasSubstr("File too large")));
  EXPECT_THAT(NamesIn(folder_),
              ::testing::UnorderedElementsAre(".owner", "step-000000000000.g0001"));
  // The pause holds back a routine save and not the last one.
  trainer.Train(1);
  EXPECT_EQ(checkpointer.save(trainer.state), "");
  EXPECT_EQ(checkpointer.stats().held_back, 1);
  EXPECT_EQ(checkpointer.save(trainer.state, Checkpointer::Urgency::kLast),
            folder_ + "/step-000000000002.g0001");
  EXPECT_EQ(checkpointer.stats().saved, 2);
  EXPECT_EQ(checkpointer.stats().failed_in_a_row, 0);
  trainer.Train(1);
  EXPECT_EQ(checkpointer.save(trainer.state), folder_ + "/step-000000000003.g0001");
  EXPECT_EQ(checkpointer.restore(trainer.state)->step, 3);
}

TEST_F(CheckpointerFolderTest, AFullDiskIsTheResultOfASaveInTheBackground) {
  Checkpointer::Options options = Options();
  options.retry_pause = std::chrono::milliseconds(0);
  Checkpointer checkpointer(options);
  Trainer trainer(Sgd());
  {
    const FullDisk full;
    const PendingSave save = checkpointer.save_async(trainer.state);
    EXPECT_EQ(save.durable(), "");
    EXPECT_EQ(save.status().state, SaveStatus::State::kFailed);
    EXPECT_THAT(save.status().error, AllOf(HasSubstr(".safetensors"), HasSubstr("File too large")));
  }
  EXPECT_EQ(checkpointer.stats().failed, 1);
  EXPECT_THAT(NamesIn(folder_), ElementsAre(".owner"));
  trainer.Train(1);
  EXPECT_EQ(checkpointer.save_async(trainer.state).durable(), folder_ + "/step-000000000001.g0001");
  EXPECT_EQ(checkpointer.stats().failed_in_a_row, 0);
}

TEST_F(CheckpointerFolderTest, AFailedSaveThrowsOnRequest) {
  Checkpointer::Options options = Options();
  options.on_error = Checkpointer::OnError::kThrow;
  Checkpointer checkpointer(options);
  Trainer trainer(Sgd());
  const FullDisk full;
  EXPECT_THAT(
      ErrorOfSave(checkpointer, trainer.state),
      AllOf(HasSubstr("the checkpoint of step 0 was not saved"), HasSubstr("File too large")));
  EXPECT_EQ(checkpointer.stats().failed, 1);
}

TEST_F(CheckpointerFolderTest, AnObstacleThatIsNoDamageIsNoReasonToTakeAnOlderCheckpoint) {
  Trainer trainer(Sgd());
  Checkpointer checkpointer(Options());
  checkpointer.save(trainer.state);
  trainer.Train(1);
  const std::string file = checkpointer.save(trainer.state) + "/model-00001-of-00001.safetensors";
  ASSERT_EQ(rename(file.c_str(), (file + ".away").c_str()), 0);
  ASSERT_EQ(mkdir(file.c_str(), 0700), 0);
  EXPECT_THAT(ErrorOfRestore(trainer.state),
              AllOf(HasSubstr("no older one was taken"),
                    HasSubstr("rank 0: " + file + " is not a plain file")));
  ASSERT_EQ(rmdir(file.c_str()), 0);
  ASSERT_EQ(rename((file + ".away").c_str(), file.c_str()), 0);
  EXPECT_EQ(Checkpointer(Options(2)).restore(trainer.state)->step, 1);
}

TEST_F(CheckpointerFolderTest, AnOlderGenerationCannotSaveAfterALaterOne) {
  Trainer trainer(Sgd());
  Checkpointer older(Options(1));  // suspended before its first save
  Checkpointer newer(Options(2));
  newer.save(trainer.state);
  EXPECT_THAT(ErrorOfSave(older, trainer.state),
              AllOf(HasSubstr("generation 1"), HasSubstr("is older than generation 2")));
  ++trainer.state.step;
  EXPECT_NE(newer.save(trainer.state), "");
}

// A cut-off rank of generation 1 would otherwise commit a step that generation 2 has undone.
TEST_F(CheckpointerFolderTest, ARestoreEndsTheSavesOfTheGenerationBefore) {
  Trainer trainer(Sgd());
  Checkpointer older(Options(1));
  older.save(trainer.state);
  Trainer restored(Sgd());
  Checkpointer newer(Options(2));
  ASSERT_TRUE(newer.restore(restored.state).has_value());
  trainer.Train(3);
  EXPECT_THAT(ErrorOfSave(older, trainer.state), HasSubstr("now belongs to another generation"));
  EXPECT_NE(newer.save(restored.state), "");
  EXPECT_EQ(newer.restore(restored.state)->step, 0);
}

TEST_F(CheckpointerFolderTest, ARestoreOfAnotherProgramClaimsNothing) {
  Trainer trainer(Sgd());
  Checkpointer writer(Options(1));
  writer.save(trainer.state);
  Checkpointer::Options options = Options(0);
  options.run_id = "evaluation";
  Trainer evaluated(Sgd());
  ASSERT_TRUE(Checkpointer(options).restore(evaluated.state).has_value());
  trainer.Train(1);
  EXPECT_NE(writer.save(trainer.state), "");
}

// A launcher without generations gives all of its jobs the same nonces.
TEST_F(CheckpointerFolderTest, TwoJobsUnderTorchrunNeverShareAWorkFolder) {
  Checkpointer::Options options = Options(0);
  options.generation_nonce = "restart-0";
  Trainer trainer(Sgd());
  Checkpointer first(options);
  Checkpointer second(options);
  std::set<std::string> nonces;
  for (Checkpointer* checkpointer : {&first, &second}) {
    ++trainer.state.step;
    const std::string manifest = Contents(checkpointer->save(trainer.state) + "/MANIFEST.json");
    const size_t begin = manifest.find("\"generation_nonce\": \"restart-0-");
    ASSERT_NE(begin, std::string::npos) << manifest;
    nonces.insert(manifest.substr(begin, manifest.find('\n', begin) - begin));
  }
  EXPECT_THAT(nonces, SizeIs(2));
  ++trainer.state.step;
  EXPECT_THAT(ErrorOfSave(first, trainer.state), HasSubstr("now belongs to another generation"));
  EXPECT_NE(second.save(trainer.state), "");
}

TEST_F(CheckpointerFolderTest, OptionsAreChecked) {
  const auto refused = [this](const std::function<void(Checkpointer::Options&)>& change) {
    Checkpointer::Options options = Options();
    change(options);
    EXPECT_THROW(Checkpointer{options}, CheckpointError);
  };
  refused([](auto& options) { options.folder = ""; });
  refused([](auto& options) { options.rank = 1; });
  refused([](auto& options) { options.world_size = 2; });  // without a store
  refused([](auto& options) { options.generation_nonce = "../up"; });
  refused([](auto& options) { options.timeout = {}; });
  refused([](auto& options) { options.retry_pause_max = {}; });
  refused([](auto& options) { options.stall_warning_after = {}; });
}

TEST_F(CheckpointerFolderTest, OptionsForASessionOutsideOfALauncher) {
  for (const char* name : {"RANK", "WORLD_SIZE", "DDP_STORE", "DDP_HEALTH_FD"}) unsetenv(name);
  const Checkpointer::Options options =
      Checkpointer::options_for(WorkerSession::from_environment(), nullptr, folder_);
  EXPECT_EQ(options.world_size, 1);
  Trainer trainer(Sgd());
  EXPECT_EQ(Checkpointer(options).save(trainer.state), folder_ + "/step-000000000000.g0000");
}

}  // namespace
}  // namespace ddp::elastic
