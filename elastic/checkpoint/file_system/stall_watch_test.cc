#include "elastic/checkpoint/file_system/stall_watch.h"

#include <functional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/file_system/progress_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/file_system/memory_file_system.h"

namespace ddp::elastic {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

// Collects the lines of a watch.
class Lines {
 public:
  StallWatch::Say Say() {
    return [this](const std::string& line) {
      MutexLock lock(mutex_);
      lines_.push_back(line);
      changed_.NotifyAll();
    };
  }

  // Blocks until there are `count` lines, for at most one minute.
  void Await(size_t count) {
    const MonotonicClock clock;
    const absl::Time deadline = clock.Now() + absl::Minutes(1);
    MutexLock lock(mutex_);
    while (lines_.size() < count && clock.Now() < deadline) {
      changed_.WaitFor(mutex_, deadline - clock.Now());
    }
    EXPECT_GE(lines_.size(), count);
  }

  std::vector<std::string> all() {
    MutexLock lock(mutex_);
    return lines_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mutex_);
};

constexpr absl::Duration kPatience = absl::Milliseconds(10);

// Every call of the file system blocks until the watch has logged it.
TEST(StallWatchTest, EveryCallThatStandsStillIsNamedWithItsPath) {
  testing::MemoryFileSystem disk;
  Lines lines;
  StallWatch watch(kPatience, lines.Say());
  ProgressFileSystem folder(
      &disk, [] {}, &watch);
  ASSERT_TRUE(folder.MakeDirectory("/c").ok());

  const auto stall = [&](const std::function<void()>& call, const std::string& expected) {
    const size_t before = lines.all().size();
    disk.RunBeforeCall(disk.calls() + 1, [&] { lines.Await(before + 1); });
    call();
    const std::vector<std::string> all = lines.all();
    ASSERT_EQ(all.size(), before + 2) << expected;
    EXPECT_THAT(all[before], AllOf(StartsWith("the file system has not answered for "),
                                   HasSubstr("s: waiting to " + expected + ". Its mount may")));
    EXPECT_THAT(all[before + 1], StartsWith("the file system answers again after "));
  };
  stall([&] { EXPECT_TRUE(folder.ListDirectory("/c").ok()); }, "list /c");
  std::unique_ptr<WritableFile> written;
  stall([&] { written = folder.CreateFile("/c/file").value(); }, "create /c/file");
  stall([&] { EXPECT_TRUE(written->Append("abc", 3).ok()); }, "write /c/file");
  stall([&] { EXPECT_TRUE(written->Sync().ok()); }, "sync /c/file");
  ASSERT_TRUE(written->Close().ok());
  std::unique_ptr<ReadableFile> read;
  stall([&] { read = folder.OpenFile("/c/file").value(); }, "open /c/file");
  char bytes[3];
  stall([&] { EXPECT_TRUE(read->Read(0, bytes, 3).ok()); }, "read /c/file");
  stall([&] { EXPECT_TRUE(folder.KindOf("/c/file").ok()); }, "look at /c/file");
  stall([&] { EXPECT_TRUE(folder.Rename("/c/file", "/c/other").ok()); }, "rename /c/file");
  stall([&] { EXPECT_TRUE(folder.SyncDirectory("/c").ok()); }, "sync /c");
  stall([&] { EXPECT_TRUE(folder.RemoveFile("/c/other").ok()); }, "remove /c/other");
}

TEST(StallWatchTest, ACallThatReturnsInTimeIsNotNamed) {
  Lines lines;
  {
    StallWatch watch(absl::Hours(1), lines.Say());
    for (int i = 0; i < 1000; ++i) const StallWatch::Call call(&watch, "open", "/c");
  }
  EXPECT_THAT(lines.all(), IsEmpty());
}

TEST(StallWatchTest, WithInfinitePatienceThereIsNoLine) {
  Lines lines;
  {
    StallWatch watch(absl::InfiniteDuration(), lines.Say());
    const StallWatch::Call call(&watch, "open", "/c");
  }
  const StallWatch::Call unwatched(nullptr, "open", "/c");
  EXPECT_THAT(lines.all(), IsEmpty());
}

TEST(StallWatchTest, CallsThatStandStillTogetherAreNamedOnceEach) {
  Lines lines;
  const std::string a = "/a";
  const std::string b = "/b";
  StallWatch watch(kPatience, lines.Say());
  {
    const StallWatch::Call first(&watch, "open", a);
    lines.Await(1);
    const StallWatch::Call second(&watch, "sync", b);
    lines.Await(2);
  }
  EXPECT_THAT(lines.all(), ElementsAre(HasSubstr("open /a"), HasSubstr("sync /b"), HasSubstr("/b"),
                                       HasSubstr("/a")));
}

}  // namespace
}  // namespace ddp::elastic
