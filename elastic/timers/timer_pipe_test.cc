#include "elastic/timers/timer_pipe.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "elastic/timers/worker_timers.h"
#include "testing/fake_clock.h"
#include "testing/temporary_folder.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr absl::Duration kLong = absl::Seconds(60);
constexpr int kOwnRank = 3;

class TimerPipeTest : public ::testing::Test {
 protected:
  // The pipe's callbacks use members that are declared after the pipe.
  ~TimerPipeTest() override { pipe_.reset(); }

  absl::Status Open() {
    auto pipe = TryOpen();
    if (pipe.ok()) pipe_ = *std::move(pipe);
    return pipe.status();
  }

  absl::StatusOr<std::unique_ptr<TimerPipe>> TryOpen() {
    return TimerPipe::Open(path_,
                           {.event_loop = loop_.get(),
                            .clock = clock_,
                            .find_worker = [this](pid_t pid) -> std::optional<int> {
                              if (looks_before_start_-- > 0) return std::nullopt;
                              if (pid == ::getpid()) return kOwnRank;
                              return std::nullopt;
                            },
                            .on_expired =
                                [this](const WorkerTimers::Expired& expired) {
                                  expired_.push_back(absl::StrCat(
                                      expired.local_rank, " ", expired.scope, " ", expired.signal));
                                  loop_->Stop();
                                },
                            .say =
                                [this](const std::string& line) {
                                  lines_.push_back(line);
                                  if (stops_when_told_) loop_->Stop();
                                }});
  }

  // Writes like a worker: opens, writes a line, closes.
  void Write(const std::string& line) const {
    const UniqueFd fd(::open(path_.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
    ASSERT_TRUE(fd.valid());
    const std::string text = line + "\n";
    ASSERT_EQ(::write(fd.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }

  void Set(const std::string& scope, absl::Duration timeout, pid_t pid = ::getpid()) const {
    const double expiration = absl::ToDoubleSeconds(absl::Now() + timeout - absl::UnixEpoch());
    Write(absl::StrCat("{\"version\": 1, \"pid\": ", pid, ", \"scope_id\": \"", scope,
                       "\", \"expiration_time\": ", absl::StrFormat("%.6f", expiration),
                       ", \"signal\": 9}"));
  }

  void Release(const std::string& scope) const {
    Write(absl::StrCat("{\"version\": 1, \"pid\": ", ::getpid(), ", \"scope_id\": \"", scope,
                       "\", \"expiration_time\": -1, \"signal\": 0}"));
  }

  void RunUntilOneExpires() {
    const EventLoop::TimerId deadline = loop_->AddTimer(kLong, [this] { loop_->Stop(); });
    ASSERT_TRUE(loop_->Run().ok());
    loop_->CancelTimer(deadline);
  }

  const testing::TemporaryFolder folder_;
  const std::string path_ = folder_.path() + "/timers";
  const MonotonicClock real_clock_{};
  const Clock* clock_ = &real_clock_;
  const std::unique_ptr<EventLoop> loop_ = *EventLoop::Create();
  std::unique_ptr<TimerPipe> pipe_;
  std::vector<std::string> expired_;
  std::vector<std::string> lines_;
  bool stops_when_told_ = false;
  int looks_before_start_ = 0;  // that find no worker
};

TEST_F(TimerPipeTest, ATimerRunsOut) {
  ASSERT_TRUE(Open().ok());
  Set("released", absl::ZeroDuration());
  Release("released");
  Set("long", absl::Hours(1));
  Set("short", absl::Milliseconds(10));
  RunUntilOneExpires();
  EXPECT_THAT(expired_, ElementsAre("3 short 9"));
  EXPECT_THAT(lines_, SizeIs(0));
}

// A quick worker sets a timer before the agent has read that its program was started.
TEST_F(TimerPipeTest, ARequestMayComeBeforeItsWorkerIsKnown) {
  ASSERT_TRUE(Open().ok());
  looks_before_start_ = 6;
  Set("released", absl::ZeroDuration());
  Release("released");
  Set("load", absl::ZeroDuration());
  RunUntilOneExpires();
  EXPECT_THAT(expired_, ElementsAre("3 load 9"));
}

TEST_F(TimerPipeTest, TimersOfOthersAndNonsenseAreVoid) {
  ASSERT_TRUE(Open().ok());
  Set("of init", absl::ZeroDuration(), 1);
  for (int i = 0; i < 20; ++i) Write("nonsense");
  Write(std::string(10'000, 'x'));
  Set("ours", absl::ZeroDuration());
  RunUntilOneExpires();
  EXPECT_THAT(expired_, ElementsAre("3 ours 9"));
  EXPECT_THAT(lines_, SizeIs(5)) << "and no more";
  EXPECT_THAT(lines_[0], HasSubstr(path_ + ": a timer request with no JSON object"));
}

TEST_F(TimerPipeTest, AWorkerThatHasEndedIsNotKilled) {
  ddp::testing::FakeClock clock;
  clock_ = &clock;
  ASSERT_TRUE(Open().ok());
  Set("of the ended", absl::Hours(1));
  Write("nonsense");
  stops_when_told_ = true;
  RunUntilOneExpires();
  ASSERT_THAT(lines_, SizeIs(1)) << "all was read";
  ASSERT_THAT(expired_, SizeIs(0));
  pipe_->Forget(kOwnRank);
  clock.Advance(absl::Hours(2));
  Set("of the next", absl::ZeroDuration());
  RunUntilOneExpires();
  EXPECT_THAT(expired_, ElementsAre("3 of the next 9"));
  pipe_.reset();  // the pipe uses the clock, so it goes first
}

TEST_F(TimerPipeTest, AnEarlierJobsPipeIsReplacedAndOursIsRemoved) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  ASSERT_TRUE(Open().ok());
  struct stat info {};
  ASSERT_EQ(::lstat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  pipe_.reset();
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(TimerPipeTest, APipeThatAnotherServesIsLeftToIt) {
  ASSERT_TRUE(Open().ok());
  const absl::Status second = TryOpen().status();
  EXPECT_TRUE(absl::IsAlreadyExists(second)) << second;
  EXPECT_THAT(std::string(second.message()),
              HasSubstr("TORCHELASTIC_TIMER_FILE=" + path_ + ": another ddprun serves it"));
  Set("ours", absl::ZeroDuration());
  RunUntilOneExpires();
  EXPECT_THAT(expired_, ElementsAre("3 ours 9"));
}

TEST_F(TimerPipeTest, AnothersPipeInPlaceOfOursIsNotRemoved) {
  ASSERT_TRUE(Open().ok());
  ASSERT_EQ(::unlink(path_.c_str()), 0);
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  pipe_.reset();
  EXPECT_TRUE(std::filesystem::exists(path_));
}

TEST_F(TimerPipeTest, AFileOfTheUsersIsLeftAlone) {
  std::ofstream(path_) << "precious";
  const absl::Status status = Open();
  EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("TORCHELASTIC_TIMER_FILE=" + path_));
  EXPECT_EQ(std::filesystem::file_size(path_), 8U);
}

}  // namespace
}  // namespace ddp::elastic
