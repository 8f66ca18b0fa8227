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
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/host_group/process_file.h"
#include "ddp/comm/host_group/segment.h"
#include "ddp/comm/meeting/store_meeting.h"
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

using Entered = absl::StatusOr<std::shared_ptr<HostGroup>>;
using Results = std::vector<Entered>;

// Runs the entry of the members below `coming`, each in a thread with its own time limit, and
// `conduct` beside them.
Results Enter(FakeGroupStore& store, const std::vector<absl::Duration>& timeouts, int size,
              const std::function<void()>& conduct = nullptr) {
  const int coming = static_cast<int>(timeouts.size());
  std::vector<std::optional<Entered>> each(coming);
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

// A rank that is not GroupEntry. It meets the others as a rank does, and reaches their segment.
class Visitor {
 public:
  Visitor(FakeGroupStore& store, int rank, int ranks) : store_(store), rank_(rank), ranks_(ranks) {}

  // Says where its memory is: where rank 0's is, apart from the words that `change` changes.
  void Come(const std::function<void(std::vector<std::string>& words)>& change = nullptr) {
    EXPECT_TRUE(store_.Wait("memory/0", kTimeout));
    std::vector<std::string> words = absl::StrSplit(store_.Get("memory/0"), ' ');
    ASSERT_EQ(words.size(), 7);
    if (change) change(words);
    store_.Set(absl::StrCat("memory/", rank_), absl::StrJoin(words, " "));
    if (store_.Add("memory/count", 1) == ranks_) store_.Set("memory/verdict", StoreMeeting::kMet);
  }

  // Takes the place of its rank with a thread that ends without a word, as those of a killed
  // process do.
  void TakeItsPlaceAndDie() const {
    const std::vector<std::string> words = absl::StrSplit(store_.Get("memory/0"), ' ');
    ProcessFile file;
    ASSERT_TRUE(absl::SimpleAtoi(words[0], &file.pid_space) &&
                absl::SimpleAtoi(words[1], &file.inode) && absl::SimpleAtoi(words[2], &file.pid) &&
                absl::SimpleAtoi(words[3], &file.fd));
    const auto segment = Segment::Map(file.Open().value(), ranks_);
    ASSERT_TRUE(segment.ok()) << segment.status();
    std::thread([&] { ASSERT_EQ(::pthread_mutex_lock(&(*segment)->row(rank_).life), 0); }).join();
  }

 private:
  FakeGroupStore& store_;
  const int rank_;
  const int ranks_;
};

void ExpectAllFailWith(const Results& results, const std::string& text) {
  for (const auto& result : results) {
    ASSERT_FALSE(result.ok());
    EXPECT_THAT(result.status().message(), HasSubstr(text));
  }
}

void ExpectAllShareMemory(const Results& results) {
  for (const auto& result : results) ASSERT_TRUE(result.ok()) << result.status();
  const int size = static_cast<int>(results.size());
  for (int i = 0; i < size; ++i) {
    const HostGroup& group = **results[i];
    EXPECT_EQ(group.member(), i);
    EXPECT_EQ(group.size(), size);
    group.segment().row(i).signals = 100 + i;
  }
  for (const auto& result : results) {
    for (int i = 0; i < size; ++i) EXPECT_EQ((*result)->segment().row(i).signals, 100 + i);
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
      for (int member = 0; member < size; ++member) {
        EXPECT_EQ(*(*result)->InArena(member, block - arena.base(), 1), std::byte{42});
      }
    }
    for (const std::string& key : GroupEntry::Keys(size)) store.Delete(key);
    EXPECT_TRUE(store.Keys().empty());
  }
  arena.Free(block);
}

TEST_F(GroupEntryTest, AMemberThatNeverComesIsNamedByAll) {
  const Results results = Enter(store_, {absl::Milliseconds(100), absl::Milliseconds(100)}, 3);
  EXPECT_TRUE(absl::IsDeadlineExceeded(results[0].status())) << results[0].status();
  EXPECT_THAT(results[0].status().message(), HasSubstr("rank 2 has not come in time"));
  EXPECT_EQ(results[1].status(), results[0].status());  // its own time ends at the same moment
}

TEST_F(GroupEntryTest, TheOthersLearnWhoIsMissing) {
  const Results results = Enter(store_, {absl::Milliseconds(100), kTimeout}, 4);
  ExpectAllFailWith(results, "ranks 2, 3 have not come in time");
  EXPECT_TRUE(absl::IsDeadlineExceeded(results[1].status()));
}

TEST_F(GroupEntryTest, Member0NeverComes) {
  const auto result =
      GroupEntry::Run(store_, {.member = 1, .size = 2, .timeout = absl::Milliseconds(20)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(result.status()));
  EXPECT_THAT(result.status().message(), HasSubstr("rank 0"));
}

TEST_F(GroupEntryTest, ARankThatCannotGoOnFailsAll) {
  store_.Set("memory/verdict", "rank 2: no descriptors");
  ExpectAllFailWith(Enter(store_, 2, 3), "rank 2: no descriptors");
}

TEST_F(GroupEntryTest, ARankInAnotherPidNamespaceFailsAll) {
  const Results results =
      Enter(store_, 2, 3, [&] { Visitor(store_, 2, 3).Come([](auto& words) { words[0] = "1"; }); });
  ExpectAllFailWith(results, "the processes are in different PID namespaces");
}

TEST_F(GroupEntryTest, AMemberWithoutAnArenaFailsAll) {
  const UniqueFd not_an_arena(::memfd_create("test", MFD_CLOEXEC));
  const ProcessFile file = ProcessFile::Of(not_an_arena.get());
  const Results results = Enter(store_, 2, 3, [&] {
    Visitor(store_, 2, 3).Come([&](auto& words) {
      words[4] = absl::StrCat(file.inode);
      words[5] = absl::StrCat(file.fd);
    });
  });
  ExpectAllFailWith(results, "is not of an arena");
}

// The ranks of a host that can share memory fail as well, and say whose fault it is.
TEST_F(GroupEntryTest, AHostWithoutCommonMemoryFailsTheOtherHosts) {
  RunThreads(
      2,
      [&](int rank) {
        const auto result = GroupEntry::Run(store_, {.member = 0,
                                                     .size = rank == 0 ? 1 : 2,
                                                     .first_rank = rank,
                                                     .ranks = 3,
                                                     .timeout = kTimeout});
        EXPECT_THAT(result.status().message(), HasSubstr("rank 1: the processes are in different"));
      },
      [&] { Visitor(store_, 2, 3).Come([](auto& words) { words[0] = "1"; }); });
}

TEST_F(GroupEntryTest, EachHostHasASegmentOfItsOwn) {
  std::vector<std::shared_ptr<HostGroup>> groups(5);
  RunThreads(5, [&](int rank) {
    const bool first = rank < 3;
    const auto result = GroupEntry::Run(store_, {.member = first ? rank : rank - 3,
                                                 .size = first ? 3 : 2,
                                                 .first_rank = first ? 0 : 3,
                                                 .ranks = 5,
                                                 .timeout = kTimeout});
    ASSERT_TRUE(result.ok()) << result.status();
    groups[rank] = *result;
    groups[rank]->segment().row(groups[rank]->member()).signals = 1;
  });
  EXPECT_EQ(groups[0]->segment().row(2).signals, 1);
  EXPECT_EQ(groups[4]->size(), 2);
  EXPECT_EQ(groups[4]->segment().row(0).signals, 1);
}

// A rank's commands do not grow with the ranks.
TEST_F(GroupEntryTest, ARankNeedsAFewCommands) {
  for (const int size : {2, 8}) {
    FakeGroupStore store;
    ExpectAllShareMemory(Enter(store, size, size));
    EXPECT_LE(store.Commands(), 10 * size + 2) << size;
  }
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

// The kernel says so at once.
TEST_F(GroupEntryTest, AMemberThatDiesFailsAll) {
  const absl::Time start = MonotonicClock().Now();
  const Results results = Enter(store_, 2, 3, [&] {
    Visitor visitor(store_, 2, 3);
    visitor.Come();
    visitor.TakeItsPlaceAndDie();
  });
  ExpectAllFailWith(results, "rank 2 has ended");
  EXPECT_LT(MonotonicClock().Now() - start, kTimeout / 4);
}

TEST_F(GroupEntryTest, AMemberThatDoesNotAnswerFailsAll) {
  const std::vector<absl::Duration> timeouts(2, absl::Milliseconds(300));
  const Results results = Enter(store_, timeouts, 3, [&] { Visitor(store_, 2, 3).Come(); });
  ExpectAllFailWith(results, "a rank has not mapped the memory of its host in time");
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

TEST_F(GroupEntryTest, APlaceHasOneProcess) {
  const auto segment = Segment::Make(3).value();
  const auto first = HostGroup::Make(2, segment, {});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_THAT(HostGroup::Make(2, segment, {}).status().message(),
              HasSubstr("two processes are rank 2"));
}

TEST_F(GroupEntryTest, ARankThatTheHostHasNotIsRefused) {
  for (const int rank : {-1, 2}) {
    const auto result = GroupEntry::Run(store_, {.member = rank, .size = 2, .timeout = kTimeout});
    EXPECT_THAT(result.status().message(), HasSubstr(absl::StrCat("no rank ", rank)));
  }
}

TEST_F(GroupEntryTest, AnotherVersionFailsAll) {
  const Results results = Enter(store_, 2, 3, [&] {
    Visitor(store_, 2, 3).Come([](auto& words) { words = {"at", "1"}; });
  });
  ExpectAllFailWith(results, "another version");
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
