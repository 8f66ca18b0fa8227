#include "elastic/health/health_page.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>

#include "base/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/refused_calls.h"

namespace ddp::elastic {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Returns a second mapping of `page`, as a worker gets it.
HealthPage MapAgain(const HealthPage& page) {
  absl::StatusOr<HealthPage> mapped = HealthPage::Map(dup(page.fd()));
  EXPECT_TRUE(mapped.ok()) << mapped.status();
  return *std::move(mapped);
}

HealthPage MakePage() {
  absl::StatusOr<HealthPage> page = HealthPage::Create();
  EXPECT_TRUE(page.ok()) << page.status();
  return *std::move(page);
}

// Runs `body` in a child process and waits for its end; returns the wait status.
template <typename Body>
int RunInChild(Body body) {
  const pid_t pid = fork();
  if (pid == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

TEST(HealthPageTest, StartsWithoutAStep) {
  const HealthPage page = MakePage();
  const HealthPage::Snapshot snapshot = page.Read();
  EXPECT_EQ(snapshot.generation, 0u);
  EXPECT_FALSE(snapshot.has_step);
  EXPECT_EQ(snapshot.worker, HealthPage::Worker::kNotAttached);
}

TEST(HealthPageTest, ReaderSeesTheFirstAndTheLastCommit) {
  HealthPage agent = MakePage();
  agent.BeginGeneration(7);
  HealthPage worker = MapAgain(agent);
  const int64_t before_ns = MonotonicNanoseconds();
  worker.CommitStep(40);
  const int64_t between_ns = MonotonicNanoseconds();
  worker.CommitStep(41);
  const int64_t after_ns = MonotonicNanoseconds();

  const HealthPage::Snapshot snapshot = agent.Read();
  EXPECT_EQ(snapshot.generation, 7u);
  EXPECT_TRUE(snapshot.has_step);
  EXPECT_EQ(snapshot.step, 41);
  EXPECT_EQ(snapshot.first_step, 40);
  EXPECT_GE(snapshot.first_commit_monotonic_ns, before_ns);
  EXPECT_LE(snapshot.first_commit_monotonic_ns, between_ns);
  EXPECT_GE(snapshot.last_commit_monotonic_ns, between_ns);
  EXPECT_LE(snapshot.last_commit_monotonic_ns, after_ns);
}

TEST(HealthPageTest, AGenerationForgetsTheStepsBeforeIt) {
  HealthPage page = MakePage();
  page.BeginGeneration(1);
  page.CommitStep(3);
  page.BeginGeneration(2);
  EXPECT_EQ(page.Read().generation, 2u);
  EXPECT_FALSE(page.Read().has_step);
  EXPECT_EQ(page.Read().first_commit_monotonic_ns, 0);
}

TEST(HealthPageTest, StartupEndsWithTheFirstCommitOfATrainerWithoutPhases) {
  HealthPage page = MakePage();
  const int64_t before_ns = MonotonicNanoseconds();
  page.BeginGeneration(1);
  EXPECT_EQ(page.Read().phase, Phase::kStartup);
  EXPECT_GE(page.Read().phase_start_monotonic_ns, before_ns);
  EXPECT_EQ(page.Read().step_start_monotonic_ns, page.Read().phase_start_monotonic_ns);
  page.CommitStep(1);
  const HealthPage::Snapshot snapshot = page.Read();
  EXPECT_EQ(snapshot.phase, Phase::kOther);
  EXPECT_EQ(snapshot.commits, 1);
  EXPECT_EQ(snapshot.longest_step_us, 0);
  EXPECT_EQ(snapshot.phase_start_monotonic_ns, snapshot.last_commit_monotonic_ns);
  EXPECT_EQ(snapshot.step_start_monotonic_ns, snapshot.last_commit_monotonic_ns);
}

// Busy-waits until the clock has advanced by `us`.
void Spend(int64_t us) {
  const int64_t until_ns = MonotonicNanoseconds() + us * 1000;
  while (MonotonicNanoseconds() < until_ns) {
  }
}

int64_t Total(const HealthPage::Snapshot& snapshot, Phase phase) {
  return snapshot.phase_total_us[static_cast<size_t>(phase)];
}

TEST(HealthPageTest, EachPhaseHasItsTime) {
  HealthPage page = MakePage();
  page.BeginGeneration(1);
  page.CommitStep(1);
  const HealthPage::Snapshot before = page.Read();
  page.EnterPhase(Phase::kData);
  Spend(2000);
  page.EnterPhase(Phase::kBackward);
  Spend(500);
  const int64_t backward_start_ns = page.Read().phase_start_monotonic_ns;
  EXPECT_EQ(Total(page.Read(), Phase::kData), 0);  // the step is not complete yet
  page.CommitStep(2);
  const HealthPage::Snapshot after = page.Read();
  EXPECT_GE(Total(after, Phase::kData), 2000);
  EXPECT_GE(Total(after, Phase::kBackward), 500);
  EXPECT_EQ(Total(after, Phase::kForward), 0);
  EXPECT_EQ(after.phase, Phase::kBackward);
  EXPECT_EQ(after.phase_start_monotonic_ns, backward_start_ns);
  // The phase times add up to the time between the commits, up to rounding.
  int64_t sum_us = 0;
  for (const int64_t total_us : after.phase_total_us) sum_us += total_us;
  EXPECT_NEAR(sum_us - Total(before, Phase::kStartup),
              (after.last_commit_monotonic_ns - before.last_commit_monotonic_ns) / 1000,
              kPhaseCount);
  EXPECT_GE(after.longest_step_us, 2500);
  EXPECT_LE(after.longest_step_us,
            (after.last_commit_monotonic_ns - before.last_commit_monotonic_ns) / 1000);
}

TEST(HealthPageTest, CheckpointsAndEvaluationsAreNoPartOfAStep) {
  HealthPage page = MakePage();
  page.BeginGeneration(1);
  page.CommitStep(1);
  for (const Phase phase : {Phase::kCheckpoint, Phase::kEvaluation}) {
    page.EnterPhase(phase);
    Spend(20'000);
    page.EnterPhase(Phase::kOther);
  }
  const HealthPage::Snapshot between = page.Read();
  EXPECT_EQ(between.step_start_monotonic_ns, between.phase_start_monotonic_ns);
  page.CommitStep(2);
  const HealthPage::Snapshot after = page.Read();
  EXPECT_LE(after.longest_step_us,
            (after.last_commit_monotonic_ns - between.last_commit_monotonic_ns) / 1000 - 40'000);
}

TEST(HealthPageTest, ProgressBeginsThePhaseAnewAndNothingElse) {
  HealthPage page = MakePage();
  page.BeginGeneration(1);
  page.CommitStep(1);
  page.EnterPhase(Phase::kCheckpoint);
  const HealthPage::Snapshot before = page.Read();
  Spend(1000);
  page.Progress();
  const HealthPage::Snapshot after = page.Read();
  EXPECT_EQ(after.phase, Phase::kCheckpoint);
  EXPECT_GE(after.phase_start_monotonic_ns, before.phase_start_monotonic_ns + 1'000'000);
  EXPECT_EQ(after.commits, 1);
  // The time of this phase counts in full.
  page.CommitStep(2);
  EXPECT_GE(Total(page.Read(), Phase::kCheckpoint), 1000);
}

TEST(HealthPageTest, FailedSavesAreCountedAndTheNewestReasonIsKept) {
  HealthPage agent = MakePage();
  agent.BeginGeneration(1);
  HealthPage worker = MapAgain(agent);
  EXPECT_EQ(agent.Read().failed_saves, 0);
  EXPECT_EQ(agent.Read().save_error, "");
  worker.RecordSave("/disk/step-1: No space left on device");
  worker.RecordSave("/disk: I/O error");
  EXPECT_EQ(agent.Read().failed_saves, 2);
  EXPECT_EQ(agent.Read().failed_saves_in_a_row, 2);
  EXPECT_EQ(agent.Read().save_error, "/disk: I/O error");
  worker.RecordSave("");
  EXPECT_EQ(agent.Read().failed_saves, 2);
  EXPECT_EQ(agent.Read().failed_saves_in_a_row, 0);
  EXPECT_EQ(agent.Read().save_error, "/disk: I/O error");
  agent.BeginGeneration(2);
  EXPECT_EQ(agent.Read().failed_saves, 0);
  EXPECT_EQ(agent.Read().save_error, "");
}

TEST(HealthPageTest, ALongReasonKeepsItsEnds) {
  HealthPage page = MakePage();
  page.RecordSave(std::string(HealthPage::kSaveErrorBytes, 'x'));
  EXPECT_EQ(page.Read().save_error, std::string(HealthPage::kSaveErrorBytes, 'x'));
  page.RecordSave("cannot write /" + std::string(1000, 'x') + ": No space left on device");
  const std::string path = page.Read().save_error;
  EXPECT_EQ(path.size(), HealthPage::kSaveErrorBytes);
  EXPECT_THAT(path, AllOf(StartsWith("cannot write /x"), HasSubstr("x...x"),
                          EndsWith(": No space left on device")));
  // Two-byte characters are not cut, at even or odd offsets.
  for (const std::string begin : {"", "x"}) {
    std::string text = begin;
    for (int i = 0; i < 500; ++i) text += "\xc3\xa4";
    page.RecordSave(text);
    const std::string kept = page.Read().save_error;
    EXPECT_GE(kept.size(), HealthPage::kSaveErrorBytes - 2);
    const size_t gap = kept.find("...");
    ASSERT_NE(gap, std::string::npos);
    EXPECT_EQ((gap - begin.size()) % 2, 0u);
    EXPECT_EQ(kept[gap + 3], '\xc3');
  }
  page.RecordSave(std::string("a\0b", 3));
  EXPECT_EQ(page.Read().save_error, "a");
}

TEST(HealthPageTest, ThereIsNoStartupAfterTheFirstCommit) {
  HealthPage page = MakePage();
  page.BeginGeneration(1);
  page.EnterPhase(Phase::kData);
  page.EnterPhase(Phase::kStartup);
  EXPECT_EQ(page.Read().phase, Phase::kStartup);
  page.EnterPhase(Phase::kData);
  page.CommitStep(1);
  EXPECT_EQ(page.Read().phase, Phase::kData);
  page.EnterPhase(Phase::kStartup);
  EXPECT_EQ(page.Read().phase, Phase::kOther);
}

TEST(HealthPageTest, AWorkerStopsAfterTheStepItIsAskedTo) {
  HealthPage agent = MakePage();
  agent.BeginGeneration(1);
  HealthPage worker = MapAgain(agent);
  EXPECT_FALSE(agent.Read().stop_aware);
  EXPECT_FALSE(worker.ShouldStop());
  EXPECT_TRUE(agent.Read().stop_aware);
  agent.RequestStop(12);
  EXPECT_FALSE(worker.ShouldStop());  // after a restore no step is committed yet
  worker.CommitStep(11);
  EXPECT_FALSE(worker.ShouldStop());
  EXPECT_FALSE(agent.Read().stopped_as_asked);
  worker.CommitStep(12);
  EXPECT_TRUE(worker.ShouldStop());
  EXPECT_TRUE(agent.Read().stopped_as_asked);
  agent.ClearStop();
  EXPECT_TRUE(worker.ShouldStop());
}

TEST(HealthPageTest, ARequestIsTakenBackReplacedAndForgotten) {
  HealthPage page = MakePage();
  page.BeginGeneration(1);
  page.CommitStep(5);
  page.RequestStop(7);
  page.ClearStop();
  page.CommitStep(7);
  EXPECT_FALSE(page.ShouldStop());
  page.RequestStop(9);
  page.RequestStop(8);
  page.CommitStep(8);
  EXPECT_TRUE(page.ShouldStop());
  page.BeginGeneration(2);
  page.CommitStep(9);
  EXPECT_FALSE(page.ShouldStop());
  EXPECT_FALSE(page.Read().stopped_as_asked);
}

TEST(HealthPageTest, AStopAtOnceWaitsForNoStep) {
  HealthPage page = MakePage();
  page.BeginGeneration(1);
  page.RequestStop(HealthPage::kStopAtOnce);
  EXPECT_TRUE(page.ShouldStop());
}

TEST(HealthPageTest, AnotherProcessCommitsThroughAnInheritedDescriptor) {
  HealthPage page = MakePage();
  const int status = RunInChild([&page] {
    absl::StatusOr<HealthPage> mine = HealthPage::Map(page.fd());
    if (!mine.ok()) _exit(1);
    mine->CommitStep(12);
  });
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(page.Read().step, 12);
}

TEST(HealthPageTest, ReaderSeesThatTheWorkerWasKilled) {
  HealthPage page = MakePage();
  int attached[2];
  ASSERT_EQ(pipe(attached), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    absl::StatusOr<HealthPage> mine = HealthPage::Map(page.fd());
    if (!mine.ok() || !mine->Attach().ok()) _exit(1);
    (void)!write(attached[1], "x", 1);
    for (;;) pause();
  }
  char byte = 0;
  ASSERT_EQ(read(attached[0], &byte, 1), 1);
  EXPECT_EQ(page.Read().worker, HealthPage::Worker::kAttached);
  EXPECT_EQ(page.Attach().code(), absl::StatusCode::kFailedPrecondition);

  kill(pid, SIGKILL);
  ASSERT_EQ(waitpid(pid, nullptr, 0), pid);
  EXPECT_EQ(page.Read().worker, HealthPage::Worker::kDied);
  close(attached[0]);
  close(attached[1]);
}

TEST(HealthPageTest, AWorkerMayTakeOverThePageOfADeadOne) {
  HealthPage page = MakePage();
  RunInChild([&page] { _exit(HealthPage::Map(page.fd())->Attach().ok() ? 0 : 1); });
  ASSERT_EQ(page.Read().worker, HealthPage::Worker::kDied);
  EXPECT_TRUE(page.Attach().ok());
  EXPECT_EQ(page.Read().worker, HealthPage::Worker::kAttached);
}

TEST(HealthPageTest, ThePageCannotShrinkUnderItsReader) {
  const HealthPage page = MakePage();
  EXPECT_EQ(ftruncate(page.fd(), 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_FALSE(page.Read().has_step);
}

TEST(HealthPageTest, ReadsEndWhateverThePageHolds) {
  HealthPage page = MakePage();
  auto* bytes = static_cast<unsigned char*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, page.fd(), 0));
  ASSERT_NE(bytes, MAP_FAILED);
  for (int value : {0xff, 0x80, 0x01}) {
    for (int i = 0; i < 4096; ++i) bytes[i] = static_cast<unsigned char>(value);
    const HealthPage::Snapshot snapshot = page.Read();
    EXPECT_LT(static_cast<int>(snapshot.phase), kPhaseCount);
    EXPECT_GE(snapshot.commits, 0);
    EXPECT_GE(snapshot.longest_step_us, 0);
    EXPECT_GE(snapshot.failed_saves, 0);
    EXPECT_GE(snapshot.failed_saves_in_a_row, 0);
    EXPECT_LE(snapshot.save_error.size(), HealthPage::kSaveErrorBytes);
    // The worker's arithmetic on its own page must not overflow.
    page.EnterPhase(Phase::kCheckpoint);
    page.CommitStep(1);
    page.ShouldStop();
    page.RecordSave("an error");
  }
  EXPECT_TRUE(page.Read().has_step);
  munmap(bytes, 4096);
}

TEST(HealthPageTest, ReaderNeverSeesHalfACommit) {
  HealthPage page = MakePage();
  HealthPage worker = MapAgain(page);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t generation = 1; !stop.load(std::memory_order_relaxed); ++generation) {
      worker.BeginGeneration(generation);
      worker.EnterPhase(Phase::kForward);
      worker.CommitStep(static_cast<int64_t>(generation));
      worker.EnterPhase(Phase::kData);
      Spend(1);
    }
  });
  for (int i = 0; i < 20'000; ++i) {
    const HealthPage::Snapshot snapshot = page.Read();
    if (snapshot.has_step) {
      EXPECT_EQ(static_cast<uint64_t>(snapshot.step), snapshot.generation);
      EXPECT_EQ(snapshot.commits, 1);
      EXPECT_TRUE(snapshot.phase == Phase::kForward || snapshot.phase == Phase::kData);
    }
  }
  stop = true;
  writer.join();
}

TEST(HealthPageTest, RefusesWhatIsNoHealthPage) {
  EXPECT_EQ(HealthPage::Map(-1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(HealthPage::Map(1'000'000).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(HealthPage::Map(open("/dev/null", O_RDWR)).status().message(),
              HasSubstr("is not a health page"));
  const int wrong_magic = memfd_create("other", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(wrong_magic, 4096), 0);
  EXPECT_THAT(HealthPage::Map(wrong_magic).status().message(), HasSubstr("wrong magic"));
  const int short_file = memfd_create("other", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(short_file, 100), 0);
  EXPECT_EQ(HealthPage::Map(short_file).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(HealthPageTest, WithoutMemfdCreateThePageIsADeletedFile) {
  bool refused = false;
  std::thread([&] {
    refused = testing::RefuseCalls({{SYS_memfd_create, EPERM}});
    const absl::StatusOr<HealthPage> page = HealthPage::Create();
    ASSERT_TRUE(page.ok()) << page.status();
    HealthPage mapped = MapAgain(*page);
    mapped.CommitStep(7);
    EXPECT_EQ(page->Read().step, 7);
    struct stat info {};
    EXPECT_EQ(fstat(page->fd(), &info), 0);
    EXPECT_EQ(info.st_nlink, 0);
  }).join();
  if (!refused) GTEST_SKIP() << "filters of system calls are not allowed here";
}

// Another try may find free descriptors; a filter refuses for good.
TEST(HealthPageTest, WithoutAnyFileItNamesTheCalls) {
  for (const int error : {EMFILE, EPERM}) {
    bool refused = false;
    std::thread([&] {
      refused = testing::RefuseCalls({{SYS_memfd_create, error}, {SYS_openat, error}});
      if (!refused) return;
      const absl::Status status = HealthPage::Create().status();
      EXPECT_EQ(status.code(), error == EPERM ? absl::StatusCode::kUnimplemented
                                              : absl::StatusCode::kResourceExhausted);
      const std::string text = std::strerror(error);
      EXPECT_THAT(status.message(), HasSubstr("memfd_create: " + text));
      EXPECT_THAT(status.message(), HasSubstr("a file in /dev/shm: " + text));
    }).join();
    if (!refused) GTEST_SKIP() << "filters of system calls are not allowed here";
  }
}

TEST(HealthPageTest, NamesBothVersionsWhenTheyDiffer) {
  HealthPage page = MakePage();
  const uint32_t newer = 99;
  ASSERT_EQ(pwrite(page.fd(), &newer, sizeof(newer), 8), 4);
  const absl::Status status = HealthPage::Map(dup(page.fd())).status();
  EXPECT_THAT(status.message(), HasSubstr("version 99"));
  EXPECT_THAT(status.message(), HasSubstr("this program knows 4"));
}

}  // namespace
}  // namespace ddp::elastic
