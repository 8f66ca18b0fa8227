#include "elastic/checkpoint/inspect/difference.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/inspect/example_checkpoint.h"
#include "elastic/checkpoint/inspect/value_difference.h"
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

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class DifferenceTest : public ::testing::Test {
 protected:
  DifferenceTest() { EXPECT_TRUE(files_.MakeDirectory("jobs").ok()); }

  std::string Write(const std::string& name, ExampleCheckpoint example = {}) {
    example.folder_name = name;
    return WriteExample(files_, "jobs", example);
  }

  CheckpointDifference Compare(const std::string& a, const std::string& b) {
    absl::StatusOr<CheckpointDifference> difference = CompareCheckpoints(files_, a, b);
    EXPECT_TRUE(difference.ok()) << difference.status();
    return std::move(difference).value_or(CheckpointDifference{});
  }

  testing::MemoryFileSystem files_;
};

TEST_F(DifferenceTest, EqualStatesDifferNotByWriterOrGeneration) {
  const std::string a = Write("a");
  const std::string b = Write(
      "b", {.id = {.step = 1200, .generation = 9}, .run_id = "other", .saved_unix_seconds = 5});
  const CheckpointDifference difference = Compare(a, b);
  EXPECT_TRUE(difference.is_empty());
  EXPECT_EQ(difference.equal_tensors, 5);
}

TEST_F(DifferenceTest, ValuesWithTheirLargestDifference) {
  const std::string a = Write("a");
  const std::string b = Write("b", {.weight = {1, 2.5, 3, 2, 5, 6}, .count = 4});
  const CheckpointDifference difference = Compare(a, b);
  ASSERT_EQ(difference.tensors.size(), 2);
  const TensorDifference& count = difference.tensors[0];
  EXPECT_EQ(count.name, "count");
  EXPECT_EQ(count.part, "model");
  EXPECT_EQ(count.different, 1);
  EXPECT_EQ(count.largest, std::nullopt);
  const TensorDifference& weight = difference.tensors[1];
  EXPECT_EQ(weight.name, "fc.weight");
  EXPECT_EQ(weight.elements, 6);
  EXPECT_EQ(weight.different, 2);
  EXPECT_EQ(weight.largest, 2.0);
  EXPECT_EQ(difference.equal_tensors, 3);
  EXPECT_THAT(difference.fields, IsEmpty());
}

TEST_F(DifferenceTest, FieldsWithTheirPath) {
  const std::string a = Write("a");
  const std::string b = Write("b", {.id = {.step = 1201, .generation = 7}, .learning_rate = 0.05});
  EXPECT_THAT(
      Compare(a, b).fields,
      ElementsAre(AllOf(Field(&FieldDifference::field, "optimizer/param_groups/0/options/lr"),
                        Field(&FieldDifference::a, "0.1"), Field(&FieldDifference::b, "0.05")),
                  AllOf(Field(&FieldDifference::field, "step"), Field(&FieldDifference::a, "1200"),
                        Field(&FieldDifference::b, "1201"))));
}

TEST_F(DifferenceTest, MissingTensorsAndOtherShapes) {
  const std::string a = Write("a");
  const std::string b = Write("b");
  RewriteManifest(files_, b, [](Manifest& manifest) {
    for (TensorRecord& tensor : manifest.tensors) {
      if (tensor.name == "fc.weight") tensor.type.shape = {3, 2};
      if (tensor.name == "count") tensor.name = "counter";
    }
  });
  const CheckpointDifference difference = Compare(a, b);
  ASSERT_EQ(difference.tensors.size(), 3);
  EXPECT_EQ(difference.tensors[0].name, "count");
  EXPECT_FALSE(difference.tensors[0].b.has_value());
  EXPECT_EQ(difference.tensors[1].name, "counter");
  EXPECT_FALSE(difference.tensors[1].a.has_value());
  EXPECT_EQ(difference.tensors[2].name, "fc.weight");
  EXPECT_FALSE(difference.tensors[2].compares_values());
}

TEST_F(DifferenceTest, ADamagedTensorIsAnError) {
  const std::string a = Write("a");
  const std::string b = Write("b", {.bias = {1, 2}});
  files_.Corrupt(b + "/model-00001-of-00002.safetensors",
                 [](std::string& content) { content[4096] ^= 1; });
  const absl::Status status = CompareCheckpoints(files_, a, b).status();
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("b/model-00001-of-00002.safetensors: tensor fc.bias is damaged"));
}

TEST_F(DifferenceTest, ReportsTheBytesThatItReads) {
  const std::string a = Write("a");
  const std::string b = Write("b", {.weight = {0, 0, 0, 0, 0, 0}});
  uint64_t last = 0;
  ASSERT_TRUE(CompareCheckpoints(files_, a, b, [&](uint64_t done, uint64_t total) {
                last = done;
                EXPECT_EQ(total, 48);
              }).ok());
  EXPECT_EQ(last, 48);
}

template <typename T>
std::optional<double> Largest(Dtype dtype, const std::vector<T>& a, const std::vector<T>& b) {
  ValueDifference difference(dtype);
  difference.Add(reinterpret_cast<const char*>(a.data()), reinterpret_cast<const char*>(b.data()),
                 a.size() * sizeof(T));
  return difference.largest();
}

TEST(ValueDifferenceTest, NanAndInfinity) {
  EXPECT_EQ(Largest<float>(Dtype::kF32, {0.0F, kInf}, {-0.0F, kInf}), 0);
  EXPECT_EQ(Largest<float>(Dtype::kF32, {1, kInf}, {9, 1}), kInf);
  EXPECT_TRUE(std::isnan(*Largest<float>(Dtype::kF32, {kNan, 1}, {1, 9})));
  EXPECT_EQ(Largest<float>(Dtype::kF32, {kNan, 1}, {-kNan, 9}), 8);
}

TEST(ValueDifferenceTest, ComplexNumbersByTheirParts) {
  EXPECT_EQ(Largest<float>(Dtype::kC64, {1, 2, 3, 4}, {1, 2.5, 3, 1}), 3);
}

TEST(ValueDifferenceTest, SmallFloats) {
  EXPECT_EQ(ValueOfF16(0x3c00), 1.0);
  EXPECT_EQ(ValueOfF16(0xc000), -2.0);
  EXPECT_EQ(ValueOfF16(0x0001), 0x1p-24);
  EXPECT_EQ(ValueOfF16(0x7c00), kInf);
  EXPECT_TRUE(std::isnan(ValueOfF16(0x7e00)));
  EXPECT_EQ(ValueOfBF16(0x3f80), 1.0);
  EXPECT_EQ(ValueOfBF16(0xff80), -kInf);
  EXPECT_EQ(ValueOfF8E4M3(0x7e), 448);
  EXPECT_TRUE(std::isnan(ValueOfF8E4M3(0x7f)));
  EXPECT_EQ(ValueOfF8E4M3(0x01), 0x1p-9);
  EXPECT_EQ(ValueOfF8E5M2(0x7b), 57344);
  EXPECT_EQ(ValueOfF8E5M2(0x7c), kInf);
}

// Every BF16 is the upper half of a float.
TEST(ValueDifferenceTest, EveryBF16) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint32_t whole = bits << 16;
    float expected;
    std::memcpy(&expected, &whole, sizeof(expected));
    const double value = ValueOfBF16(static_cast<uint16_t>(bits));
    ASSERT_TRUE(value == expected || (std::isnan(value) && std::isnan(expected))) << bits;
  }
}

}  // namespace
}  // namespace ddp::elastic
