// Tests of the real ddprun while its environment stalls: a console without a reader, a file or a
// program on a mount that has stalled. The agent continues.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "launcher/end_to_end/ddprun_case.h"
#include "launcher/end_to_end/ddprun_driver.h"
#include "testing/network/loopback_client.h"
#include "testing/stalled_file.h"

namespace ddp::launcher {
namespace {

using ::testing::HasSubstr;

constexpr int kLookMs = 5;

bool AwaitFile(const std::string& path) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + DdprunDriver::kDeadline;
  while (!std::filesystem::exists(path)) {
    if (clock.Now() >= deadline) return false;
    ::poll(nullptr, 0, kLookMs);
  }
  return true;
}

// Writes to `fd` until no more fits.
void Fill(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  ASSERT_EQ(::fcntl(fd, F_SETFL, flags | O_NONBLOCK), 0);
  for (const size_t size : {size_t{65536}, size_t{1}}) {
    const std::string text(size, '#');
    while (::write(fd, text.data(), text.size()) > 0) {
    }
  }
  ASSERT_EQ(::fcntl(fd, F_SETFL, flags), 0);
}

std::string ReadWhatIsThere(int fd) {
  std::string text;
  std::array<char, 65536> buffer;
  pollfd polled{.fd = fd, .events = POLLIN, .revents = 0};
  while (::poll(&polled, 1, 0) == 1 && (polled.revents & POLLIN) != 0) {
    const ssize_t count = ::read(fd, buffer.data(), buffer.size());
    if (count <= 0) break;
    text.append(buffer.data(), static_cast<size_t>(count));
  }
  return text;
}

// Returns a script that fails the first time, and prints a line at each start.
std::string FailOnce(const Folder& folder) {
  return absl::StrCat("touch ", folder / "started$TORCHELASTIC_RESTART_COUNT", "; exit $((1-",
                      "TORCHELASTIC_RESTART_COUNT))");
}

TEST(DdprunStallTest, EventsForAConsoleThatNobodyReadsStopNothing) {
  const Folder folder;
  std::array<int, 2> fds{};
  ASSERT_EQ(::pipe2(fds.data(), O_CLOEXEC), 0);
  const UniqueFd read_end(fds[0]);
  UniqueFd write_end(fds[1]);
  Fill(write_end.get());
  DdprunDriver run(
      {.arguments = Shell({"--standalone", "--max-restarts=1", "--event-log-handler=console",
                           absl::StrCat("--log-dir=", folder / "logs")},
                          FailOnce(folder)),
       .environment = {},
       .stderr_fd = write_end.get()});
  write_end.reset();
  EXPECT_TRUE(AwaitFile(folder / "started0"));
  EXPECT_TRUE(AwaitFile(folder / "started1"));
  // The end of the job waits for a reader, and no output is lost.
  std::string text;
  pollfd polled{.fd = read_end.get(), .events = POLLIN, .revents = 0};
  while (text.find("job_finished") == std::string::npos && ::poll(&polled, 1, 60'000) == 1 &&
         (polled.revents & POLLIN) != 0) {
    text += ReadWhatIsThere(read_end.get());
  }
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_THAT(text, HasSubstr("\"event\":\"restart\""));
  EXPECT_THAT(text, HasSubstr("\"event\":\"job_finished\""));
}

// A run with stderr teed to a temporary folder, of which ddprun speaks at the end. Nobody reads
// its stderr, which is full from the start.
class UnreadStderrTest : public ::testing::Test {
 protected:
  UnreadStderrTest() {
    std::array<int, 2> fds{};
    EXPECT_EQ(::pipe2(fds.data(), O_CLOEXEC), 0);
    unread_.reset(fds[0]);
    const UniqueFd full(fds[1]);
    Fill(full.get());
    run_ = std::make_unique<DdprunDriver>(DdprunDriver::Options{
        .arguments =
            Shell({"--standalone", "-t2"}, "echo to be read >&2; echo ready; exec sleep 1000"),
        .stderr_fd = full.get()});
    run_->AwaitStdout("ready");
  }

  UniqueFd unread_;
  std::unique_ptr<DdprunDriver> run_;
};

TEST_F(UnreadStderrTest, ASignalEndsDdprun) {
  ::kill(run_->pid(), SIGINT);
  EXPECT_EQ(run_->Wait(), 1);
}

TEST_F(UnreadStderrTest, SigkillOfTheKeeperEndsTheAgent) {
  const HeldProcess agent(run_->AgentPid());
  ::kill(run_->pid(), SIGKILL);
  EXPECT_EQ(run_->Wait(), -SIGKILL);
  EXPECT_TRUE(agent.AwaitEnd(MonotonicClock().Now() + DdprunDriver::kDeadline));
}

TEST(DdprunStallTest, AnEventLogThatTakesNothingStopsNothing) {
  const Folder folder;
  const std::string log = folder / "events.jsonl";
  ASSERT_EQ(::mkfifo(log.c_str(), 0600), 0);
  const UniqueFd pipe(::open(log.c_str(), O_RDWR | O_CLOEXEC));
  Fill(pipe.get());
  DdprunDriver run({.arguments = Shell({"--standalone", "--max-restarts=1",
                                        absl::StrCat("--event-log-file=", log)},
                                       FailOnce(folder))});
  run.AwaitStderr("restart 1 of 1");
  EXPECT_TRUE(AwaitFile(folder / "started1"));
  std::string text;
  pollfd polled{.fd = pipe.get(), .events = POLLIN, .revents = 0};
  while (text.find("job_finished") == std::string::npos && ::poll(&polled, 1, 60'000) == 1) {
    text += ReadWhatIsThere(pipe.get());
  }
  EXPECT_EQ(run.Wait(), 0);
}

TEST(DdprunStallTest, AProgramOnAStalledMountHoldsUpItsWorkerOnly) {
  const Folder folder;
  const std::string program = folder / "program";
  std::ofstream(program) << "#!/bin/sh\nexit 0\n";
  ASSERT_EQ(::chmod(program.c_str(), 0755), 0);
  ::ddp::testing::StalledFile stalled(program);
  if (!stalled.stalls()) GTEST_SKIP() << "no leases on this file system";
  DdprunDriver run({.arguments = {"--standalone", "--no-python", "--nproc-per-node=2",
                                  "--metrics-port=0", program}});
  const std::string announced = "metrics are served on port ";
  run.AwaitStderr(announced);
  const size_t at = run.err().find(announced) + announced.size();
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(run.err().substr(at, run.err().find('\n', at) - at), &port));
  // The first worker is stuck in exec once it has a session of its own.
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + DdprunDriver::kDeadline;
  std::string text;
  while (text.find("state=\"running\"} 1") == std::string::npos && clock.Now() < deadline) {
    const UniqueFd socket = ::ddp::testing::DialLoopback(port);
    ::ddp::testing::SendText(socket, "GET /metrics HTTP/1.1\r\n\r\n");
    text = ::ddp::testing::ReceiveText(socket);
    if (text.find("running") != std::string::npos) break;
    ::poll(nullptr, 0, kLookMs);
  }
  EXPECT_THAT(text, HasSubstr("running"));
  stalled.Release();
  EXPECT_EQ(run.Wait(), 0);
}

}  // namespace
}  // namespace ddp::launcher
