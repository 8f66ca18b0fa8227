// Tests the writer and the reader of safetensors files, with each other and with hostile files.
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/format/content_hash.h"
#include "elastic/checkpoint/format/safetensors_reader.h"
#include "elastic/checkpoint/format/safetensors_writer.h"
#include "elastic/checkpoint/format/tensor_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/file_system/memory_file_system.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TensorView View(const std::string& name, Dtype dtype, std::vector<uint64_t> shape,
                const std::string& bytes) {
  return {name, {dtype, std::move(shape)}, bytes.data(), bytes.size()};
}

std::string Bytes(size_t count, char first) {
  std::string bytes(count, '\0');
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>(first + static_cast<char>(i * 7));
  return bytes;
}

// Returns the text of a file with any header and data, as another writer could make it.
std::string FileWith(const std::string& header, const std::string& data) {
  std::string text(8, '\0');
  const uint64_t length = header.size();
  for (size_t i = 0; i < 8; ++i) text[i] = static_cast<char>((length >> (8 * i)) & 0xff);
  return text + header + data;
}

std::string ParseError(const std::string& header, const std::string& data = "") {
  const std::string file = FileWith(header, data);
  const auto tensors = ParseSafetensorsHeader(file, file.size());
  if (tensors.ok()) return "";
  EXPECT_EQ(tensors.status().code(), absl::StatusCode::kDataLoss);
  return std::string(tensors.status().message());
}

class SafetensorsTest : public ::testing::Test {
 protected:
  WrittenFile Write(const std::string& path, std::vector<TensorView> tensors) {
    auto written = WriteSafetensors(file_system_, path, std::move(tensors));
    EXPECT_TRUE(written.ok()) << written.status();
    return *std::move(written);
  }

  absl::StatusOr<LoadedFile> Load(const std::string& path) {
    auto file = file_system_.OpenFile(path);
    if (!file.ok()) return file.status();
    return LoadSafetensors(**file, path);
  }

  ddp::testing::MemoryFileSystem file_system_;
  const std::string weight_ = Bytes(24, 'a');
  const std::string count_ = Bytes(8, 'b');
  const std::string mask_ = Bytes(3, 'c');
};

TEST_F(SafetensorsTest, EveryTensorComesBack) {
  const WrittenFile written =
      Write("/f", {View("weight", Dtype::kF32, {2, 3}, weight_), View("n", Dtype::kI64, {}, count_),
                   View("mask", Dtype::kBool, {3}, mask_), View("none", Dtype::kF16, {0, 5}, "")});
  const absl::StatusOr<LoadedFile> loaded = Load("/f");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->bytes, written.bytes);
  EXPECT_EQ(loaded->hash, written.hash);
  EXPECT_EQ(loaded->hash, ContentHash::Of(*file_system_.Content("/f")));
  ASSERT_EQ(loaded->tensors.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(loaded->tensors[i].name, written.tensors[i].name);
    EXPECT_EQ(loaded->tensors[i].type, written.tensors[i].type);
    EXPECT_EQ(loaded->stored[i].offset, written.tensors[i].offset);
    EXPECT_EQ(loaded->hashes[i], written.tensors[i].hash);
  }
  EXPECT_EQ(loaded->tensors[0].name, "n");
  EXPECT_EQ(loaded->tensors[1].name, "weight");
  EXPECT_EQ(std::string(loaded->tensors[1].data, loaded->tensors[1].bytes), weight_);
  EXPECT_EQ(written.tensors[1].hash, ContentHash::Of(weight_));
}

TEST_F(SafetensorsTest, OrderOfTheTensorsDoesNotMatterAndDataStartsOnAPage) {
  Write("/f", {View("weight", Dtype::kF32, {2, 3}, weight_), View("n", Dtype::kI64, {}, count_)});
  Write("/g", {View("n", Dtype::kI64, {}, count_), View("weight", Dtype::kF32, {2, 3}, weight_)});
  EXPECT_EQ(file_system_.Content("/f"), file_system_.Content("/g"));
  EXPECT_EQ(file_system_.Content("/f")->size(), 4096 + 32u);
  EXPECT_THAT(*file_system_.Content("/f"), HasSubstr(R"({"__metadata__":{"format":"pt"},)"));
}

TEST_F(SafetensorsTest, LargeTensorsPassThroughTheBuffer) {
  const std::string large = Bytes((size_t{20} << 20) + 13, 'x');
  Write("/f",
        {View("large", Dtype::kU8, {large.size()}, large), View("m", Dtype::kU8, {3}, mask_)});
  const absl::StatusOr<LoadedFile> loaded = Load("/f");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(std::memcmp(loaded->tensors[0].data, large.data(), large.size()), 0);
  EXPECT_EQ(std::string(loaded->tensors[1].data, 3), mask_);
}

TEST_F(SafetensorsTest, FileWithoutTensorsIsAFile) {
  Write("/f", {});
  EXPECT_TRUE(Load("/f").ok());
}

TEST_F(SafetensorsTest, WriterRefusesTwoTensorsOfOneName) {
  EXPECT_EQ(WriteSafetensors(file_system_, "/f",
                             {View("m", Dtype::kU8, {3}, mask_), View("m", Dtype::kU8, {3}, mask_)})
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(SafetensorsTest, EveryFailingCallFailsTheWrite) {
  Write("/count", {View("m", Dtype::kU8, {3}, mask_)});
  const int64_t calls = file_system_.calls();
  for (int64_t call = 1; call <= calls; ++call) {
    ddp::testing::MemoryFileSystem file_system;
    file_system.FailCall(call, absl::ResourceExhaustedError("no space left"));
    EXPECT_EQ(
        WriteSafetensors(file_system, "/f", {View("m", Dtype::kU8, {3}, mask_)}).status().code(),
        absl::StatusCode::kResourceExhausted)
        << "call " << call;
  }
}

// Row 3 of the failure table: a file of a wrong length is refused, without comparing hashes.
TEST_F(SafetensorsTest, EveryTruncationAndExtensionIsRefused) {
  Write("/f", {View("weight", Dtype::kF32, {2, 3}, weight_)});
  const std::string whole = *file_system_.Content("/f");
  for (size_t length = 0; length < whole.size(); length += length < 16 ? 1 : 97) {
    file_system_.Corrupt("/f", [&](std::string& content) { content = whole.substr(0, length); });
    const absl::StatusOr<LoadedFile> loaded = Load("/f");
    EXPECT_EQ(loaded.status().code(), absl::StatusCode::kDataLoss) << length;
    EXPECT_THAT(std::string(loaded.status().message()), HasSubstr("/f: "));
  }
  file_system_.Corrupt("/f", [&](std::string& content) { content = whole + "x"; });
  EXPECT_EQ(Load("/f").status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(SafetensorsTest, EveryFlippedBitChangesAHash) {
  const WrittenFile written = Write("/f", {View("weight", Dtype::kF32, {2, 3}, weight_)});
  const std::string whole = *file_system_.Content("/f");
  for (size_t byte = 0; byte < whole.size(); byte += byte < 200 || byte > 4090 ? 1 : 61) {
    file_system_.Corrupt("/f", [&](std::string& content) {
      content = whole;
      content[byte] ^= static_cast<char>(1 << (byte % 8));
    });
    const absl::StatusOr<LoadedFile> loaded = Load("/f");
    EXPECT_TRUE(!loaded.ok() || loaded->hash != written.hash) << "byte " << byte;
  }
}

// A file that is rewritten between its first read and the next.
class ChangingFile final : public ReadableFile {
 public:
  ChangingFile(std::string first, std::string later)
      : first_(std::move(first)), later_(std::move(later)) {}

  uint64_t size() const override { return first_.size(); }
  absl::Status Read(uint64_t offset, char* buffer, size_t bytes) const override {
    const std::string& now = reads_++ == 0 ? first_ : later_;
    if (offset + bytes > now.size()) return absl::DataLossError("the file ends before");
    std::memcpy(buffer, now.data() + offset, bytes);
    return absl::OkStatus();
  }

 private:
  const std::string first_;
  const std::string later_;
  mutable int reads_ = 0;
};

TEST(SafetensorsHeaderTest, AFileThatChangesWhileItIsReadIsRefused) {
  // The later file has the same size and a shorter header, so it has 4,000 bytes of data more.
  const auto file = [](const std::string& name, size_t data) {
    return FileWith(absl::StrCat("{\"", name, "\":{\"dtype\":\"U8\",\"shape\":[", data,
                                 "],\"data_offsets\":[0,", data, "]}}"),
                    std::string(data, 'x'));
  };
  const std::string first = file(std::string(4001, 'a'), 1000);
  const std::string later = file("a", 5000);
  ASSERT_EQ(first.size(), later.size());
  const auto loaded = LoadSafetensors(ChangingFile(first, later), "changing");
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kDataLoss) << loaded.status();
}

TEST_F(SafetensorsTest, HashesAreOfTheBytesInTheFileWhateverTheTensorDoes) {
  constexpr size_t kBytes = size_t{8} << 20;
  void* const memory =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const pid_t trainer = fork();
  ASSERT_GE(trainer, 0);
  if (trainer == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int value = 0;; ++value) std::memset(memory, value, kBytes);
  }
  for (int i = 0; i < 3; ++i) {
    const std::string path = absl::StrCat("/moving-", i);
    const WrittenFile written =
        Write(path, {{"moving", {Dtype::kU8, {kBytes}}, static_cast<const char*>(memory), kBytes}});
    const auto loaded = Load(path);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->hashes[0], written.tensors[0].hash);
    EXPECT_EQ(loaded->hash, written.hash);
  }
  ASSERT_EQ(kill(trainer, SIGKILL), 0);
  ASSERT_EQ(waitpid(trainer, nullptr, 0), trainer);
  munmap(memory, kBytes);
}

TEST_F(SafetensorsTest, WriterRefusesANameThatIsNoUtf8) {
  const auto written =
      WriteSafetensors(file_system_, "/file", {View("fc.\xff", Dtype::kU8, {3}, mask_)});
  EXPECT_EQ(written.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(written.status().message()),
              HasSubstr("the tensor name \"fc.\\xff\" is no UTF-8"));
}

TEST(SafetensorsHeaderTest, ReadsFilesOfOtherWriters) {
  const std::string entries = R"({"b":{"shape":[2],"data_offsets":[4,6],"dtype":"I8"},)"
                              R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}  )";
  EXPECT_THAT(ParseError(" " + entries, "abcdef"), HasSubstr("does not start with"));
  const std::string good = FileWith(entries, "abcdef");
  const auto tensors = ParseSafetensorsHeader(good, good.size());
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_EQ((*tensors)[0].name, "a");
  EXPECT_EQ((*tensors)[1].name, "b");
  EXPECT_THAT((*tensors)[1].type.shape, ElementsAre(2u));
}

TEST(SafetensorsHeaderTest, RefusesLyingLengths) {
  for (const uint64_t length : {uint64_t{1} << 63, std::numeric_limits<uint64_t>::max(),
                                uint64_t{100'000'001}, uint64_t{3}}) {
    std::string start(8, '\0');
    for (size_t i = 0; i < 8; ++i) start[i] = static_cast<char>((length >> (8 * i)) & 0xff);
    EXPECT_EQ(ParseSafetensorsHeader(start + "{}", 10).status().code(), absl::StatusCode::kDataLoss)
        << length;
  }
}

TEST(SafetensorsHeaderTest, RefusesWhatIsNotTheFormat) {
  const auto one = [](const std::string& fields) {
    return absl::StrCat(R"({"a":{)", fields, "}}");
  };
  EXPECT_EQ(ParseError(one(R"("dtype":"U8","shape":[2],"data_offsets":[0,2])"), "xy"), "");
  EXPECT_THAT(ParseError(one(R"("dtype":"U8","shape":[2],"data_offsets":[0,3])"), "xyz"),
              HasSubstr("3 bytes, which is not U8 [2]"));
  EXPECT_THAT(ParseError(one(R"("dtype":"U8","shape":[2],"data_offsets":[1,3])"), "xyz"),
              HasSubstr("starts at byte 1"));
  EXPECT_THAT(ParseError(one(R"("dtype":"U8","shape":[2],"data_offsets":[2,0])"), "xy"),
              HasSubstr("no range"));
  EXPECT_THAT(ParseError(one(R"("dtype":"U8","shape":[2],"data_offsets":[0])"), "xy"),
              HasSubstr("no range"));
  EXPECT_THAT(ParseError(one(R"("dtype":"U8","shape":[2],"data_offsets":[0,2,2])"), "xy"),
              HasSubstr("a number where it cannot be"));
  EXPECT_THAT(ParseError(one(R"("dtype":"U8","shape":[2],"data_offsets":[0,2])"), "xyz"),
              HasSubstr("3 bytes of data and its header speaks of 2"));
  EXPECT_THAT(ParseError(one(R"("dtype":"Q4","shape":[2],"data_offsets":[0,2])"), "xy"),
              HasSubstr("unknown dtype \"Q4\""));
  EXPECT_THAT(ParseError(one(R"("dtype":"U8","shape":[2])"), "xy"), HasSubstr("lacks"));
  EXPECT_THAT(
      ParseError(one(R"("dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2])"), "xy"),
      HasSubstr("repeated key \"dtype\""));
  EXPECT_THAT(ParseError(one(R"("dtype":"U8","shape":[-2],"data_offsets":[0,2])"), "xy"),
              HasSubstr("negative"));
  EXPECT_THAT(ParseError(one(R"("dtype":"U8","shape":[2.0],"data_offsets":[0,2])"), "xy"),
              HasSubstr("not whole"));
  EXPECT_THAT(ParseError(one(R"("dtype":"U8","shape":[[2]],"data_offsets":[0,2])"), "xy"),
              HasSubstr("an array"));
  EXPECT_THAT(ParseError(R"({"a":5})"), HasSubstr("a number"));
  EXPECT_THAT(ParseError(R"({"a":null})"), HasSubstr("null"));
  EXPECT_THAT(ParseError(R"({"__metadata__":{"k":1}})"), HasSubstr("a number"));
  EXPECT_THAT(ParseError(R"({"a")"), HasSubstr("no JSON at byte"));
  EXPECT_THAT(ParseError("[]"), HasSubstr("does not start"));
  EXPECT_THAT(ParseError("{}{}"), HasSubstr("no JSON"));
  EXPECT_THAT(ParseError(""), HasSubstr("does not start"));
}

TEST(SafetensorsHeaderTest, RefusesSizesThatOverflow) {
  EXPECT_THAT(
      ParseError(R"({"a":{"dtype":"F64","shape":[2305843009213693952,8],"data_offsets":[0,0]}})"),
      HasSubstr("which is not"));
  EXPECT_THAT(
      ParseError(R"({"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,0]}})"),
      HasSubstr("too large"));
  EXPECT_EQ(
      ParseError(R"({"a":{"dtype":"F64","shape":[2305843009213693952,8,0],"data_offsets":[0,0]}})"),
      "");
}

TEST(SafetensorsHeaderTest, RefusesOverlapHolesAndDuplicates) {
  const auto two = [](const std::string& a, const std::string& b, const std::string& name) {
    return absl::StrCat(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)", a, R"(},")", name,
                        R"(":{"dtype":"U8","shape":[2],"data_offsets":)", b, "}}");
  };
  EXPECT_EQ(ParseError(two("[0,2]", "[2,4]", "b"), "wxyz"), "");
  EXPECT_THAT(ParseError(two("[0,2]", "[1,3]", "b"), "xyz"), HasSubstr("starts at byte 1"));
  EXPECT_THAT(ParseError(two("[0,2]", "[3,5]", "b"), "vwxyz"), HasSubstr("starts at byte 3"));
  EXPECT_THAT(ParseError(two("[0,2]", "[0,2]", "b"), "xy"), HasSubstr("starts at byte 0"));
  EXPECT_THAT(ParseError(two("[0,2]", "[2,4]", "a"), "wxyz"), HasSubstr("twice"));
}

TEST(SafetensorsHeaderTest, DeepNestingEndsAtTheFirstLevel) {
  EXPECT_THAT(ParseError(absl::StrCat(R"({"a":)", std::string(1'000'000, '['))),
              HasSubstr("an array where it cannot be"));
}

TEST(SafetensorsHeaderTest, NamesMayBeAnything) {
  const std::string text = "v";
  const TensorView tensor = View("line\nbreak \"quoted\" \xc3\xa9", Dtype::kU8, {1}, text);
  const auto header = EncodeSafetensorsHeader({tensor});
  ASSERT_TRUE(header.ok());
  const auto parsed = ParseSafetensorsHeader(*header, header->size() + 1);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ((*parsed)[0].name, tensor.name);
}

}  // namespace
}  // namespace ddp::elastic
