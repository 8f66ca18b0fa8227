#include "elastic/checkpoint/inspect/verification.h"

#include <random>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/inspect/example_checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/file_system/memory_file_system.h"

namespace ddp::elastic {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kModel[] = "model-00001-of-00002.safetensors";
constexpr size_t kDataBegin = 4096;  // of the example's small files

auto IsDamage(const std::string& file, const std::string& place, const std::string& message) {
  return AllOf(Field(&Damage::file, file), Field(&Damage::place, place),
               Field(&Damage::message, HasSubstr(message)));
}

class VerificationTest : public ::testing::Test {
 protected:
  VerificationTest() {
    EXPECT_TRUE(files_.MakeDirectory("jobs").ok());
    folder_ = WriteExample(files_, "jobs");
  }

  void Corrupt(const std::string& file, const std::function<void(std::string&)>& change) {
    files_.Corrupt(absl::StrCat(folder_, "/", file), change);
  }

  // Replaces a text of the manifest, whose own hash then does not fit.
  void ChangeManifest(const std::string& from, const std::string& to) {
    Corrupt("MANIFEST.json", [&](std::string& text) {
      const size_t at = text.find(from);
      ASSERT_NE(at, std::string::npos) << text;
      text.replace(at, from.size(), to);
    });
  }

  Verification Verify() {
    const absl::StatusOr<Verification> verification = VerifyCheckpoint(files_, folder_);
    EXPECT_TRUE(verification.ok()) << verification.status();
    return verification.value_or(Verification{});
  }

  testing::MemoryFileSystem files_;
  std::string folder_;
};

TEST_F(VerificationTest, ReadsEveryByteOfAnUndamagedOne) {
  uint64_t last = 0;
  uint64_t total = 0;
  const absl::StatusOr<Verification> verification =
      VerifyCheckpoint(files_, folder_, [&](uint64_t done, uint64_t all) {
        EXPECT_GE(done, last);
        last = done;
        total = all;
      });
  ASSERT_TRUE(verification.ok()) << verification.status();
  EXPECT_TRUE(verification->is_whole());
  EXPECT_EQ(verification->tensors, 5);
  EXPECT_EQ(verification->files, 4);
  uint64_t bytes = 0;
  for (const char* file : {kModel, "model-00002-of-00002.safetensors", "extra-00000.safetensors",
                           "optimizer-00001-of-00001.safetensors"}) {
    bytes += files_.Content(absl::StrCat(folder_, "/", file))->size();
  }
  EXPECT_EQ(verification->bytes, bytes);
  EXPECT_EQ(last, bytes);
  EXPECT_EQ(total, bytes);
}

TEST_F(VerificationTest, NamesEachDamagedTensor) {
  Corrupt(kModel, [](std::string& content) {
    content[kDataBegin] ^= 1;      // fc.bias
    content[kDataBegin + 8] ^= 1;  // fc.weight
  });
  Corrupt("extra-00000.safetensors", [](std::string& content) { content.back() ^= 1; });
  EXPECT_THAT(Verify().damages,
              ElementsAre(IsDamage("extra-00000.safetensors", "tensor rng.cpu.0", "the manifest"),
                          IsDamage(kModel, "tensor fc.bias", "its XXH3-128 is"),
                          IsDamage(kModel, "tensor fc.weight", "its XXH3-128 is")));
}

TEST_F(VerificationTest, ADamagedHeaderDoesNotHideADamagedTensor) {
  Corrupt(kModel, [](std::string& content) {
    content[8] = 'x';
    content[kDataBegin] ^= 1;
  });
  EXPECT_THAT(Verify().damages, ElementsAre(IsDamage(kModel, "header", "does not start with"),
                                            IsDamage(kModel, "tensor fc.bias", "its XXH3-128 is")));
}

TEST_F(VerificationTest, AChangedBlankOfTheHeaderIsFound) {
  Corrupt(kModel, [](std::string& content) { content[kDataBegin - 1] = '\n'; });
  EXPECT_THAT(Verify().damages, ElementsAre(IsDamage(kModel, "header", "its XXH3-128 is")));
}

TEST_F(VerificationTest, AHeaderThatNamesOtherTensors) {
  Corrupt(kModel,
          [](std::string& content) { content.replace(content.find("fc.bias"), 7, "fc.bIas"); });
  EXPECT_THAT(Verify().damages,
              ElementsAre(IsDamage(kModel, "tensor fc.bias", "not in the file's header"),
                          IsDamage(kModel, "tensor fc.bIas", "not in the manifest")));
}

TEST_F(VerificationTest, MissingAndShortFiles) {
  ASSERT_TRUE(files_.RemoveFile(folder_ + "/extra-00000.safetensors").ok());
  Corrupt(kModel, [](std::string& content) { content.pop_back(); });
  EXPECT_THAT(
      Verify().damages,
      ElementsAre(IsDamage("extra-00000.safetensors", "", "is missing"),
                  IsDamage(kModel, "", "the manifest says"), IsDamage(kModel, "header", "bytes"),
                  IsDamage(kModel, "tensor fc.weight", "are not all in the file")));
  ASSERT_TRUE(files_.RemoveFile(folder_ + "/MANIFEST.json").ok());
  EXPECT_THAT(Verify().damages, ElementsAre(IsDamage("MANIFEST.json", "", "is missing")));
}

TEST_F(VerificationTest, AReadErrorIsNamedAndTheOtherFilesAreRead) {
  const int64_t before = files_.calls();
  Verify();
  const int64_t calls = files_.calls() - before;
  int named = 0;
  for (int64_t call = 3; call <= calls; ++call) {  // the manifest is read before
    files_.FailCall(files_.calls() + call, absl::InternalError("the disk has failed"));
    const Verification verification = Verify();
    ASSERT_FALSE(verification.is_whole()) << call;
    EXPECT_THAT(verification.damages[0].message, HasSubstr("the disk has failed")) << call;
    named += static_cast<int>(absl::StartsWith(verification.damages[0].place, "tensor"));
  }
  EXPECT_EQ(named, 5);
}

TEST_F(VerificationTest, ADamagedFieldOfTheManifestIsNamed) {
  ChangeManifest("\"step\": 1200", "\"step\": 1201");
  EXPECT_THAT(Verify().damages,
              ElementsAre(IsDamage("MANIFEST.json", "", "does not match its own XXH3-128"),
                          IsDamage("MANIFEST.json", "field step", "it is 1201")));
}

TEST_F(VerificationTest, ATextThatIsNoJsonIsNamedWithItsByte) {
  ChangeManifest("\"world_size\": 4", "\"world_size\": x");
  EXPECT_THAT(Verify().damages, ElementsAre(IsDamage("MANIFEST.json", "", "its own XXH3-128"),
                                            IsDamage("MANIFEST.json", "", "no JSON at byte")));
}

TEST_F(VerificationTest, AWrongHashInTheManifestIsNotBlamedOnTheTensor) {
  Corrupt("MANIFEST.json", [](std::string& text) {
    const size_t tensor = text.find("\"name\":\"fc.weight\"");
    ASSERT_NE(tensor, std::string::npos) << text;
    const size_t hash = text.find("\"xxh3_128\":\"", tensor) + 12;
    text[hash] = text[hash] == '0' ? '1' : '0';
  });
  EXPECT_THAT(Verify().damages,
              ElementsAre(IsDamage("MANIFEST.json", "", "does not match its own XXH3-128"),
                          IsDamage("MANIFEST.json", "field state_xxh3_128", "listed tensors give"),
                          IsDamage("MANIFEST.json", "tensor fc.weight",
                                   absl::StrCat("wrong about ", kModel, ", which is undamaged"))));
}

TEST_F(VerificationTest, OverlappingTensorsOfAWrongManifestAreBlamedOnTheManifest) {
  RewriteManifest(files_, folder_, [](Manifest& manifest) {
    for (TensorRecord& tensor : manifest.tensors) {
      if (tensor.name == "fc.weight") tensor.offset -= 4;
    }
  });
  EXPECT_THAT(Verify().damages,
              ElementsAre(IsDamage("MANIFEST.json", "tensor fc.weight", "it begins at byte"),
                          IsDamage("MANIFEST.json", "tensor fc.weight", "its XXH3-128 is")));
}

TEST_F(VerificationTest, AFolderOfAnyNameIsVerified) {
  folder_ = WriteExample(files_, "jobs", {.folder_name = "best"});
  EXPECT_THAT(Verify().damages, IsEmpty());
}

TEST_F(VerificationTest, ErrorsThatAreNoDamage) {
  EXPECT_TRUE(absl::IsNotFound(VerifyCheckpoint(files_, "jobs/nothing").status()));
}

// Any one changed bit of any file is found, and the damage names the file.
TEST_F(VerificationTest, RandomChangesOfOneBitAreFound) {
  std::mt19937_64 random(7);
  const absl::StatusOr<std::vector<std::string>> names = files_.ListDirectory(folder_);
  ASSERT_TRUE(names.ok());
  std::set<std::string> places;
  for (int i = 0; i < 1000; ++i) {
    const std::string& name = (*names)[random() % names->size()];
    const uint64_t number = random();
    const auto flip = [number](std::string& content) {
      content[number % content.size()] ^= static_cast<char>(1 << ((number >> 40) % 8));
    };
    Corrupt(name, flip);
    const absl::StatusOr<Verification> found = VerifyCheckpoint(files_, folder_);
    ASSERT_TRUE(found.ok()) << i << ": " << found.status();
    ASSERT_FALSE(found->is_whole()) << i << ": " << name;
    EXPECT_EQ(found->damages[0].file, name) << i;
    for (const Damage& damage : found->damages) places.insert(damage.place);
    Corrupt(name, flip);
  }
  EXPECT_GT(places.size(), 5);
  EXPECT_TRUE(Verify().is_whole());
}

}  // namespace
}  // namespace ddp::elastic
