// Kills members of groups, which are processes of their own, at random points of random
// collectives. The survivors have to fail with the right member, and build the next group.
//
// DDP_KILLS sets the number of kills, DDP_SEED the random numbers. The test prints how long the
// survivors took; it asserts generous limits only.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/process/child_process.h"
#include "base/unique_fd.h"
#include "ddp/comm/host_group/segment.h"
#include "gtest/gtest.h"
#include "testing/shared_memory/stage.h"
#include "testing/shared_memory/stage_member.h"

namespace ddp::internal {
namespace {

constexpr char kMemberArgument[] = "--stage-member";
constexpr absl::Duration kDeadline = absl::Seconds(60);
constexpr int kEntryTimeoutMs = 30'000;
// Of a group of which a member is killed while it is built. A member that has not come yet is
// missed for so long.
constexpr int kShortEntryTimeoutMs = 500;

int FromEnvironment(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  int value = 0;
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : otherwise;
}

// Figures of one kind.
class Distribution {
 public:
  void Add(int64_t ns) { values_.push_back(ns); }
  void Print(const std::string& name) {
    if (values_.empty()) return;
    std::sort(values_.begin(), values_.end());
    const auto at = [this](double part) {
      return static_cast<double>(
                 values_[static_cast<size_t>(part * static_cast<double>(values_.size() - 1))]) /
             1e6;
    };
    std::printf(
        "%-46s n %5zu  min %.3f  p25 %.3f  p50 %.3f  p75 %.3f  p90 %.3f  p99 %.3f  max %.3f ms\n",
        name.c_str(), values_.size(), at(0), at(0.25), at(0.5), at(0.75), at(0.9), at(0.99), at(1));
  }

 private:
  std::vector<int64_t> values_;
};

struct Figures {
  Distribution notice_small, notice_large, notice_oversubscribed;
  Distribution next_smaller, next_equal;
  int kills = 0;
  int while_built = 0;
  uint64_t operations = 0;
};

// The processes of one stage.
class Cast {
 public:
  Cast(int count, const std::vector<uint64_t>& ballast) {
    int fd = -1;
    stage_ = Stage::Make(&fd);
    fd_.reset(fd);
    if (stage_ == nullptr) return;
    std::copy(ballast.begin(), ballast.end(), stage_->ballast_bytes.begin());
    for (int slot = 0; slot < count; ++slot) Start(slot);
  }
  ~Cast() {
    for (const pid_t pid : pids_) {
      if (pid <= 0) continue;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    ::munmap(stage_, sizeof(Stage));
  }
  Cast(const Cast&) = delete;
  Cast& operator=(const Cast&) = delete;

  Stage& stage() { return *stage_; }

  // Returns CLOCK_MONOTONIC before the kill.
  int64_t Kill(int slot) {
    const int64_t now_ns = MonotonicNanoseconds();
    ::kill(pids_[slot], SIGKILL);
    return now_ns;
  }
  void Reap(int slot) { ::waitpid(std::exchange(pids_[slot], 0), nullptr, 0); }

 private:
  void Start(int slot) {
    std::vector<std::string> arguments = {"/proc/self/exe", kMemberArgument,
                                          absl::StrCat(fd_.get()), absl::StrCat(slot)};
    const std::vector<char*> pointers = ExecPointers(arguments);
    const ChildProcess child = StartChild([&] {
      ::execv(pointers[0], pointers.data());
      return errno;
    });
    EXPECT_GT(child.pid, 0) << child.failed_call;
    pids_.push_back(child.pid);
  }

  Stage* stage_ = nullptr;
  UniqueFd fd_;
  std::vector<pid_t> pids_;
};

// One cast, some of whom are killed, one after the other.
class Episode {
 public:
  Episode(std::mt19937_64& random, Figures& figures, bool large)
      : random_(random),
        figures_(figures),
        large_(large),
        size_(2 + static_cast<int>(random() % 3)),
        cast_(size_ + 1, Ballast(random)) {
    for (int slot = 0; slot < size_; ++slot) members_.push_back(slot);
  }

  void Run(int kills) {
    const bool ready = cast_.stage().Await(
        [&] {
          for (int slot = 0; slot <= size_; ++slot) {
            if (cast_.stage().ready[slot] == 0) return false;
          }
          return true;
        },
        kDeadline);
    ASSERT_TRUE(ready);
    Publish(false);
    ASSERT_TRUE(AwaitBuilt());
    for (int i = 0; i < kills && members_.size() >= 2; ++i) {
      if (!KillOne(i + 1 < kills && random_() % 6 == 0)) return;
    }
    for (uint32_t generation = 0; generation < cast_.stage().generations; ++generation) {
      for (const Stage::Report& report : cast_.stage().reports[generation]) {
        EXPECT_EQ(report.corrupt, 0) << "generation " << generation;
        figures_.operations += report.operations;
      }
    }
  }

 private:
  // The first victim has 1 GiB in large episodes.
  std::vector<uint64_t> Ballast(std::mt19937_64& random) {
    std::vector<uint64_t> ballast(size_ + 1, uint64_t{10} << 20);
    victim_ = static_cast<int>(random() % size_);
    if (large_) ballast[victim_] = uint64_t{1} << 30;
    return ballast;
  }

  uint32_t generation() { return cast_.stage().generations - 1; }
  Stage::Report& report(uint32_t generation, int slot) {
    return cast_.stage().reports[generation][slot];
  }

  void Publish(bool killed_while_built) {
    Stage& stage = cast_.stage();
    Stage::Plan& plan = stage.plans[stage.generations];
    plan.size = static_cast<int32_t>(members_.size());
    plan.timeout_ms = killed_while_built ? kShortEntryTimeoutMs : kEntryTimeoutMs;
    plan.seed = random_();
    plan.member_of.fill(-1);
    for (size_t member = 0; member < members_.size(); ++member) {
      plan.member_of[members_[member]] = static_cast<int32_t>(member);
    }
    ++stage.generations;
    stage.Changed();
  }

  bool AwaitBuilt() {
    const bool built = cast_.stage().Await(
        [&] {
          return std::all_of(members_.begin(), members_.end(), [&](int slot) {
            const Stage::Report& one = report(generation(), slot);
            return one.built_ns != 0 || one.failed_ns != 0;
          });
        },
        kDeadline);
    EXPECT_TRUE(built) << "the next group was not built in time";
    for (const int slot : members_) {
      EXPECT_NE(report(generation(), slot).built_ns, 0) << report(generation(), slot).message;
    }
    return built && !::testing::Test::HasFailure();
  }

  // Reads the clock for a while: a kill is to hit any instruction.
  void Spin(uint64_t most_us) {
    const int64_t until_ns =
        MonotonicNanoseconds() + static_cast<int64_t>(random_() % (most_us * 1000));
    while (MonotonicNanoseconds() < until_ns) {
    }
  }

  // Takes the victim out of the members, and puts the stand-in into its place or not.
  void Replace(int victim) {
    const auto place = std::find(members_.begin(), members_.end(), victim);
    if (!stand_in_used_ && random_() % 2 == 0) {
      *place = size_;
      stand_in_used_ = true;
    } else {
      members_.erase(place);
    }
  }

  // Kills a member of the group that has just been built, or of the one that is built now.
  bool KillOne(bool while_built) {
    const uint32_t failing = generation();
    const int victim = figures_first_ ? victim_ : members_[random_() % members_.size()];
    const bool large = large_ && figures_first_;
    figures_first_ = false;
    const uint32_t wanted = random_() % 12;
    while (report(failing, victim).operations < wanted && report(failing, victim).failed_ns == 0) {
    }
    Spin(1'500);
    const std::vector<int> before = members_;
    const int64_t killed_ns = cast_.Kill(victim);
    Replace(victim);
    Publish(while_built);
    ++figures_.kills;
    if (!CheckFailure(failing, before, victim, killed_ns, large)) return false;
    cast_.Reap(victim);
    const bool equal = members_.size() == before.size();
    if (while_built) {
      if (!KillWhileBuilt()) return false;
    }
    if (!AwaitBuilt()) return false;
    if (while_built) return true;
    for (const int slot : before) {
      if (slot == victim) continue;
      (equal ? figures_.next_equal : figures_.next_smaller)
          .Add(report(generation(), slot).built_ns - report(failing, slot).failed_ns);
    }
    return true;
  }

  // All but the victim fail, name it, and had right results before.
  bool CheckFailure(uint32_t failing, const std::vector<int>& members, int victim,
                    int64_t killed_ns, bool large) {
    const bool failed = cast_.stage().Await(
        [&] {
          return std::all_of(members.begin(), members.end(), [&](int slot) {
            return slot == victim || report(failing, slot).failed_ns != 0;
          });
        },
        kDeadline);
    EXPECT_TRUE(failed) << "a survivor hangs";
    const int32_t number = cast_.stage().plans[failing].member_of[victim];
    for (const int slot : members) {
      if (slot == victim) continue;
      const Stage::Report& one = report(failing, slot);
      EXPECT_EQ(one.end_kind, static_cast<int32_t>(GroupEnd::kDied)) << one.message;
      EXPECT_EQ(one.end_member, number) << one.message;
      EXPECT_EQ(one.code, static_cast<int32_t>(absl::StatusCode::kUnavailable)) << one.message;
      const int64_t notice_ns = one.failed_ns - killed_ns;
      EXPECT_GT(notice_ns, 0);
      EXPECT_LT(notice_ns, absl::ToInt64Nanoseconds(kDeadline));
      const bool crowded = members.size() > static_cast<size_t>(::sysconf(_SC_NPROCESSORS_ONLN));
      (large     ? figures_.notice_large
       : crowded ? figures_.notice_oversubscribed
                 : figures_.notice_small)
          .Add(notice_ns);
    }
    return !::testing::Test::HasFailure();
  }

  // The group under way loses a member at any point of its entry. The survivors' entries fail, or
  // the group ends when it is built. Then the next group is published.
  bool KillWhileBuilt() {
    const uint32_t failing = generation();
    const std::vector<int> before = members_;
    if (before.size() < 2) return true;
    const int victim = members_[random_() % members_.size()];
    Spin(3'000);
    (void)cast_.Kill(victim);
    ++figures_.kills;
    ++figures_.while_built;
    const bool failed = cast_.stage().Await(
        [&] {
          return std::all_of(before.begin(), before.end(), [&](int slot) {
            return slot == victim || report(failing, slot).failed_ns != 0;
          });
        },
        kDeadline);
    EXPECT_TRUE(failed) << "a survivor hangs in its entry";
    const int32_t number = cast_.stage().plans[failing].member_of[victim];
    for (const int slot : before) {
      const Stage::Report& one = report(failing, slot);
      if (slot == victim || one.end_kind == 0) continue;
      EXPECT_EQ(one.end_member, number) << one.message;
    }
    cast_.Reap(victim);
    members_.erase(std::find(members_.begin(), members_.end(), victim));
    Publish(false);
    return !::testing::Test::HasFailure();
  }

  std::mt19937_64& random_;
  Figures& figures_;
  const bool large_;
  const int size_;
  int victim_ = 0;
  bool figures_first_ = true;
  bool stand_in_used_ = false;
  Cast cast_;
  std::vector<int> members_;  // slots, by member
};

TEST(GroupKillTest, SurvivorsNoticeAndBuildTheNextGroup) {
  const int kills = FromEnvironment("DDP_KILLS", 30);
  const int seed = FromEnvironment("DDP_SEED", 1);
  std::mt19937_64 random(seed);
  Figures figures;
  for (int episode = 0; figures.kills < kills; ++episode) {
    SCOPED_TRACE(absl::StrCat("seed ", seed, ", episode ", episode));
    Episode(random, figures, episode % 12 == 3).Run(3);
    ASSERT_FALSE(HasFailure());
  }
  std::printf("%d kills, %d of them while a group was built; %lu collectives\n", figures.kills,
              figures.while_built, figures.operations);
  figures.notice_small.Print("kill -> error, a core each, 10 MiB dead");
  figures.notice_oversubscribed.Print("kill -> error, more members than cores, 10 MiB");
  figures.notice_large.Print("kill -> error, 1 GiB dead");
  figures.next_smaller.Print("error -> first barrier of a smaller group");
  figures.next_equal.Print("error -> first barrier of an equal group");
}

}  // namespace

int Main(int argc, char** argv) {
  if (argc == 4 && argv[1] == std::string(kMemberArgument)) {
    int fd = -1;
    int slot = -1;
    if (!absl::SimpleAtoi(argv[2], &fd) || !absl::SimpleAtoi(argv[3], &slot)) return 2;
    Stage* const stage = Stage::Map(fd);
    if (stage == nullptr) return 2;
    RunStageMember(stage, slot);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

}  // namespace ddp::internal

int main(int argc, char** argv) { return ddp::internal::Main(argc, argv); }
