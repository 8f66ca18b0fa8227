#include "ddp/comm/host_group/group_entry.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/host_group/member_thread.h"
#include "ddp/comm/host_group/process_file.h"
#include "ddp/comm/host_group/segment.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::ddp::testing::RunThreads;
using ::testing::HasSubstr;

constexpr absl::Duration kTimeout = absl::Seconds(60);

using Results = std::vector<absl::StatusOr<GroupEntry::Result>>;

// Runs the entry of the members below `coming`, each in a thread with its own time limit, and
// `conduct` beside them.
Results Enter(FakeGroupStore& store, const std::vector<absl::Duration>& timeouts, int size,
              const std::function<void()>& conduct = nullptr) {
  const int coming = static_cast<int>(timeouts.size());
  std::vector<std::optional<absl::StatusOr<GroupEntry::Result>>> each(coming);
  RunThreads(
      coming,
      [&](int member) {
        each[member].emplace(
            GroupEntry::Run(store, {.member = member, .size = size, .timeout = timeouts[member]}));
      },
      conduct);
  Results results;
  for (auto& result : each) results.push_back(*std::move(result));
  return results;
}

Results Enter(FakeGroupStore& store, int coming, int size,
              const std::function<void()>& conduct = nullptr) {
  return Enter(store, std::vector<absl::Duration>(coming, kTimeout), size, conduct);
}

// A process of the host that is not GroupEntry. It reaches the segment as a member does.
class Visitor {
 public:
  Visitor(FakeGroupStore& store, int size) : segment_(Open(store, size)) {}

  // Returns a description of where member 0's segment is, with its numbers.
  static ProcessFile DoorOf(FakeGroupStore& store) {
    EXPECT_TRUE(store.Wait("door", kTimeout));
    const std::vector<std::string> words = absl::StrSplit(store.Get("door"), ' ');
    ProcessFile file;
    EXPECT_TRUE(words.size() == 5 && absl::SimpleAtoi(words[1], &file.pid_space) &&
                absl::SimpleAtoi(words[2], &file.inode) && absl::SimpleAtoi(words[3], &file.pid) &&
                absl::SimpleAtoi(words[4], &file.fd));
    return file;
  }

  // Takes the place of `member`, with the arena `file`.
  void Come(int member, int file = Arena::OfProcess().fd()) {
    auto thread = MemberThread::Start(segment_, member);
    ASSERT_TRUE(thread.ok()) << thread.status();
    thread_ = *std::move(thread);
    Show(member, file);
  }

  // The same with a thread that ends without a word, as those of a killed process do.
  void ComeAndDie(int member) {
    std::thread([&] {
      ASSERT_EQ(::pthread_mutex_lock(&segment_->row(member).life), 0);
      Show(member, Arena::OfProcess().fd());
    }).join();
  }

  void Leave() { thread_.reset(); }

 private:
  static std::shared_ptr<const Segment> Open(FakeGroupStore& store, int size) {
    auto segment = Segment::Map(DoorOf(store).Open().value(), size);
    return std::make_shared<const Segment>(std::move(segment).value());
  }

  void Show(int member, int file) {
    EntryRow& entry = segment_->row(member).entry;
    entry.arena = ProcessFile::Of(file);
    entry.arena_bytes = Arena::OfProcess().reservation();
    entry.step = static_cast<uint32_t>(EntryStep::kCame);
    segment_->RingAll();
  }

  std::shared_ptr<const Segment> segment_;
  std::unique_ptr<MemberThread> thread_;
};

void ExpectAllFailWith(const Results& results, const std::string& text) {
  for (const auto& result : results) {
    ASSERT_FALSE(result.ok());
    EXPECT_THAT(result.status().message(), HasSubstr(text));
  }
}

void ExpectAllShareMemory(const Results& results) {
  for (const auto& result : results) ASSERT_TRUE(result.ok()) << result.status();
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i]->member, i);
    results[i]->segment->row(static_cast<int>(i)).signals = 100 + i;
    EXPECT_EQ(results[i]->arenas.size(), results.size());
    EXPECT_NE(results[i]->thread, nullptr);
  }
  for (const auto& result : results) {
    for (size_t i = 0; i < results.size(); ++i) {
      EXPECT_EQ(result->segment->row(static_cast<int>(i)).signals, 100 + i);
    }
  }
}

class GroupEntryTest : public ::testing::Test {
 protected:
  FakeGroupStore store_;
};

TEST_F(GroupEntryTest, TheMembersShareTheSegmentAndTheArenas) {
  Arena& arena = Arena::OfProcess();
  const auto demand = arena.AddDemand({.gradient_bytes = {Arena::kSmallestBlock}});
  ASSERT_TRUE(demand.ok()) << demand.status();
  auto* const block = static_cast<std::byte*>(arena.Allocate(Arena::kSmallestBlock));
  ASSERT_NE(block, nullptr);
  *block = std::byte{42};
  for (const int size : {1, 2, 5}) {
    FakeGroupStore store;
    const Results results = Enter(store, size, size);
    ExpectAllShareMemory(results);
    for (const auto& result : results) {
      for (const auto& peer : result->arenas) {
        EXPECT_EQ(*peer->At(block - arena.base(), 1), std::byte{42});
      }
    }
    for (const std::string& key : GroupEntry::Keys()) store.Delete(key);
    EXPECT_TRUE(store.Keys().empty());
  }
  arena.Free(block);
}

TEST_F(GroupEntryTest, AMemberThatNeverComesIsNamedByAll) {
  const Results results = Enter(store_, {absl::Milliseconds(100), absl::Milliseconds(100)}, 3);
  EXPECT_TRUE(absl::IsDeadlineExceeded(results[0].status())) << results[0].status();
  EXPECT_THAT(results[0].status().message(), HasSubstr("rank 2 of the host has not come"));
  EXPECT_EQ(results[1].status(), results[0].status());  // its own time ends at the same moment
}

TEST_F(GroupEntryTest, TheOthersLearnWhoIsMissing) {
  const Results results = Enter(store_, {absl::Milliseconds(100), kTimeout}, 4);
  ExpectAllFailWith(results, "ranks 2, 3 of the host have not come");
  EXPECT_TRUE(absl::IsDeadlineExceeded(results[1].status()));
}

TEST_F(GroupEntryTest, Member0NeverComes) {
  const auto result =
      GroupEntry::Run(store_, {.member = 1, .size = 2, .timeout = absl::Milliseconds(20)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(result.status()));
  EXPECT_THAT(result.status().message(), HasSubstr("rank 0"));
}

TEST_F(GroupEntryTest, Member0CannotBegin) {
  store_.Set("door", "no memory for the segment");
  const auto result = GroupEntry::Run(store_, {.member = 1, .size = 2, .timeout = kTimeout});
  EXPECT_THAT(result.status().message(), HasSubstr("memory for the segment"));
}

// A process of another user cannot open the memory of member 0, for example.
TEST_F(GroupEntryTest, AMemberThatCannotReachMember0SaysSo) {
  FakeGroupStore other;
  other.Set("door", "at 1 2 3 4");
  const auto lost = GroupEntry::Run(other, {.member = 1, .size = 2, .timeout = kTimeout});
  EXPECT_THAT(lost.status().message(), HasSubstr("different PID namespaces"));
  store_.Set("failed", other.Get("failed"));
  const auto result = GroupEntry::Run(store_, {.member = 0, .size = 2, .timeout = kTimeout});
  EXPECT_THAT(result.status().message(),
              HasSubstr("rank 1 of the host: the processes are in different PID namespaces"));
}

TEST_F(GroupEntryTest, AMemberWithoutAnArenaFailsAll) {
  Results results = Enter(store_, 2, 3, [&] {
    UniqueFd not_an_arena(::memfd_create("test", MFD_CLOEXEC));
    Visitor visitor(store_, 3);
    visitor.Come(2, not_an_arena.get());
    while (store_.Get("door").rfind("no ", 0) != 0) ::sched_yield();
  });
  ExpectAllFailWith(results, "is not of an arena");
}

TEST_F(GroupEntryTest, AMemberThatClosesItsMemoryFailsAll) {
  UniqueFd closed(::memfd_create("test", MFD_CLOEXEC));
  const ProcessFile file = ProcessFile::Of(closed.get());
  closed.reset();
  const auto status = file.Open().status();
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("of process ", ::getpid())));
  // Another file has the number by now.
  const ProcessFile reused{.pid_space = file.pid_space,
                           .inode = file.inode,
                           .pid = file.pid,
                           .fd = Arena::OfProcess().fd()};
  EXPECT_THAT(reused.Open().status().message(), HasSubstr("has closed its memory"));
}

// The kernel says so at once: nobody waits for rank 3.
TEST_F(GroupEntryTest, AMemberThatDiesFailsAll) {
  const absl::Time start = MonotonicClock().Now();
  Results results = Enter(store_, 2, 4, [&] { Visitor(store_, 4).ComeAndDie(2); });
  ExpectAllFailWith(results, "rank 2 of the host has ended");
  EXPECT_LT(MonotonicClock().Now() - start, kTimeout / 2);
}

TEST_F(GroupEntryTest, AMemberThatDiesBeforeItHasMappedFailsAll) {
  const absl::Time start = MonotonicClock().Now();
  Results results = Enter(store_, 2, 3, [&] { Visitor(store_, 3).ComeAndDie(2); });
  ExpectAllFailWith(results, "rank 2 of the host has ended");
  EXPECT_LT(MonotonicClock().Now() - start, kTimeout / 2);
}

TEST_F(GroupEntryTest, AMemberThatLeavesFailsAll) {
  Results results = Enter(store_, 2, 4, [&] {
    Visitor visitor(store_, 4);
    visitor.Come(2);
    visitor.Leave();
  });
  ExpectAllFailWith(results, "rank 2 of the host has ended");
}

// The segment and the arena are closed to processes of other users, by the kernel.
TEST_F(GroupEntryTest, AnotherUserCanMapNothing) {
  const ProcessFile arena = ProcessFile::Of(Arena::OfProcess().fd());
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(2);
    ::_exit(arena.Open().ok() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == 2) GTEST_SKIP() << "only root outside a sandbox can be another user";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(GroupEntryTest, TwoProcessesThatAreOneRankFailAll) {
  Results results = Enter(store_, 1, 3, [&] {
    Visitor visitor(store_, 3);
    visitor.Come(2);
    const auto second = GroupEntry::Run(store_, {.member = 2, .size = 3, .timeout = kTimeout});
    EXPECT_THAT(second.status().message(), HasSubstr("two processes are rank 2"));
    while (store_.Get("door").rfind("no ", 0) != 0) ::sched_yield();
  });
  ExpectAllFailWith(results, "two processes are rank 2");
}

TEST_F(GroupEntryTest, ARankThatTheHostHasNotIsRefused) {
  for (const int rank : {-1, 2}) {
    const auto result = GroupEntry::Run(store_, {.member = rank, .size = 2, .timeout = kTimeout});
    EXPECT_THAT(result.status().message(), HasSubstr(absl::StrCat("no rank ", rank)));
  }
}

TEST_F(GroupEntryTest, AGroupOfAnotherSizeFailsAll) {
  Results results = Enter(store_, 1, 3, [&] {
    const auto other = GroupEntry::Run(store_, {.member = 1, .size = 2, .timeout = kTimeout});
    EXPECT_THAT(other.status().message(), HasSubstr("is not that of a group"));
  });
  ExpectAllFailWith(results, "rank 1 of the host: the memory");
}

TEST_F(GroupEntryTest, AnotherVersionFailsAll) {
  store_.Set("door", "at ddp-0123 4567");  // as versions with a socket said it
  const auto result = GroupEntry::Run(store_, {.member = 1, .size = 2, .timeout = kTimeout});
  EXPECT_THAT(result.status().message(), HasSubstr("another version"));
}

TEST_F(GroupEntryTest, ALostStoreIsThrown) {
  store_.SetLost(true);
  EXPECT_ANY_THROW((void)GroupEntry::Run(store_, {.member = 0, .size = 2, .timeout = kTimeout}));
  EXPECT_ANY_THROW((void)GroupEntry::Run(store_, {.member = 1, .size = 2, .timeout = kTimeout}));
}

int OpenDescriptors() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<int>(std::distance(begin(entries), end(entries)));
}

TEST_F(GroupEntryTest, AtTheLimitOfOpenFilesAllFail) {
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  (void)Arena::OfProcess();
  const int open = OpenDescriptors();
  for (const int more : {0, 3, 8, 12, 20, 40}) {
    rlimit limit = before;
    limit.rlim_cur = open + more;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    FakeGroupStore store;
    const Results results = Enter(store, 8, 8);
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    const auto entered = std::count_if(results.begin(), results.end(),
                                       [](const auto& result) { return result.ok(); });
    EXPECT_TRUE((entered == 0 && more < 40) || entered == 8) << entered << ", " << more;
  }
  EXPECT_EQ(OpenDescriptors(), open);
  FakeGroupStore store;
  ExpectAllShareMemory(Enter(store, 3, 3));  // ThreadSanitizer leaves no addresses for 8 x 8 arenas
}

}  // namespace
}  // namespace ddp::internal
