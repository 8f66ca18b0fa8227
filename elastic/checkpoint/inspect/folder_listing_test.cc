#include "elastic/checkpoint/inspect/folder_listing.h"

#include <memory>

#include "absl/status/status.h"
#include "elastic/checkpoint/inspect/example_checkpoint.h"
#include "elastic/checkpoint/inspect/stored_checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/file_system/memory_file_system.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using State = ListedCheckpoint::State;

constexpr char kModel[] = "/model-00001-of-00002.safetensors";

class FolderListingTest : public ::testing::Test {
 protected:
  FolderListingTest() { EXPECT_TRUE(files_.MakeDirectory("jobs").ok()); }

  std::string Write(int64_t step) {
    return WriteExample(files_, "jobs", {.id = {.step = step, .generation = 1}});
  }

  // Lists the folder, which has one checkpoint.
  ListedCheckpoint Only() {
    const absl::StatusOr<FolderListing> listing = ListFolder(files_, "jobs");
    EXPECT_TRUE(listing.ok()) << listing.status();
    EXPECT_EQ(listing->checkpoints.size(), 1);
    return listing->checkpoints.at(0);
  }

  testing::MemoryFileSystem files_;
};

TEST_F(FolderListingTest, NewestFirstWithWhatTheManifestSays) {
  Write(7);
  const std::string newest = Write(12);
  Write(9);
  ASSERT_TRUE(files_.MakeDirectory("jobs/.tmp-step-000000000013.g0001.abc").ok());
  ASSERT_TRUE(files_.MakeDirectory("jobs/notes").ok());
  const absl::StatusOr<FolderListing> listing = ListFolder(files_, "jobs");
  ASSERT_TRUE(listing.ok()) << listing.status();
  ASSERT_EQ(listing->checkpoints.size(), 3);
  const ListedCheckpoint& first = listing->checkpoints[0];
  EXPECT_EQ(first.folder, newest);
  EXPECT_EQ(first.state, State::kComplete);
  EXPECT_EQ(first.run_id, "digits");
  EXPECT_EQ(first.world_size, 4);
  EXPECT_EQ(first.tensors, 5);
  EXPECT_EQ(first.files, 4);
  EXPECT_EQ(first.saved_unix_seconds, 1'000'000);
  EXPECT_EQ(listing->checkpoints[1].id.step, 9);
  EXPECT_EQ(listing->checkpoints[2].id.step, 7);
  EXPECT_THAT(listing->work_folders, ElementsAre(".tmp-step-000000000013.g0001.abc"));
}

TEST_F(FolderListingTest, AMissingOrShorterFileMakesItIncomplete) {
  const std::string folder = Write(1);
  files_.Corrupt(folder + kModel, [](std::string& content) { content.pop_back(); });
  EXPECT_EQ(Only().state, State::kIncomplete);
  EXPECT_THAT(Only().reason, HasSubstr("model-00001-of-00002.safetensors has "));
  ASSERT_TRUE(files_.RemoveFile(folder + kModel).ok());
  EXPECT_EQ(Only().state, State::kIncomplete);
  EXPECT_THAT(Only().reason, HasSubstr("model-00001-of-00002.safetensors is missing"));
  ASSERT_TRUE(files_.RemoveFile(folder + "/MANIFEST.json").ok());
  EXPECT_EQ(Only().state, State::kIncomplete);
  EXPECT_THAT(Only().reason, HasSubstr("MANIFEST.json is missing"));
}

TEST_F(FolderListingTest, ADamagedManifestIsNamed) {
  const std::string folder = Write(1);
  files_.Corrupt(folder + "/MANIFEST.json", [](std::string& text) { text[20] ^= 1; });
  EXPECT_EQ(Only().state, State::kDamaged);
  EXPECT_THAT(Only().reason, HasSubstr("does not match its own XXH3-128"));
}

TEST_F(FolderListingTest, TheManifestOfAnotherCheckpointIsDamage) {
  const std::string folder = Write(1);
  RewriteManifest(files_, folder, [](Manifest& manifest) { manifest.id.step = 2; });
  EXPECT_EQ(Only().state, State::kDamaged);
  EXPECT_THAT(Only().reason, HasSubstr("is the manifest of step-000000000002.g0001"));
}

TEST_F(FolderListingTest, AnotherErrorIsNoDamage) {
  Write(1);
  files_.FailFromCall(files_.calls() + 3, absl::PermissionDeniedError("MANIFEST.json: refused"));
  const ListedCheckpoint only = Only();
  EXPECT_EQ(only.state, State::kUnreadable);
  EXPECT_THAT(only.reason, HasSubstr("refused"));
}

TEST_F(FolderListingTest, FoldersThatDoNotExistOrAreEmpty) {
  EXPECT_TRUE(absl::IsNotFound(ListFolder(files_, "nowhere").status()));
  EXPECT_TRUE(ListFolder(files_, "jobs")->checkpoints.empty());
  EXPECT_THAT(std::string(FindCheckpoint(files_, "jobs").status().message()),
              HasSubstr("jobs holds no checkpoint"));
}

TEST_F(FolderListingTest, APathMeansACheckpointOrTheNewestOfAFolder) {
  const std::string old = Write(1);
  const std::string newest = Write(2);
  const std::string copy = WriteExample(files_, "jobs", {.folder_name = "best"});
  EXPECT_EQ(FindCheckpoint(files_, "jobs/").value(), newest);
  EXPECT_EQ(FindCheckpoint(files_, old + "//").value(), old);
  EXPECT_EQ(FindCheckpoint(files_, copy).value(), copy);
  EXPECT_THAT(FindCheckpoints(files_, "jobs").value(), ElementsAre(newest, old));
  EXPECT_TRUE(ReadManifestOf(files_, copy).ok());
}

}  // namespace
}  // namespace ddp::elastic
