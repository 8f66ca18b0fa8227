#include "elastic/error_file/error_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Write(const std::string& name, const std::string& text) {
  const std::string path = ::testing::TempDir() + "/" + name;
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

TEST(ErrorRecordTest, TheFormOfADescribedException) {
  const auto error = ParseErrorRecord(
      R"({"message": {"message": "RuntimeError: no data", "extraInfo":
          {"py_callstack": "Traceback:\n  line 1\n", "timestamp": "1700000000"}}})");
  ASSERT_TRUE(error.ok()) << error.status();
  EXPECT_EQ(error->message, "RuntimeError: no data");
  EXPECT_EQ(error->callstack, "Traceback:\n  line 1");
  EXPECT_EQ(absl::ToUnixSeconds(error->time), 1700000000);
}

TEST(ErrorRecordTest, TheShortForm) {
  const auto error = ParseErrorRecord(R"({"message": "went wrong", "timestamp": 1700000000})");
  ASSERT_TRUE(error.ok()) << error.status();
  EXPECT_EQ(error->message, "went wrong");
  EXPECT_EQ(error->callstack, "");
  EXPECT_EQ(absl::ToUnixSeconds(error->time), 1700000000);
}

TEST(ErrorRecordTest, TheCallStackOfEitherForm) {
  const auto error = ParseErrorRecord(
      R"({"message": "went wrong", "timestamp": 60,
          "extraInfo": {"py_callstack": ["Traceback:\n", "  line 1"], "timestamp": 70}})");
  ASSERT_TRUE(error.ok()) << error.status();
  EXPECT_EQ(error->message, "went wrong");
  EXPECT_EQ(error->callstack, "Traceback:\n  line 1");
  EXPECT_EQ(absl::ToUnixSeconds(error->time), 60);
  const auto nameless = ParseErrorRecord(
      R"({"message": {"extraInfo": {"py_callstack": "Traceback:\n  line 1\nKeyError: 'k'\n"}}})");
  ASSERT_TRUE(nameless.ok()) << nameless.status();
  EXPECT_EQ(nameless->message, "KeyError: 'k'");
}

TEST(ErrorRecordTest, ATimeThatMakesNoSenseIsNone) {
  for (const char* time : {"\"soon\"", "-5", "1e300", "null", "[]", "\"nan\"", "\"\""}) {
    const auto error =
        ParseErrorRecord(std::string(R"({"message": "m", "timestamp": )") + time + "}");
    ASSERT_TRUE(error.ok()) << time;
    EXPECT_EQ(error->time, absl::InfinitePast()) << time;
  }
}

TEST(ErrorRecordTest, TextCannotControlTheTerminal) {
  const auto error = ParseErrorRecord("{\"message\": \"a\\u001b[2Jb\\nc\\u0007\\u0000\"}");
  ASSERT_TRUE(error.ok());
  EXPECT_EQ(error->message, "a?[2Jb\nc??");
  // U+009B begins an escape sequence, as ESC [ does. Other two-byte characters stay.
  const auto wide = ParseErrorRecord("{\"message\": \"a\\u009b2J\\u0080\\u009f\\u00a0\\u00e9\"}");
  ASSERT_TRUE(wide.ok());
  EXPECT_EQ(wide->message, "a?2J??\u00a0\u00e9");
}

ErrorRecord Parsed(const std::string& text) {
  const absl::StatusOr<ErrorRecord> record = ParseErrorRecord(text);
  EXPECT_TRUE(record.ok()) << record.status();
  return record.ok() ? *record : ErrorRecord{};
}

TEST(ErrorRecordTest, WhatIsFormattedIsParsed) {
  const ErrorRecord record = {.message = "Bug: \"x\" is \\ gone",
                              .callstack = "a\nb",
                              .time = absl::FromUnixSeconds(1'700'000'000),
                              .is_victim = true};
  const ErrorRecord again = Parsed(FormatErrorRecord(record));
  EXPECT_EQ(again.message, record.message);
  EXPECT_EQ(again.callstack, record.callstack);
  EXPECT_EQ(again.time, record.time);
  EXPECT_TRUE(again.is_victim);
  EXPECT_THAT(FormatErrorRecord({.message = "m", .time = record.time}), Not(HasSubstr("victim")));
  EXPECT_TRUE(ParseErrorRecord(FormatErrorRecord({.message = "\xff", .time = record.time})).ok());
}

TEST(ErrorRecordTest, ACauseThatSoundsLikeAVictimStaysACause) {
  const ErrorRecord record = {.message = "gloo/pair.cc: Connection closed by peer",
                              .time = absl::FromUnixSeconds(1'700'000'000)};
  EXPECT_FALSE(Parsed(FormatErrorRecord(record)).is_victim);
}

TEST(ErrorRecordTest, AProgramSaysThatItIsAVictim) {
  const auto with = [](const std::string& message, const std::string& extra) {
    return Parsed(R"({"message": {"message": ")" + message + R"(", "extraInfo": {)" + extra +
                  "}}}");
  };
  EXPECT_TRUE(with("anything", R"("victim": true)").is_victim);
  EXPECT_FALSE(with("anything", R"("victim": "yes")").is_victim);
  EXPECT_FALSE(with("anything", "").is_victim);
  const std::string gloo = "RuntimeError: [gloo/transport/tcp/pair.cc:1] Connection reset by peer";
  EXPECT_TRUE(with(gloo, "").is_victim);
  EXPECT_FALSE(with(gloo, R"("victim": false)").is_victim);
  EXPECT_TRUE(Parsed(R"({"message": ")" + gloo + R"("})").is_victim);
}

// LibTorch's own texts.
TEST(ErrorRecordTest, AProgramThatDoesNotSayItSoundsLikeAVictim) {
  for (const char* message :
       {"RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection "
        "closed by peer [127.0.0.1]:63136",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Read error "
        "[127.0.0.1]:28086: Connection reset by peer",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/buffer.cc:72] Timed out waiting "
        "10000ms for recv operation to complete",
        "RuntimeError: Gloo connectFullMesh failed with [..] no error",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, remote process "
        "exited or there was a network error, NCCL version 2.21.5",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely "
        "closed. Did the remote server shutdown or crash?"}) {
    EXPECT_TRUE(SoundsLikeVictim(message)) << message;
  }
}

TEST(ErrorRecordTest, ALostConnectionToAnythingElseIsACause) {
  for (const char* message :
       {"ConnectionResetError: [Errno 104] Connection reset by peer",
        "URLError: <urlopen error [Errno 111] Connection refused>", "BrokenPipeError: Broken pipe",
        "RuntimeError: Timed out waiting for the loader", "ValueError: my own bug", ""}) {
    EXPECT_FALSE(SoundsLikeVictim(message)) << message;
  }
}

TEST(ErrorRecordTest, AnythingElseIsAnErrorAndHarmsNothing) {
  for (const char* text :
       {"", "{", "nonsense", "[]", "42", "\"text\"", "{}", R"({"message": 7})",
        R"({"message": null})", R"({"message": ""})", R"({"message": {"message": []}})",
        R"({"message": {"message": "m"})", "\xff\xfe", "{\"message\": \"\xff\"}"}) {
    EXPECT_FALSE(ParseErrorRecord(text).ok()) << text;
  }
  EXPECT_FALSE(ParseErrorRecord(std::string(500'000, '[')).ok());
  EXPECT_FALSE(ParseErrorRecord(R"({"message": )" + std::string(100'000, '{')).ok());
}

TEST(ErrorRecordTest, ReadsAFile) {
  const auto error = ReadErrorRecord(Write("good.json", R"({"message": "m"})"));
  ASSERT_TRUE(error.ok()) << error.status();
  EXPECT_EQ(error->message, "m");
}

TEST(ErrorRecordTest, NoFileAndAnEmptyOneSayThatNothingWasWritten) {
  EXPECT_TRUE(absl::IsNotFound(ReadErrorRecord("/no/such/file").status()));
  EXPECT_TRUE(absl::IsNotFound(ReadErrorRecord(Write("empty.json", "")).status()));
}

TEST(ErrorRecordTest, HostileFilesAreRefused) {
  const auto large =
      ReadErrorRecord(Write("large.json", std::string(kMaxErrorRecordBytes + 1, ' ')));
  EXPECT_THAT(std::string(large.status().message()), HasSubstr("larger than"));
  const std::string fifo = ::testing::TempDir() + "/fifo.json";
  ::unlink(fifo.c_str());
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(ReadErrorRecord(fifo).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ReadErrorRecord(::testing::TempDir()).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ReadErrorRecord("/dev/zero").status()));
  EXPECT_THAT(std::string(ReadErrorRecord(Write("bad.json", "{")).status().message()),
              HasSubstr("bad.json: it is not JSON"));
}

}  // namespace
}  // namespace ddp::elastic
