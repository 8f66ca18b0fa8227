#include "elastic/checkpoint/folder/work_folder.h"

#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

TEST(WorkFolderTest, NamesComeBack) {
  const WorkFolder writing = {.id = {1200, 7}, .nonce = "restart-0-1f"};
  EXPECT_EQ(WorkFolderName(writing), ".tmp-step-000000001200.g0007.restart-0-1f");
  EXPECT_EQ(ParseWorkFolderName(WorkFolderName(writing)), writing);
  const WorkFolder retired = {.id = {1200, 7}, .nonce = "abc", .retired = true};
  EXPECT_EQ(WorkFolderName(retired), ".del-step-000000001200.g0007.abc");
  EXPECT_EQ(ParseWorkFolderName(WorkFolderName(retired)), retired);
}

TEST(WorkFolderTest, EveryOtherNameIsNone) {
  for (const char* name :
       {"", ".tmp-", ".tmp-x", ".tmp-step-000000001200.g0007", ".tmp-step-000000001200.g0007.",
        ".tmp-step-1200.g0007.abc", ".tmp-step-000000001200.g7.abc",
        ".tmp-step-000000001200.g0007.a/b", ".tmp-step-000000001200.g0007.a_b",
        ".tmp-step-000000001200.g0007.abc.d", ".tmp-step-000000001200.g0007.abc ",
        "tmp-step-000000001200.g0007.abc", ".old-step-000000001200.g0007.abc",
        "step-000000001200.g0007", ".tmp-step--00000001200.g0007.abc", ".del-.abc"}) {
    EXPECT_FALSE(ParseWorkFolderName(name).has_value()) << name;
  }
}

TEST(WorkFolderTest, FilesOfACheckpointHaveExactNames) {
  for (const char* name :
       {"MANIFEST.json", "model-00001-of-00001.safetensors", "optimizer-00002-of-00003.safetensors",
        "extra-00000.safetensors", "extra-123456.safetensors"}) {
    EXPECT_TRUE(IsCheckpointFile(name)) << name;
  }
  for (const char* name :
       {"", "manifest.json", "MANIFEST.json.tmp", "model.safetensors", "notes.safetensors",
        "model-00001-of-00001.safetensors.bak", "model-1-of-1.safetensors",
        "model-00002-of-00001.safetensors", "model-00000-of-00001.safetensors",
        "extra-0.safetensors", "extra-+0001.safetensors", "extra- 0001.safetensors",
        "extra-000001.safetensors", "model-00001-of-00001-of-00001.safetensors", ".owner"}) {
    EXPECT_FALSE(IsCheckpointFile(name)) << name;
  }
}

}  // namespace
}  // namespace ddp::elastic
