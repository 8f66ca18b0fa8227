// Length: all cases share the fixture with its pipes and its console.
#include "launcher/output/log_router.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file_writer.h"

namespace ddp::launcher {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(60);

struct Pipe {
  Pipe() {
    std::array<int, 2> fds{};
    EXPECT_EQ(::pipe2(fds.data(), O_CLOEXEC), 0);
    read.reset(fds[0]);
    write.reset(fds[1]);
  }
  UniqueFd read, write;
};

void WriteAll(int fd, const std::string& text) {
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t count = ::write(fd, text.data() + written, text.size() - written);
    ASSERT_GT(count, 0);
    written += static_cast<size_t>(count);
  }
}

std::string ReadToEnd(int fd) {
  std::string text;
  std::array<char, 65536> buffer;
  for (ssize_t count = 0; (count = ::read(fd, buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<size_t>(count));
  }
  return text;
}

std::string Slurp(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

class LogRouterTest : public ::testing::Test {
 protected:
  LogRouterTest() : loop_(*EventLoop::Create()) {}

  static LogRouter::Stream MakeStream(Pipe& pipe, const std::string& prefix,
                                      const std::string& path = "") {
    LogRouter::Stream stream;
    stream.pipe = std::move(pipe.read);
    stream.prefix = prefix;
    stream.file_path = path;
    if (!path.empty()) {
      stream.file.reset(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    }
    return stream;
  }

  // Returns what the router has written to the console so far.
  static std::string Available(int fd) {
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

  // Runs the loop until the console has got `text`, counted from the beginning of the test.
  void AwaitConsole(const std::string& text) {
    const auto look = [this, &text](uint32_t /*events*/) {
      seen_ += Available(console_.read.get());
      if (seen_.size() >= text.size()) loop_->Stop();
    };
    seen_ += Available(console_.read.get());
    if (seen_.size() < text.size()) {
      const auto deadline = loop_->AddTimer(kDeadline, [this] { loop_->Stop(); });
      EXPECT_TRUE(loop_->Watch(console_.read.get(), EPOLLIN, look).ok());
      EXPECT_TRUE(loop_->Run().ok());
      loop_->Unwatch(console_.read.get());
      loop_->CancelTimer(deadline);
    }
    EXPECT_EQ(seen_, text);
  }

  std::unique_ptr<EventLoop> loop_;
  Pipe console_;
  std::string seen_;
};

TEST_F(LogRouterTest, WholeLinesBehindThePrefixAndEveryByteInTheFile) {
  LogRouter router(loop_.get(), console_.write.get(), console_.write.get());
  Pipe pipe;
  const std::string path = ::testing::TempDir() + "/whole.log";
  const auto id = router.AddStream(MakeStream(pipe, "[r0]:", path));
  ASSERT_TRUE(id.ok());
  WriteAll(pipe.write.get(), "one\ntw");
  router.DrainStream(*id);
  EXPECT_EQ(Available(console_.read.get()), "[r0]:one\n");
  EXPECT_EQ(Slurp(path), "one\ntw");
  WriteAll(pipe.write.get(), "o\n\nlast");
  router.DrainStream(*id);
  EXPECT_EQ(Available(console_.read.get()), "[r0]:two\n[r0]:\n");
  router.CloseStream(*id);
  EXPECT_EQ(Available(console_.read.get()), "[r0]:last\n");
  EXPECT_EQ(Slurp(path), "one\ntwo\n\nlast");
}

TEST_F(LogRouterTest, TheEndOfTheStreamEndsTheLastLine) {
  LogRouter router(loop_.get(), console_.write.get(), console_.write.get());
  Pipe pipe;
  const auto id = router.AddStream(MakeStream(pipe, "[r0]:"));
  WriteAll(pipe.write.get(), "no newline");
  pipe.write.reset();
  router.DrainStream(*id);
  EXPECT_EQ(Available(console_.read.get()), "[r0]:no newline\n");
  router.DrainStream(*id);  // the worker has ended
  router.CloseStream(*id);
  EXPECT_EQ(Available(console_.read.get()), "");
}

TEST_F(LogRouterTest, StdoutAndStderrAreKeptApart) {
  Pipe error_console;
  LogRouter router(loop_.get(), console_.write.get(), error_console.write.get());
  Pipe out;
  Pipe err;
  const auto out_id = router.AddStream(MakeStream(out, "[r0]:"));
  LogRouter::Stream stream = MakeStream(err, "[r0]:");
  stream.to_stderr = true;
  const auto err_id = router.AddStream(std::move(stream));
  WriteAll(out.write.get(), "out\n");
  WriteAll(err.write.get(), "err\n");
  router.DrainStream(*out_id);
  router.DrainStream(*err_id);
  EXPECT_EQ(Available(console_.read.get()), "[r0]:out\n");
  EXPECT_EQ(Available(error_console.read.get()), "[r0]:err\n");
}

TEST_F(LogRouterTest, AnEndlessLineIsCutOnTheConsole) {
  const std::string console_path = ::testing::TempDir() + "/endless.console";
  const UniqueFd console(::open(console_path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600));
  LogRouter router(loop_.get(), console.get(), console.get());
  Pipe pipe;
  const std::string path = ::testing::TempDir() + "/endless.log";
  const auto id = router.AddStream(MakeStream(pipe, "[r0]:", path));
  const std::string line = std::string(LogRouter::kMaxLineBytes + 10, 'x') + "\n";
  for (size_t at = 0; at < line.size(); at += 32768) {
    WriteAll(pipe.write.get(), line.substr(at, 32768));
    router.DrainStream(*id);
  }
  EXPECT_EQ(Slurp(path), line);
  EXPECT_EQ(Slurp(console_path), absl::StrCat("[r0]:", std::string(LogRouter::kMaxLineBytes, 'x'),
                                              "\n[r0]:", std::string(10, 'x'), "\n"));
}

// A prompt has no newline; the answer to it, and what follows, stand on its line.
TEST_F(LogRouterTest, AnIncompleteLineIsShownAndGoesOnWithoutASecondPrefix) {
  LogRouter router(loop_.get(), console_.write.get(), console_.write.get());
  Pipe pipe;
  Pipe other;
  const auto id = router.AddStream(MakeStream(pipe, "[r0]:", "/dev/null"));
  const auto other_id = router.AddStream(MakeStream(other, "[r1]:", "/dev/null"));
  WriteAll(pipe.write.get(), "go on? ");
  AwaitConsole("[r0]:go on? ");
  WriteAll(pipe.write.get(), "yes\n(Pdb) ");
  AwaitConsole("[r0]:go on? yes\n[r0]:(Pdb) ");
  WriteAll(other.write.get(), "step 1\n");
  router.DrainStream(*other_id);
  router.Say("a word");
  WriteAll(pipe.write.get(), "quit\n");
  router.CloseStream(*id);
  AwaitConsole("[r0]:go on? yes\n[r0]:(Pdb) \n[r1]:step 1\nddprun: a word\n[r0]:quit\n");
}

// A buffered writer's block ends where it ends.
TEST_F(LogRouterTest, TheEndOfABlockIsNoPrompt) {
  LogRouter router(loop_.get(), console_.write.get(), console_.write.get());
  Pipe pipe;
  Pipe other;
  const auto id = router.AddStream(MakeStream(pipe, "[r0]:", "/dev/null"));
  const auto other_id = router.AddStream(MakeStream(other, "[r1]:", "/dev/null"));
  WriteAll(pipe.write.get(), std::string(4096, 'x'));
  router.DrainStream(*id);
  WriteAll(other.write.get(), "go on? ");  // comes later, and is shown
  AwaitConsole("[r1]:go on? ");
  router.CloseStream(*other_id);
  WriteAll(pipe.write.get(), "y\n");
  router.CloseStream(*id);
  AwaitConsole("[r1]:go on? \n[r0]:" + std::string(4096, 'x') + "y\n");
}

TEST_F(LogRouterTest, AProgressBarIsShownAtEachCarriageReturn) {
  LogRouter router(loop_.get(), console_.write.get(), console_.write.get());
  Pipe pipe;
  const auto id = router.AddStream(MakeStream(pipe, "[r0]:", "/dev/null"));
  WriteAll(pipe.write.get(), "10%\r20%\r");
  AwaitConsole("[r0]:10%\r[r0]:20%\r");
  WriteAll(pipe.write.get(), "\nfrom Windows\r\n99%\r100%");
  router.CloseStream(*id);
  AwaitConsole("[r0]:10%\r[r0]:20%\r\n[r0]:from Windows\r\n[r0]:99%\r[r0]:100%\n");
}

TEST_F(LogRouterTest, AConsoleThatIsGoneLosesNothingElse) {
  ::signal(SIGPIPE, SIG_IGN);
  LogRouter router(loop_.get(), console_.write.get(), console_.write.get());
  Pipe pipe;
  const std::string path = ::testing::TempDir() + "/gone.log";
  const auto id = router.AddStream(MakeStream(pipe, "[r0]:", path));
  console_.read.reset();
  WriteAll(pipe.write.get(), "one\n");
  router.DrainStream(*id);
  WriteAll(pipe.write.get(), "two\n");
  router.CloseStream(*id);
  router.Flush({.stall_timeout = kDeadline});
  EXPECT_EQ(Slurp(path), "one\ntwo\n");
}

// Checks that `output` holds lines 0 .. count - 1 of every writer, whole and in order.
void ExpectAllLines(const std::string& output, int writers, int count) {
  std::vector<int> next(static_cast<size_t>(writers), 0);
  std::vector<std::string> lines = absl::StrSplit(output, '\n');
  ASSERT_FALSE(lines.empty());
  EXPECT_EQ(lines.back(), "");
  lines.pop_back();
  for (const std::string& line : lines) {
    int writer = -1;
    int repeated = -1;
    int number = -1;
    int length = 0;
    ASSERT_EQ(std::sscanf(line.c_str(), "[r%d]:%d line %d of many%n", &writer, &repeated, &number,
                          &length),
              3)
        << line;
    ASSERT_EQ(static_cast<size_t>(length), line.size()) << line;
    ASSERT_EQ(writer, repeated) << line;
    ASSERT_EQ(number, next.at(static_cast<size_t>(writer))++) << line;
  }
  for (const int seen : next) EXPECT_EQ(seen, count);
}

struct BusyWriters {
  static constexpr int kWriters = 8;
  static constexpr int kLines = 20'000;

  // Writes in pieces that end anywhere, as busy programs do.
  static void Write(int writer, int fd) {
    std::string text;
    for (int i = 0; i < kLines; ++i) {
      absl::StrAppend(&text, writer, " line ", i, " of many\n");
    }
    const size_t piece = 1000 + 777 * static_cast<size_t>(writer);
    for (size_t at = 0; at < text.size(); at += piece) WriteAll(fd, text.substr(at, piece));
  }
};

// Runs busy writers against a console that is `console_fd` for the router and read from `read_fd`.
std::string RunBusyWriters(EventLoop* loop, int console_fd, UniqueFd* console_owner, int read_fd) {
  std::string output;
  std::thread reader([&] { output = ReadToEnd(read_fd); });
  {
    LogRouter router(loop, console_fd, console_fd, /*writer=*/nullptr,
                     /*partial_line_delay=*/absl::InfiniteDuration());
    std::vector<std::thread> writers;
    std::vector<LogRouter::StreamId> ids;
    for (int i = 0; i < BusyWriters::kWriters; ++i) {
      Pipe pipe;
      LogRouter::Stream stream;
      stream.prefix = absl::StrCat("[r", i, "]:");
      stream.pipe = std::move(pipe.read);
      ids.push_back(*router.AddStream(std::move(stream)));
      writers.emplace_back([i, fd = std::move(pipe.write)] { BusyWriters::Write(i, fd.get()); });
    }
    // The end of all writers wakes the loop; the loop has a deadline.
    Pipe done;
    std::thread waiter([&] {
      for (std::thread& writer : writers) writer.join();
      done.write.reset();
    });
    EXPECT_TRUE(loop->Watch(done.read.get(), POLLIN, [&](uint32_t) { loop->Stop(); }).ok());
    const auto timer = loop->AddTimer(kDeadline, [&] {
      ADD_FAILURE() << "the writers did not end";
      loop->Stop();
    });
    EXPECT_TRUE(loop->Run().ok());
    loop->CancelTimer(timer);
    loop->Unwatch(done.read.get());
    waiter.join();
    for (const auto id : ids) router.CloseStream(id);
    router.Flush({.stall_timeout = kDeadline});
  }
  console_owner->reset();
  reader.join();
  return output;
}

TEST_F(LogRouterTest, BusyWritersLoseNoLineThroughAPipe) {
  const int fd = console_.write.get();
  ExpectAllLines(RunBusyWriters(loop_.get(), fd, &console_.write, console_.read.get()),
                 BusyWriters::kWriters, BusyWriters::kLines);
}

TEST_F(LogRouterTest, BusyWritersLoseNoLineThroughASocket) {
  std::array<int, 2> fds{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()), 0);
  const UniqueFd read(fds[0]);
  UniqueFd write(fds[1]);
  const int fd = write.get();
  ExpectAllLines(RunBusyWriters(loop_.get(), fd, &write, read.get()), BusyWriters::kWriters,
                 BusyWriters::kLines);
}

TEST_F(LogRouterTest, AConsoleThatNobodyReadsMakesWritersWaitAndNotTheLoop) {
  auto router =
      std::make_unique<LogRouter>(loop_.get(), console_.write.get(), console_.write.get());
  Pipe pipe;
  const int writer_fd = pipe.write.get();
  ASSERT_EQ(::fcntl(writer_fd, F_SETFL, O_NONBLOCK), 0);
  const auto id = router->AddStream(MakeStream(pipe, "[r0]:"));
  // Fills the pipe until no more fits for a whole round of the loop: the router has stopped
  // reading.
  const std::string text(1000, 'x');
  size_t accepted = 0;
  size_t last = 1;
  std::function<void()> feed = [&] {
    if (accepted == last) {
      loop_->Stop();
      return;
    }
    last = accepted;
    for (ssize_t n = 0; (n = ::write(writer_fd, (text + "\n").data(), text.size() + 1)) > 0;) {
      accepted += static_cast<size_t>(n);
    }
    loop_->AddTimer(absl::Milliseconds(5), feed);
  };
  feed();
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_GE(accepted, Console::kFullBytes);
  EXPECT_LE(accepted, Console::kFullBytes + (1 << 20));
  // No byte is lost.
  pipe.write.reset();
  std::string output;
  std::thread reader([&] { output = ReadToEnd(console_.read.get()); });
  for (int i = 0; i < 100; ++i) router->DrainStream(*id);
  router->Flush({.stall_timeout = kDeadline});
  console_.write.reset();
  router.reset();  // the router's opening of the console closes too
  reader.join();
  size_t payload = 0;
  for (const char c : output) payload += c == 'x';
  EXPECT_EQ(payload, accepted - accepted / (text.size() + 1));
}

TEST_F(LogRouterTest, DdprunsOwnLinesSayWhoseTheyAre) {
  LogRouter router(loop_.get(), console_.write.get(), console_.write.get());
  router.Say("one line");
  router.SayAsItIs("restart 1 of 5: ...");
  router.Flush({.stall_timeout = kDeadline});
  EXPECT_EQ(Available(console_.read.get()), "ddprun: one line\nrestart 1 of 5: ...\n");
}

TEST_F(LogRouterTest, AConsoleThatNobodyReadsIsGivenUpSoonForSomebodyInAHurry) {
  const UniqueFd signalled(::eventfd(1, EFD_CLOEXEC));
  LogRouter router(loop_.get(), console_.write.get(), console_.write.get());
  router.SayAsItIs(std::string(Console::kFullBytes, 'x'));
  // Without the signal this call would block for an hour.
  router.Flush({.stall_timeout = absl::Hours(1),
                .hurry_fd = signalled.get(),
                .hurried_timeout = absl::Milliseconds(10)});
  EXPECT_GT(Available(console_.read.get()).size(), 0U);
}

TEST_F(LogRouterTest, WhoIsInAHurryStillGetsWhatIsRead) {
  const UniqueFd signalled(::eventfd(1, EFD_CLOEXEC));
  auto router =
      std::make_unique<LogRouter>(loop_.get(), console_.write.get(), console_.write.get());
  router->SayAsItIs(std::string(Console::kFullBytes, 'x'));
  std::string output;
  std::thread reader([&] { output = ReadToEnd(console_.read.get()); });
  router->Flush(
      {.stall_timeout = absl::Hours(1), .hurry_fd = signalled.get(), .hurried_timeout = kDeadline});
  console_.write.reset();
  router.reset();
  reader.join();
  EXPECT_EQ(output.size(), Console::kFullBytes + 1);
}

// A log file on a stalled mount is, for write(), like a pipe without a reader.
TEST_F(LogRouterTest, ALogFileThatTakesNothingMakesItsWriterWaitAndNotTheLoop) {
  const auto writer = *FileWriter::Create(loop_.get(), "log-writer");
  const UniqueFd console(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  LogRouter router(loop_.get(), console.get(), console.get(), writer.get());
  Pipe file;
  Pipe pipe;
  const int writer_fd = pipe.write.get();
  ASSERT_EQ(::fcntl(writer_fd, F_SETFL, O_NONBLOCK), 0);
  LogRouter::Stream stream = MakeStream(pipe, "[r0]:");
  stream.file = std::move(file.write);
  const auto id = router.AddStream(std::move(stream));
  const std::string text(1000, 'x');
  size_t accepted = 0;
  size_t last = 1;
  std::function<void()> feed = [&] {
    if (accepted == last) return loop_->Stop();
    last = accepted;
    for (ssize_t n = 0; (n = ::write(writer_fd, text.data(), text.size())) > 0;) {
      accepted += static_cast<size_t>(n);
    }
    loop_->AddTimer(absl::Milliseconds(5), feed);
  };
  feed();
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_GE(accepted, FileWriter::kFullBytes);
  EXPECT_LE(accepted, FileWriter::kFullBytes + (1 << 20));
  // No byte is lost, and a file that takes data again is written while the loop runs.
  std::string output;
  std::thread reader([&] { output = ReadToEnd(file.read.get()); });
  pipe.write.reset();
  while (writer->pending() >= FileWriter::kFullBytes / 2) {
    loop_->AddTimer(absl::Milliseconds(1), [&] { loop_->Stop(); });
    ASSERT_TRUE(loop_->Run().ok());
  }
  router.CloseStream(*id);
  router.Flush({.stall_timeout = kDeadline});
  reader.join();
  EXPECT_EQ(output.size(), accepted);
}

TEST_F(LogRouterTest, AConsoleThatIsAFileIsWrittenByTheWriter) {
  const std::string path = ::testing::TempDir() + "/writer.console";
  const UniqueFd console(
      ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600));
  const auto writer = *FileWriter::Create(loop_.get(), "log-writer");
  LogRouter router(loop_.get(), console.get(), console.get(), writer.get());
  std::string expected;
  for (int i = 0; i < 1000; ++i) {
    router.Say(absl::StrCat("line ", i));
    absl::StrAppend(&expected, "ddprun: line ", i, "\n");
  }
  EXPECT_EQ(writer->pending(), expected.size());
  router.Flush({.stall_timeout = kDeadline});
  EXPECT_EQ(Slurp(path), expected);
}

// Returns the descriptor other than `fd` that refers to the same file.
int CopyOf(int fd) {
  struct stat wanted {};
  EXPECT_EQ(::fstat(fd, &wanted), 0);
  for (int other = 3; other < 1000; ++other) {
    struct stat info {};
    const bool is_same = other != fd && ::fstat(other, &info) == 0 && info.st_ino == wanted.st_ino;
    if (is_same && info.st_dev == wanted.st_dev) return other;
  }
  ADD_FAILURE() << "nothing refers to the same file";
  return -1;
}

TEST_F(LogRouterTest, AConsoleOnADiskThatWasFullSpeaksAgain) {
  const std::string path = ::testing::TempDir() + "/full.console";
  const UniqueFd console(
      ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600));
  const auto writer = *FileWriter::Create(loop_.get(), "log-writer");
  LogRouter router(loop_.get(), console.get(), console.get(), writer.get());
  const int copy = CopyOf(console.get());  // the one that the writer has
  const UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  ASSERT_EQ(::dup3(full.get(), copy, O_CLOEXEC), copy);
  router.SayAsItIs("lost");
  router.Flush({.stall_timeout = kDeadline});
  ASSERT_EQ(::dup3(console.get(), copy, O_CLOEXEC), copy);
  router.SayAsItIs("kept");
  router.Flush({.stall_timeout = kDeadline});
  EXPECT_EQ(Slurp(path), "ddprun: the disk was full: 5 bytes of output are missing here\nkept\n");
}

TEST_F(LogRouterTest, FilesThatTakeNothingAreGivenUpInTheEnd) {
  const auto writer = *FileWriter::Create(loop_.get(), "log-writer");
  LogRouter router(loop_.get(), console_.write.get(), console_.write.get(), writer.get());
  Pipe file;
  Pipe pipe;
  LogRouter::Stream stream = MakeStream(pipe, "[r0]:");
  stream.file = std::move(file.write);
  const auto id = router.AddStream(std::move(stream));
  for (int i = 0; i < 4; ++i) {
    WriteAll(pipe.write.get(), std::string(32768, 'x'));
    router.DrainStream(*id);
  }
  router.Flush({.stall_timeout = absl::Milliseconds(10)});
  EXPECT_THAT(Available(console_.read.get()), ::testing::HasSubstr("the log files take nothing"));
  (void)Available(file.read.get());  // unblocks the thread
}

TEST_F(LogRouterTest, OwnLinesThatNobodyReadsAreDroppedAndCounted) {
  auto router =
      std::make_unique<LogRouter>(loop_.get(), console_.write.get(), console_.write.get());
  constexpr int kLines = 4000;
  for (int i = 0; i < kLines; ++i) router->Say(std::string(1000, 'x'));
  std::string output;
  std::thread reader([&] { output = ReadToEnd(console_.read.get()); });
  router->SayAtTheEnd("the report");
  router->Flush({.stall_timeout = kDeadline});
  console_.write.reset();
  router.reset();
  reader.join();
  EXPECT_LE(output.size(), Console::kFullBytes + LogRouter::kOwnBytes + (256 << 10));
  const std::vector<std::string> lines = absl::StrSplit(output, '\n', absl::SkipEmpty());
  int dropped = 0;
  ASSERT_EQ(std::sscanf(lines.at(lines.size() - 2).c_str(),
                        "ddprun: %d lines of ddprun's were dropped here", &dropped),
            1);
  EXPECT_EQ(static_cast<int>(lines.size()) - 2 + dropped, kLines);
  EXPECT_GT(dropped, 0);
  EXPECT_EQ(lines.back(), "the report");
}

}  // namespace
}  // namespace ddp::launcher
