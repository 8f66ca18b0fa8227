#include "elastic/agent/event_log.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/file_writer.h"
#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;

std::vector<nlohmann::json> ReadLines(const std::string& path) {
  std::ifstream file(path);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

class EventLogTest : public ::testing::Test {
 protected:
  EventLogTest() : path_(::testing::TempDir() + "/events-" + std::to_string(getpid()) + ".jsonl") {}
  ~EventLogTest() override { unlink(path_.c_str()); }

  EventLog Open(const std::string& run_id = "digits") {
    absl::StatusOr<EventLog> log = EventLog::Open(path_, run_id);
    EXPECT_TRUE(log.ok()) << log.status();
    return *std::move(log);
  }

  const std::string path_;
};

TEST_F(EventLogTest, WritesOneObjectPerEvent) {
  const int64_t before_ns = MonotonicNanoseconds();
  EventLog log = Open();
  log.GenerationStarted(1, {{.rank = 0, .pid = 10}, {.rank = 1, .pid = 11}});
  log.FirstStepDone(1, {.rank = 1, .step = 5, .monotonic_ns = 1234});
  log.WorkerExited(1, {.rank = 1, .pid = 11}, {.signal = SIGKILL});
  log.WorkerExited(1, {.rank = 0, .pid = 10}, {.exit_code = 3});
  log.Restarted(2, {.restart = 1, .max_restarts = 5, .reason = "rank 1 was killed by SIGKILL"});
  log.JobFinished(2, 0);

  const std::vector<nlohmann::json> lines = ReadLines(path_);
  ASSERT_EQ(lines.size(), 6u);
  EXPECT_EQ(lines[0]["event"], "generation_started");
  EXPECT_EQ(lines[0]["run_id"], "digits");
  EXPECT_EQ(lines[0]["generation"], 1);
  EXPECT_EQ(lines[0]["ranks"], nlohmann::json({0, 1}));
  EXPECT_EQ(lines[0]["pids"], nlohmann::json({10, 11}));
  EXPECT_GE(lines[0]["monotonic_ns"].get<int64_t>(), before_ns);
  EXPECT_GT(lines[0]["unix_time"].get<double>(), 1e9);
  EXPECT_EQ(lines[1]["event"], "first_step");
  EXPECT_EQ(lines[1]["monotonic_ns"], 1234);
  EXPECT_EQ(lines[1]["step"], 5);
  EXPECT_EQ(lines[2]["signal"], SIGKILL);
  EXPECT_FALSE(lines[2].contains("exit_code"));
  EXPECT_EQ(lines[3]["exit_code"], 3);
  EXPECT_FALSE(lines[3].contains("signal"));
  EXPECT_EQ(lines[4]["event"], "restart");
  EXPECT_EQ(lines[4]["generation"], 2);
  EXPECT_EQ(lines[4]["reason"], "rank 1 was killed by SIGKILL");
  EXPECT_EQ(lines[5]["exit_code"], 0);
}

TEST_F(EventLogTest, SaysWhatManyNodesNeed) {
  absl::StatusOr<EventLog> log =
      EventLog::Open({.path = path_, .console = false, .run_id = "r", .host = "a-1", .role = "t"});
  ASSERT_TRUE(log.ok()) << log.status();
  log->Joining(0, {.nodes_min = 2, .nodes_max = 3, .nproc = 4});
  log->Joined(7, {.nonce = "0123456789abcdef",
                  .group_rank = 1,
                  .nodes = 3,
                  .world_size = 12,
                  .first_rank = 4,
                  .nproc = 4,
                  .restarts = 2});
  log->WorkerHangs(7, {.rank = 5,
                       .phase = "backward",
                       .stalled_for = absl::Milliseconds(1500),
                       .longest_step = absl::Milliseconds(250),
                       .waits_for_peers = true});
  log->WorkerStraggles(7, {.rank = 5, .phase = "data", .factor = 2.5});
  log->StoreOutOfReach(7, "no answer");
  log->StoreBack(7, absl::Seconds(20));
  log->GenerationOver(7, "node a-2 was lost");
  log->Drains(7, {.reason = "node a-3 joins", .stop_at_step = 90});
  log->Evicted(7, "its lease ran out");
  log->SignalReceived(7, SIGTERM);
  log->JobFinished(7, 1, "node a-2 was lost");

  const std::vector<nlohmann::json> lines = ReadLines(path_);
  ASSERT_EQ(lines.size(), 11u);
  EXPECT_FALSE(lines[0].contains("group_rank"));
  EXPECT_EQ(lines[0]["nodes_min"], 2);
  for (size_t i = 1; i < lines.size(); ++i) {
    EXPECT_EQ(lines[i]["host"], "a-1");
    EXPECT_EQ(lines[i]["role"], "t");
    EXPECT_EQ(lines[i]["group_rank"], 1);
    EXPECT_EQ(lines[i]["generation"], 7);
  }
  EXPECT_EQ(lines[1]["nonce"], "0123456789abcdef");
  EXPECT_EQ(lines[1]["world_size"], 12);
  EXPECT_EQ(lines[1]["first_rank"], 4);
  EXPECT_EQ(lines[1]["restarts"], 2);
  EXPECT_EQ(lines[2]["stalled_s"], 1.5);
  EXPECT_EQ(lines[2]["waits_for_peers"], true);
  EXPECT_EQ(lines[3]["factor"], 2.5);
  EXPECT_EQ(lines[5]["outage_s"], 20);
  EXPECT_EQ(lines[7]["stop_at_step"], 90);
  EXPECT_EQ(lines[9]["signal"], SIGTERM);
  EXPECT_EQ(lines[10]["reason"], "node a-2 was lost");
}

TEST_F(EventLogTest, NamesEndsAsTorchrunDoes) {
  EventLog log = Open();
  log.WorkerExited(1, {.rank = 0, .pid = 10}, {.exit_code = 0});
  log.WorkerExited(1, {.rank = 1, .pid = 11}, {.signal = SIGKILL});
  log.JobFinished(1, 1);
  const std::vector<nlohmann::json> lines = ReadLines(path_);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0]["name"], "torchelastic.worker.status.SUCCEEDED");
  EXPECT_EQ(lines[0]["source"], "WORKER");
  EXPECT_EQ(lines[1]["name"], "torchelastic.worker.status.FAILED");
  EXPECT_EQ(lines[2]["name"], "torchelastic.worker.status.FAILED");
  EXPECT_EQ(lines[2]["source"], "AGENT");
}

TEST_F(EventLogTest, WritesToTheConsoleAndToAFile) {
  EventLog::Options options;
  options.path = path_;
  options.console = true;
  options.run_id = "digits";
  absl::StatusOr<EventLog> log = EventLog::Open(options);
  ASSERT_TRUE(log.ok());
  ::testing::internal::CaptureStderr();
  log->JobFinished(3, 0);
  const std::string printed = ::testing::internal::GetCapturedStderr();
  ASSERT_THAT(printed, ::testing::EndsWith("}\n"));
  const nlohmann::json line = nlohmann::json::parse(printed);
  EXPECT_EQ(line["generation"], 3);
  EXPECT_EQ(ReadLines(path_), std::vector<nlohmann::json>{line});
}

TEST_F(EventLogTest, AppendsToAnEarlierLog) {
  Open("first").JobFinished(1, 1);
  Open("second").JobFinished(1, 0);
  const std::vector<nlohmann::json> lines = ReadLines(path_);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0]["run_id"], "first");
  EXPECT_EQ(lines[1]["run_id"], "second");
}

TEST_F(EventLogTest, BytesThatAreNoTextDoNotEndTheJob) {
  EventLog log = Open("run\xff\xfe\n");
  log.Restarted(2, {.restart = 1, .max_restarts = 1, .reason = "\xc3("});
  EXPECT_EQ(ReadLines(path_).size(), 1u);
}

TEST_F(EventLogTest, WithoutAPathNothingIsWritten) {
  absl::StatusOr<EventLog> log = EventLog::Open("", "digits");
  ASSERT_TRUE(log.ok());
  EXPECT_FALSE(log->enabled());
  log->JobFinished(1, 0);
  EXPECT_NE(access(path_.c_str(), F_OK), 0);
}

TEST_F(EventLogTest, NamesTheFileThatCannotBeOpened) {
  const absl::Status status = EventLog::Open("/nonexistent/events.jsonl", "digits").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("/nonexistent/events.jsonl"));
  EXPECT_THAT(status.message(), HasSubstr("No such file"));
}

TEST_F(EventLogTest, AFullDiskEndsTheLogOnly) {
  absl::StatusOr<EventLog> log = EventLog::Open("/dev/full", "digits");
  ASSERT_TRUE(log.ok());
  ::testing::internal::CaptureStderr();
  log->JobFinished(1, 0);
  log->JobFinished(1, 0);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "ddprun: the event log /dev/full ends here: No space left on device\n");
  EXPECT_FALSE(log->enabled());
}

TEST_F(EventLogTest, TheEndOfTheLogIsToldByWhoeverTakesLines) {
  EventLog::Options options;
  options.path = "/dev/full";
  std::vector<std::string> said;
  options.say = [&](const std::string& line) { said.push_back(line); };
  absl::StatusOr<EventLog> log = EventLog::Open(options);
  ASSERT_TRUE(log.ok());
  ::testing::internal::CaptureStderr();
  log->JobFinished(1, 0);
  log->JobFinished(1, 0);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(said,
            std::vector<std::string>{"the event log /dev/full ends here: No space left on device"});
}

TEST_F(EventLogTest, LinesForTheConsoleGoToWhoeverTakesThem) {
  EventLog::Options options;
  options.console = true;
  std::vector<std::string> lines;
  options.write_to_console = [&](const std::string& line) { lines.push_back(line); };
  absl::StatusOr<EventLog> log = EventLog::Open(options);
  ASSERT_TRUE(log.ok());
  ::testing::internal::CaptureStderr();
  log->JobFinished(1, 0);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(nlohmann::json::parse(lines[0])["event"], "job_finished");
}

// A named pipe without a reader blocks like a file on a stalled mount.
TEST_F(EventLogTest, AFileThatTakesNothingCostsLinesAndNoTime) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  const UniqueFd pipe(open(path_.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
  const std::unique_ptr<EventLoop> loop = *EventLoop::Create();
  const std::unique_ptr<FileWriter> writer = *FileWriter::Create(loop.get(), "event-writer");
  EventLog::Options options;
  options.path = path_;
  options.writer = writer.get();
  std::vector<std::string> said;
  options.say = [&](const std::string& line) { said.push_back(line); };
  absl::StatusOr<EventLog> log = EventLog::Open(options);
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_TRUE(log->enabled());
  constexpr int kLines = 2000;
  for (int i = 0; i < kLines; ++i) log->GenerationOver(i, std::string(1000, 'x'));
  EXPECT_LE(writer->pending(), EventLog::kKeptBytes);
  EXPECT_GT(writer->pending(), EventLog::kKeptBytes / 2);

  // The pipe gets a reader.
  std::string text;
  std::function<void()> read_some = [&] {
    std::string bytes(65536, '\0');
    for (ssize_t n = 0; (n = read(pipe.get(), bytes.data(), bytes.size())) > 0;) {
      text.append(bytes, 0, static_cast<size_t>(n));
    }
    if (writer->pending() == 0 && !said.empty()) return loop->Stop();
    loop->AddTimer(absl::Milliseconds(1), read_some);
  };
  read_some();
  ASSERT_TRUE(loop->Run().ok());
  const auto lines = static_cast<int>(std::count(text.begin(), text.end(), '\n'));
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0], absl::StrCat("the event log ", path_, " took no lines for a while: ",
                                  kLines - lines, " of them were dropped"));
  EXPECT_EQ(nlohmann::json::parse(text.substr(0, text.find('\n')))["event"], "generation_over");
}

TEST_F(EventLogTest, AFullDiskEndsTheLogOnlyWithAWriterToo) {
  const std::unique_ptr<EventLoop> loop = *EventLoop::Create();
  const std::unique_ptr<FileWriter> writer = *FileWriter::Create(loop.get(), "event-writer");
  EventLog::Options options;
  options.path = "/dev/full";
  options.writer = writer.get();
  std::vector<std::string> said;
  options.say = [&](const std::string& line) {
    said.push_back(line);
    loop->Stop();
  };
  absl::StatusOr<EventLog> log = EventLog::Open(options);
  ASSERT_TRUE(log.ok());
  log->JobFinished(1, 0);
  ASSERT_TRUE(loop->Run().ok());
  log->JobFinished(1, 0);
  EXPECT_EQ(writer->pending(), 0u);
  EXPECT_EQ(said,
            std::vector<std::string>{"the event log /dev/full ends here: No space left on device"});
}

}  // namespace
}  // namespace ddp::elastic
