// A member that is stopped in the middle of a reduction in place, in memory of this process.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/process/child_process.h"
#include "base/unique_fd.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/host_group/group_entry.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/kernels/reduce.h"
#include "ddp/comm/shared_memory/collective_engine.h"
#include "gtest/gtest.h"
#include "testing/shared_memory/stage.h"

namespace ddp::internal {
namespace {

constexpr char kMemberArgument[] = "--stopped-member";
constexpr absl::Duration kTimeout = absl::Seconds(60);
constexpr size_t kCount = size_t{4} << 20;    // floats
constexpr size_t kPiece = size_t{256} << 10;  // bytes that a member writes without a look

// One member, with a tensor in its arena and a neighbour of the tensor.
struct Member {
  Member(Stage* stage, int number) {
    const size_t bytes = kCount * sizeof(float);
    auto wanted = Arena::OfProcess().AddDemand({.gradient_bytes = {bytes, bytes}});
    EXPECT_TRUE(wanted.ok()) << wanted.status();
    demand = std::make_unique<ArenaDemand>(*std::move(wanted));
    tensor = {static_cast<float*>(Arena::OfProcess().Allocate(bytes)), kCount};
    neighbour = {static_cast<float*>(Arena::OfProcess().Allocate(bytes)), kCount};
    StageStore store(stage, 0);
    auto entry = GroupEntry::Run(store, {.member = number, .size = 2, .timeout = kTimeout});
    EXPECT_TRUE(entry.ok()) << entry.status();
    group = *std::move(entry);
    engine = std::make_unique<CollectiveEngine>(group.get());
  }

  absl::Status AllReduce() {
    std::atomic<bool> done = false;
    absl::Status result;
    engine->Start({.kind = CollectiveRequest::Kind::kAllReduce,
                   .reduction = ReduceKind::kSum,
                   .type = ElementType::kFloat,
                   .elements = kCount,
                   .inputs = {std::as_bytes(tensor)},
                   .outputs = {std::as_writable_bytes(tensor)}},
                  2 * kTimeout, [&](const absl::Status& status) {
                    result = status;
                    done = true;
                  });
    engine->Drive([&] { return done.load(); }, MonotonicClock().Now() + 3 * kTimeout);
    EXPECT_TRUE(done);
    return result;
  }

  std::unique_ptr<ArenaDemand> demand;
  std::span<float> tensor;
  std::span<float> neighbour;
  std::shared_ptr<HostGroup> group;
  std::unique_ptr<CollectiveEngine> engine;
};

[[noreturn]] void RunChild(Stage* stage) {
  Member member(stage, 1);
  absl::Status status;
  while (status.ok()) {
    std::fill(member.tensor.begin(), member.tensor.end(), 1.0F);
    status = member.AllReduce();
  }
  stage->reports[0][1].failed_ns = MonotonicNanoseconds();
  stage->Changed();
  while (true) ::pause();
}

pid_t StartMember(int stage_fd) {
  std::vector<std::string> arguments = {"/proc/self/exe", kMemberArgument, absl::StrCat(stage_fd)};
  const std::vector<char*> pointers = ExecPointers(arguments);
  return StartChild([&] {
           ::execv(pointers[0], pointers.data());
           return errno;
         })
      .pid;
}

// Stops the child at a moment at which it writes into this process's memory.
bool StopInTouch(pid_t child, const HostGroup& group) {
  const std::atomic<uint32_t>& touching = group.segment().row(1).touching;
  const absl::Time deadline = MonotonicClock().Now() + kTimeout;
  while (MonotonicClock().Now() < deadline) {
    if (touching == 0) continue;
    ::kill(child, SIGSTOP);
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, WUNTRACED), child);
    EXPECT_TRUE(WIFSTOPPED(status));
    if (touching != 0) return true;
    ::kill(child, SIGCONT);
  }
  return false;
}

TEST(GroupStopTest, AStoppedMemberWritesNowhereElseWhenItGoesOn) {
  int fd = -1;
  Stage* const stage = Stage::Make(&fd);
  ASSERT_NE(stage, nullptr);
  const UniqueFd stage_fd(fd);
  const pid_t child = StartMember(fd);
  ASSERT_GT(child, 0);
  Member member(stage, 0);
  std::fill(member.neighbour.begin(), member.neighbour.end(), 7.0F);
  absl::Status failure;
  std::thread trainer([&] {
    while (failure.ok()) {
      std::fill(member.tensor.begin(), member.tensor.end(), 1.0F);
      failure = member.AllReduce();
    }
  });
  const bool stopped = StopInTouch(child, *member.group);
  member.group->Abort();
  trainer.join();  // the operation fails, though the member is stopped
  ASSERT_TRUE(stopped);
  EXPECT_TRUE(absl::IsAborted(failure)) << failure;
  EXPECT_EQ(member.group->end().kind, GroupEnd::kAborted);
  EXPECT_FALSE(member.group->Quiesce(absl::Milliseconds(1)));  // so nobody may use the memory

  const std::vector<float> before(member.tensor.begin(), member.tensor.end());
  ::kill(child, SIGCONT);
  EXPECT_TRUE(member.group->Quiesce(kTimeout));
  EXPECT_TRUE(stage->Await([&] { return stage->reports[0][1].failed_ns != 0; }, kTimeout));

  // Only the piece that the member was at has changed: in its own slice, the second half.
  size_t first = kCount;
  size_t last = 0;
  for (size_t i = 0; i < kCount; ++i) {
    if (member.tensor[i] == before[i]) continue;
    first = std::min(first, i);
    last = std::max(last, i);
  }
  if (first < kCount) {
    EXPECT_GE(first, kCount / 2);
    EXPECT_EQ((first - kCount / 2) * sizeof(float) / kPiece,
              (last - kCount / 2) * sizeof(float) / kPiece);
  }
  EXPECT_TRUE(std::all_of(member.neighbour.begin(), member.neighbour.end(),
                          [](float value) { return value == 7.0F; }));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

}  // namespace

int Main(int argc, char** argv) {
  if (argc == 3 && argv[1] == std::string(kMemberArgument)) {
    int fd = -1;
    if (!absl::SimpleAtoi(argv[2], &fd)) return 2;
    Stage* const stage = Stage::Map(fd);
    if (stage == nullptr) return 2;
    RunChild(stage);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

}  // namespace ddp::internal

int main(int argc, char** argv) { return ddp::internal::Main(argc, argv); }
