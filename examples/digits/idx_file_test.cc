#include "examples/digits/idx_file.h"

#include <stdexcept>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::examples {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Bytes(std::initializer_list<int> values) {
  std::string bytes;
  for (const int value : values) bytes.push_back(static_cast<char>(value));
  return bytes;
}

std::string ErrorOf(const std::string& bytes, int dimensions) {
  try {
    IdxFile::Parse("train-images", bytes, dimensions);
    return "no error";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

TEST(IdxFileTest, ReadsShapeAndValues) {
  const IdxFile file =
      IdxFile::Parse("f", Bytes({0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 255}), 2);
  EXPECT_THAT(file.shape, ElementsAre(2, 3));
  EXPECT_THAT(file.values, ElementsAre(1, 2, 3, 4, 5, 255));
}

TEST(IdxFileTest, NamesTheFileAndWhatIsWrong) {
  EXPECT_THAT(ErrorOf("", 1), HasSubstr("train-images is not usable: it has 0 bytes"));
  EXPECT_THAT(ErrorOf(Bytes({0, 0, 9, 1, 0, 0, 0, 1, 7}), 1), HasSubstr("unsigned bytes"));
  EXPECT_THAT(ErrorOf(Bytes({0, 0, 8, 3, 0, 0, 0, 1, 7}), 1),
              HasSubstr("3 dimensions instead of 1"));
  EXPECT_THAT(ErrorOf(Bytes({0, 0, 8, 1, 0, 0, 0, 0}), 1), HasSubstr("dimension 0 is 0"));
}

TEST(IdxFileTest, RefusesATruncatedFileAndALyingHeader) {
  EXPECT_THAT(ErrorOf(Bytes({0, 0, 8, 1, 0, 0, 0, 3, 1, 2}), 1), HasSubstr("truncated"));
  EXPECT_THAT(ErrorOf(Bytes({0, 0, 8, 1, 0, 0, 0, 1, 1, 2}), 1),
              HasSubstr("promises 1 values, and 2 follow"));
  // The product of the sizes exceeds 2^64.
  EXPECT_THAT(
      ErrorOf(Bytes({0, 0, 8, 3, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 2, 1}), 3),
      HasSubstr("truncated"));
}

TEST(IdxFileTest, AMissingFileIsNamed) {
  EXPECT_THAT([] { IdxFile::Read("/nonexistent/train-images", 3); },
              ::testing::ThrowsMessage<std::runtime_error>(
                  HasSubstr("cannot read /nonexistent/train-images: No such file")));
}

}  // namespace
}  // namespace ddp::examples
