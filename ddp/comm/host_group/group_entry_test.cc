#include "ddp/comm/host_group/group_entry.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/host_group/descriptor_socket.h"
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

// As a member sends it.
struct Hello {
  uint32_t version = 2;
  int32_t member = 0;
  std::array<char, 16> token = {};
  uint64_t arena_bytes = 0;
};

// A process at member 0's socket that is not GroupEntry.
class Visitor {
 public:
  explicit Visitor(FakeGroupStore& store) {
    EXPECT_TRUE(store.Wait("door", kTimeout));
    const std::string door = store.Get("door");
    const size_t space = door.find(' ', 3);
    const std::string token = absl::HexStringToBytes(door.substr(space + 1));
    EXPECT_EQ(token.size(), hello.token.size());
    std::copy(token.begin(), token.end(), hello.token.begin());
    auto connected = ConnectTo(door.substr(3, space - 3), kTimeout);
    EXPECT_TRUE(connected.ok()) << connected.status();
    socket = *std::move(connected);
    hello.arena_bytes = Arena::OfProcess().reservation();
  }

  void SendHello(int fd = Arena::OfProcess().fd()) {
    EXPECT_TRUE(
        SendAll(socket.get(), std::as_bytes(std::span(&hello, 1)), std::span(&fd, 1), kTimeout)
            .ok());
  }

  // Returns the text of member 0's answer, or "closed".
  std::string Answer() {
    std::array<char, 256> step = {};
    const auto got = ReceiveAll(socket.get(), std::as_writable_bytes(std::span(step)), 0, kTimeout);
    return got.ok() ? std::string(step.data() + 1) : "closed";
  }

  // Takes what member 0 sends when all have come.
  void TakeMemory(int size) {
    EXPECT_EQ(Answer(), "");
    std::vector<uint64_t> arena_bytes(size);
    EXPECT_TRUE(
        ReceiveAll(socket.get(), std::as_writable_bytes(std::span(arena_bytes)), 0, kTimeout).ok());
    std::array<std::byte, 256> step = {};
    EXPECT_TRUE(ReceiveAll(socket.get(), step, size + 1, kTimeout).ok());
  }

  // Tells member 0 how it went.
  void Say(const absl::Status& status) {
    std::array<char, 256> step = {static_cast<char>(status.code())};
    status.message().copy(step.data() + 1, step.size() - 2);
    EXPECT_TRUE(SendAll(socket.get(), std::as_bytes(std::span(step)), {}, kTimeout).ok());
  }

  Hello hello;
  UniqueFd socket;
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
    results[i]->segment.row(static_cast<int>(i)).signals = 100 + i;
    EXPECT_EQ(results[i]->arenas.size(), results.size());
    EXPECT_EQ(results[i]->links.size(), i == 0 ? results.size() - 1 : 1);
  }
  for (const auto& result : results) {
    for (size_t i = 0; i < results.size(); ++i) {
      EXPECT_EQ(result->segment.row(static_cast<int>(i)).signals, 100 + i);
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

// In another network namespace, for example.
TEST_F(GroupEntryTest, AMemberThatCannotReachMember0SaysSo) {
  FakeGroupStore other;
  other.Set("door", absl::StrCat("at ddp-nobody-", ::getpid(), " ", std::string(32, '0')));
  const auto lost = GroupEntry::Run(other, {.member = 1, .size = 2, .timeout = kTimeout});
  ASSERT_FALSE(lost.ok());
  store_.Set("failed", other.Get("failed"));
  const auto result = GroupEntry::Run(store_, {.member = 0, .size = 2, .timeout = kTimeout});
  EXPECT_THAT(result.status().message(), HasSubstr("rank 1 of the host: connecting to"));
}

TEST_F(GroupEntryTest, AMemberWithoutAnArenaFailsAll) {
  Results results = Enter(store_, 2, 3, [&] {
    Visitor visitor(store_);
    visitor.hello.member = 2;
    UniqueFd not_an_arena(::memfd_create("test", MFD_CLOEXEC));
    visitor.SendHello(not_an_arena.get());
    visitor.TakeMemory(3);
    visitor.Say({});
    EXPECT_THAT(visitor.Answer(), HasSubstr("is not of an arena"));
  });
  ExpectAllFailWith(results, "is not of an arena");
}

TEST_F(GroupEntryTest, AMemberThatCannotMapFailsAll) {
  Results results = Enter(store_, 2, 3, [&] {
    Visitor visitor(store_);
    visitor.hello.member = 2;
    visitor.SendHello();
    visitor.TakeMemory(3);
    visitor.Say(absl::ResourceExhaustedError("no addresses are left"));
    EXPECT_THAT(visitor.Answer(), HasSubstr("no addresses are left"));
  });
  ExpectAllFailWith(results, "rank 2 of the host: no addresses are left");
  EXPECT_TRUE(absl::IsResourceExhausted(results[1].status()));
}

TEST_F(GroupEntryTest, AMemberThatEndsFailsAll) {
  const absl::Time start = MonotonicClock().Now();
  Results results = Enter(store_, 2, 4, [&] {
    Visitor visitor(store_);
    visitor.hello.member = 2;
    visitor.SendHello();
  });
  ExpectAllFailWith(results, "rank 2 of the host");
  EXPECT_LT(MonotonicClock().Now() - start, kTimeout);  // nobody waits for rank 3
}

// A process of another user that listens in the place of member 0 gets neither token nor arena.
TEST_F(GroupEntryTest, AMemberSendsNothingToAnotherUser) {
  const std::string name = absl::StrCat("ddp-test-", ::getpid());
  if (::seteuid(65534) != 0) GTEST_SKIP() << "only root outside a sandbox can be another user";
  auto listener = ListenAt(name, 1);
  ASSERT_EQ(::seteuid(0), 0);
  ASSERT_TRUE(listener.ok()) << listener.status();
  store_.Set("door", absl::StrCat("at ", name, " ", std::string(32, '0')));
  const auto result = GroupEntry::Run(store_, {.member = 1, .size = 2, .timeout = kTimeout});
  EXPECT_TRUE(absl::IsPermissionDenied(result.status())) << result.status();
  EXPECT_THAT(result.status().message(), HasSubstr("is of user 65534"));
  auto socket = Accept(listener->get(), kTimeout);
  ASSERT_TRUE(socket.ok());
  std::byte first;
  EXPECT_TRUE(absl::IsUnavailable(ReceiveAll(socket->get(), {&first, 1}, 0, kTimeout).status()));
}

TEST_F(GroupEntryTest, StrangersHoldUpNobody) {
  std::vector<Visitor> silent;
  Results results = Enter(store_, 1, 2, [&] {
    for (int i = 0; i < 20; ++i) silent.emplace_back(store_);
    Visitor wrong(store_);
    wrong.hello.member = 1;
    wrong.hello.token[3] ^= 1;
    wrong.SendHello();
    EXPECT_EQ(wrong.Answer(), "closed");
    Visitor short_one(store_);
    const std::byte one = {};
    EXPECT_TRUE(SendAll(short_one.socket.get(), std::span(&one, 1), {}, kTimeout).ok());
    EXPECT_EQ(short_one.Answer(), "closed");
    silent.erase(silent.begin(), silent.begin() + 10);
    auto member = GroupEntry::Run(store_, {.member = 1, .size = 2, .timeout = kTimeout});
    EXPECT_TRUE(member.ok()) << member.status();
  });
  EXPECT_TRUE(results[0].ok()) << results[0].status();
}

TEST_F(GroupEntryTest, TwoProcessesThatAreOneRankFailAll) {
  Results results = Enter(store_, 1, 3, [&] {
    Visitor one(store_);
    Visitor other(store_);
    one.hello.member = other.hello.member = 2;
    one.SendHello();
    other.SendHello();
    EXPECT_THAT(one.Answer(), HasSubstr("two processes are rank 2"));
    EXPECT_THAT(other.Answer(), HasSubstr("two processes are rank 2"));
  });
  ExpectAllFailWith(results, "two processes are rank 2");
}

TEST_F(GroupEntryTest, ARankThatTheHostHasNotFailsAll) {
  for (const int rank : {-1, 0, 2}) {
    FakeGroupStore store;
    Results results = Enter(store, 1, 2, [&] {
      Visitor visitor(store);
      visitor.hello.member = rank;
      visitor.SendHello();
      EXPECT_THAT(visitor.Answer(), HasSubstr(absl::StrCat("is rank ", rank)));
    });
    ExpectAllFailWith(results, absl::StrCat("is rank ", rank));
  }
}

TEST_F(GroupEntryTest, AnotherVersionFailsAll) {
  Results results = Enter(store_, 2, 3, [&] {
    Visitor visitor(store_);
    visitor.hello.member = 2;
    visitor.hello.version = 1;
    visitor.SendHello();
    EXPECT_THAT(visitor.Answer(), HasSubstr("another version"));
  });
  ExpectAllFailWith(results, "rank 2 of the host has another version");
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
    EXPECT_TRUE(entered == 0 || (entered == 8 && more == 40)) << entered << ", " << more;
  }
  EXPECT_EQ(OpenDescriptors(), open);
  FakeGroupStore store;
  ExpectAllShareMemory(Enter(store, 3, 3));  // ThreadSanitizer leaves no addresses for 8 x 8 arenas
}

}  // namespace
}  // namespace ddp::internal
