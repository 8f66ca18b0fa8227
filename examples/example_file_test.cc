#include "examples/example_file.h"

#include <unistd.h>

#include <filesystem>
#include <stdexcept>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

using ::testing::HasSubstr;

constexpr char kFile[] = "examples/graph/make_model.py";

// The three cases share the current folder, so they are one test.
TEST(ExampleFileTest, IsFoundInTheRunfilesOrInTheCurrentFolder) {
  const std::filesystem::path here = std::filesystem::current_path();
  ASSERT_EQ(chdir("/"), 0);
  EXPECT_TRUE(std::filesystem::is_regular_file(ExampleFile(kFile, "--file")));

  EXPECT_EQ(ExampleFile("proc/version", "--file"), "proc/version");

  try {
    ExampleFile("examples/none", "--file");
    ADD_FAILURE() << "found what is not there";
  } catch (const std::runtime_error& error) {
    EXPECT_THAT(error.what(), HasSubstr("examples/none is neither in the runfiles of "));
    EXPECT_THAT(error.what(), HasSubstr(" nor in the current folder: name another with --file"));
  }
  ASSERT_EQ(chdir(here.c_str()), 0);
}

}  // namespace
