#include "launcher/error_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

namespace ddp::launcher {
namespace {

using ::testing::HasSubstr;

std::string Write(const std::string& name, const std::string& text) {
  const std::string path = ::testing::TempDir() + "/" + name;
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

TEST(ErrorFileTest, TheFormOfADescribedException) {
  const auto error = ParseErrorFile(
      R"({"message": {"message": "RuntimeError: no data", "extraInfo":
          {"py_callstack": "Traceback:\n  line 1\n", "timestamp": "1700000000"}}})");
  ASSERT_TRUE(error.ok()) << error.status();
  EXPECT_EQ(error->message, "RuntimeError: no data");
  EXPECT_EQ(error->callstack, "Traceback:\n  line 1");
  EXPECT_EQ(absl::ToUnixSeconds(error->time), 1700000000);
}

TEST(ErrorFileTest, TheShortForm) {
  const auto error = ParseErrorFile(R"({"message": "went wrong", "timestamp": 1700000000})");
  ASSERT_TRUE(error.ok()) << error.status();
  EXPECT_EQ(error->message, "went wrong");
  EXPECT_EQ(error->callstack, "");
  EXPECT_EQ(absl::ToUnixSeconds(error->time), 1700000000);
}

TEST(ErrorFileTest, ATimeThatMakesNoSenseIsNone) {
  for (const char* time : {"\"soon\"", "-5", "1e300", "null", "[]", "\"nan\"", "\"\""}) {
    const auto error =
        ParseErrorFile(std::string(R"({"message": "m", "timestamp": )") + time + "}");
    ASSERT_TRUE(error.ok()) << time;
    EXPECT_EQ(error->time, absl::InfinitePast()) << time;
  }
}

TEST(ErrorFileTest, TextCannotControlTheTerminal) {
  const auto error = ParseErrorFile("{\"message\": \"a\\u001b[2Jb\\nc\\u0007\\u0000\"}");
  ASSERT_TRUE(error.ok());
  EXPECT_EQ(error->message, "a?[2Jb\nc??");
}

TEST(ErrorFileTest, AnythingElseIsAnErrorAndHarmsNothing) {
  for (const char* text :
       {"", "{", "nonsense", "[]", "42", "\"text\"", "{}", R"({"message": 7})",
        R"({"message": null})", R"({"message": ""})", R"({"message": {"message": []}})",
        R"({"message": {"message": "m"})", "\xff\xfe", "{\"message\": \"\xff\"}"}) {
    EXPECT_FALSE(ParseErrorFile(text).ok()) << text;
  }
  EXPECT_FALSE(ParseErrorFile(std::string(500'000, '[')).ok());
  EXPECT_FALSE(ParseErrorFile(R"({"message": )" + std::string(100'000, '{')).ok());
}

TEST(ErrorFileTest, ReadsAFile) {
  const auto error = ReadErrorFile(Write("good.json", R"({"message": "m"})"));
  ASSERT_TRUE(error.ok()) << error.status();
  EXPECT_EQ(error->message, "m");
}

TEST(ErrorFileTest, NoFileAndAnEmptyOneSayThatNothingWasWritten) {
  EXPECT_TRUE(absl::IsNotFound(ReadErrorFile("/no/such/file").status()));
  EXPECT_TRUE(absl::IsNotFound(ReadErrorFile(Write("empty.json", "")).status()));
}

TEST(ErrorFileTest, HostileFilesAreRefused) {
  const auto large = ReadErrorFile(Write("large.json", std::string(kMaxErrorFileBytes + 1, ' ')));
  EXPECT_THAT(std::string(large.status().message()), HasSubstr("larger than"));
  const std::string fifo = ::testing::TempDir() + "/fifo.json";
  ::unlink(fifo.c_str());
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(ReadErrorFile(fifo).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ReadErrorFile(::testing::TempDir()).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ReadErrorFile("/dev/zero").status()));
  EXPECT_THAT(std::string(ReadErrorFile(Write("bad.json", "{")).status().message()),
              HasSubstr("bad.json: it is not JSON"));
}

}  // namespace
}  // namespace ddp::launcher
