#include "base/file_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"

namespace ddp {
namespace {

std::string Slurp(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

class FileWriterTest : public ::testing::Test {
 protected:
  FileWriterTest()
      : loop_(*EventLoop::Create()),
        writer_(*FileWriter::Create(loop_.get(), "log-writer")),
        path_(absl::StrCat(::testing::TempDir(), "/file-writer-", ::getpid())) {
    ::unlink(path_.c_str());
    loop_->AddTimer(absl::Seconds(60), [] {
      ADD_FAILURE() << "the test did not end";
      abort();
    });
  }
  ~FileWriterTest() override { ::unlink(path_.c_str()); }

  UniqueFd Open() const {
    return UniqueFd(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  }

  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<FileWriter> writer_;
  const std::string path_;
};

TEST_F(FileWriterTest, WritesInOrder) {
  const auto id = writer_->Add(Open(), {.on_error = nullptr, .on_written = [this] {
                                          if (writer_->pending() == 0) loop_->Stop();
                                        }});
  std::string expected;
  for (int i = 0; i < 1000; ++i) {
    absl::StrAppend(&expected, i, "\n");
    writer_->Append(id, absl::StrCat(i, "\n"));
  }
  EXPECT_EQ(writer_->pending(id), expected.size());
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_EQ(Slurp(path_), expected);
}

// A pipe without a reader blocks the writer when the kernel's buffer is full, like a stalled mount.
TEST_F(FileWriterTest, TheLoopGoesOnWhileAFileTakesNothing) {
  std::array<int, 2> fds{};
  ASSERT_EQ(::pipe2(fds.data(), O_CLOEXEC), 0);
  const UniqueFd read_end(fds[0]);
  const size_t size = 1 << 20;
  size_t got = 0;
  std::thread reader;
  int ticks = 0;
  std::function<void()> tick = [&] {
    if (++ticks < 20) {
      loop_->AddTimer(absl::Milliseconds(1), tick);
      return;
    }
    EXPECT_EQ(writer_->pending(), size);
    reader = std::thread([&] {
      std::array<char, 65536> buffer;
      for (ssize_t n = 0; got < size && (n = ::read(read_end.get(), buffer.data(), 65536)) > 0;) {
        got += static_cast<size_t>(n);
      }
    });
  };
  const auto id = writer_->Add(UniqueFd(fds[1]),
                               {.on_error = nullptr, .on_written = [this] { loop_->Stop(); }});
  writer_->Append(id, std::string(size, 'x'));
  tick();
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_EQ(ticks, 20);
  EXPECT_EQ(writer_->pending(), 0U);
  reader.join();
  EXPECT_EQ(got, size);
}

TEST_F(FileWriterTest, AFileThatCannotBeWrittenIsGivenUpOnce) {
  int errors = 0;
  const auto id = writer_->Add(UniqueFd(::open("/dev/full", O_WRONLY | O_CLOEXEC)),
                               {.on_error =
                                    [&](const std::string& why) {
                                      ++errors;
                                      EXPECT_EQ(why, std::strerror(ENOSPC));
                                    },
                                .on_written =
                                    [this] {
                                      if (writer_->pending() == 0) loop_->Stop();
                                    }});
  writer_->Append(id, "one");
  writer_->Append(id, "two");
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_EQ(errors, 1);
}

// A disk that is full for a while. A file has a descriptor, which the test makes refer to /dev/full
// and back.
class FullDiskTest : public FileWriterTest {
 protected:
  FullDiskTest() {
    UniqueFd file = Open();
    number_ = file.get();
    id_ = writer_->Add(std::move(file),
                       {.on_error = [](const std::string& why) { ADD_FAILURE() << why; },
                        .on_written =
                            [this] {
                              if (writer_->pending() == 0) loop_->Stop();
                            },
                        .gap_line = [](size_t bytes) { return absl::StrCat(bytes, " lost\n"); }});
  }

  // Appends `data` and waits until the writer has written or dropped it.
  void Append(const std::string& data) {
    writer_->Append(id_, data);
    ASSERT_TRUE(loop_->Run().ok());
  }

  void Fill() {
    const UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
    ASSERT_EQ(::dup3(full.get(), number_, O_CLOEXEC), number_);
  }
  void MakeRoom() { ASSERT_EQ(::dup3(Open().get(), number_, O_CLOEXEC), number_); }

  int number_ = -1;
  FileWriter::FileId id_ = 0;
};

TEST_F(FullDiskTest, ALineTellsHowManyBytesAreMissing) {
  Append("one\n");
  Fill();
  Append("two\n");
  Append("three\n");
  MakeRoom();
  Append("four\n");
  Append("five\n");
  EXPECT_EQ(Slurp(path_), "one\n10 lost\nfour\nfive\n");
}

TEST_F(FullDiskTest, ATornLineEndsBeforeThatLine) {
  Append("on");
  Fill();
  Append("e\n");
  MakeRoom();
  Append("two\n");
  EXPECT_EQ(Slurp(path_), "on\n2 lost\ntwo\n");
}

TEST_F(FullDiskTest, EachGapHasALineOfItsOwn) {
  Fill();
  Append("one\n");
  MakeRoom();
  Append("two\n");
  Fill();
  Append("three\n");
  MakeRoom();
  Append("four\n");
  EXPECT_EQ(Slurp(path_), "4 lost\ntwo\n6 lost\nfour\n");
}

TEST_F(FileWriterTest, AFileThatIsRemovedIsWrittenToItsEnd) {
  const auto id = writer_->Add(
      Open(), {.on_error = nullptr, .on_written = [] { ADD_FAILURE() << "it is removed"; }});
  writer_->Append(id, "last words");
  writer_->Remove(id);
  writer_->Append(id, "more");
  const auto other =
      writer_->Add(Open(), {.on_error = nullptr, .on_written = [this] { loop_->Stop(); }});
  writer_->Append(other, ".");
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_EQ(Slurp(path_), "last words.");
  EXPECT_EQ(writer_->pending(), 0U);
}

}  // namespace
}  // namespace ddp
