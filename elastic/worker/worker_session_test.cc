#include "elastic/worker/worker_session.h"

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "ddp/common/peer_wait.h"
#include "elastic/health/health_page.h"
#include "elastic/health/phase.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

Variables RankOneOfTwo() {
  return {{"RANK", "1"},
          {"WORLD_SIZE", "2"},
          {"LOCAL_RANK", "1"},
          {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_PORT", "1234"},
          {"MASTER_ADDR", "127.0.0.1"},
          {"DDP_GENERATION", "4"},
          {"DDP_GENERATION_NONCE", "c0ffee"},
          {"TORCHELASTIC_RUN_ID", "digits"},
          {"TORCHELASTIC_RESTART_COUNT", "3"},
          {"TORCHELASTIC_MAX_RESTARTS", "5"}};
}

// Runs `body` in a child process, because the health page is bound to a process's life. The child's
// environment holds `variables` of a launcher and no others. The child exits with `body`'s result.
int RunWith(const Variables& variables, const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    clearenv();
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    _exit(body());
  }
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status)) << "status " << status;
  return WEXITSTATUS(status);
}

// Checks, in a child process, the message of the exception that from_environment() throws.
void ExpectRefused(const Variables& variables, const std::string& expected) {
  EXPECT_EQ(RunWith(variables,
                    [&expected] {
                      try {
                        WorkerSession::from_environment();
                      } catch (const std::runtime_error& error) {
                        EXPECT_THAT(error.what(), HasSubstr(expected));
                        return ::testing::Test::HasFailure() ? 1 : 0;
                      }
                      return 2;
                    }),
            0);
}

TEST(WorkerSessionTest, WithoutALauncherItIsAJobOfItsOwn) {
  EXPECT_EQ(RunWith({},
                    [] {
                      WorkerSession session = WorkerSession::from_environment();
                      session.commit(1);
                      EXPECT_EQ(session.rank(), 0);
                      EXPECT_EQ(session.world_size(), 1);
                      EXPECT_EQ(session.local_rank(), 0);
                      EXPECT_EQ(session.generation(), 0u);
                      EXPECT_EQ(session.local_world_size(), 1);
                      EXPECT_EQ(session.restart_count(), 0);
                      EXPECT_EQ(session.max_restarts(), 0);
                      EXPECT_FALSE(session.is_restart());
                      EXPECT_FALSE(session.should_stop());
                      auto phase = session.phase(Phase::kData);  // no agent: no effect
                      EXPECT_EQ(session.run_id(), "");
                      return ::testing::Test::HasFailure() ? 1 : 0;
                    }),
            0);
}

TEST(WorkerSessionTest, TellsWhatTheLauncherSaid) {
  EXPECT_EQ(RunWith(RankOneOfTwo(),
                    [] {
                      WorkerSession session = WorkerSession::from_environment();
                      session.commit(1);  // no agent: no effect
                      EXPECT_EQ(session.rank(), 1);
                      EXPECT_EQ(session.world_size(), 2);
                      EXPECT_EQ(session.local_rank(), 1);
                      EXPECT_EQ(session.generation(), 4u);
                      EXPECT_EQ(session.generation_nonce(), "c0ffee");
                      EXPECT_EQ(session.local_world_size(), 2);
                      EXPECT_EQ(session.restart_count(), 3);
                      EXPECT_EQ(session.max_restarts(), 5);
                      EXPECT_TRUE(session.is_restart());
                      EXPECT_EQ(session.run_id(), "digits");
                      return ::testing::Test::HasFailure() ? 1 : 0;
                    }),
            0);
}

TEST(WorkerSessionTest, CommitsReachTheAgentsPage) {
  absl::StatusOr<HealthPage> page = HealthPage::Create();
  ASSERT_TRUE(page.ok()) << page.status();
  page->BeginGeneration(4);
  Variables variables = RankOneOfTwo();
  variables[kHealthFdVariable] = absl::StrCat(page->fd());
  EXPECT_FALSE(page->Read().has_step);
  EXPECT_EQ(RunWith(variables,
                    [] {
                      {
                        WorkerSession session = WorkerSession::from_environment();
                        session.commit(100);
                      }
                      // A second session of one process writes to the same page.
                      WorkerSession again = WorkerSession::from_environment();
                      again.commit(101);
                      return 0;
                    }),
            0);
  const HealthPage::Snapshot snapshot = page->Read();
  EXPECT_TRUE(snapshot.has_step);
  EXPECT_EQ(snapshot.step, 101);
  EXPECT_EQ(snapshot.generation, 4u);
  EXPECT_LT(snapshot.first_commit_monotonic_ns, snapshot.last_commit_monotonic_ns);
  EXPECT_EQ(snapshot.worker, HealthPage::Worker::kDied);
}

TEST(WorkerSessionTest, AnyGenerationAfterTheFirstIsARestart) {
  Variables variables = RankOneOfTwo();
  variables["TORCHELASTIC_RESTART_COUNT"] = "0";
  for (const auto& [generation, expected] : {std::pair("1", false), std::pair("2", true)}) {
    variables["DDP_GENERATION"] = generation;
    const bool is_restart = expected;
    EXPECT_EQ(RunWith(variables,
                      [is_restart] {
                        return WorkerSession::from_environment().is_restart() == is_restart ? 0 : 1;
                      }),
              0);
  }
}

// Holds the agent's side of a health page, for workers that RunWith() starts.
class WithPageTest : public ::testing::Test {
 protected:
  WithPageTest() : page_(HealthPage::Create()) {
    EXPECT_TRUE(page_.ok()) << page_.status();
    page_->BeginGeneration(4);
    variables_[kHealthFdVariable] = absl::StrCat(page_->fd());
  }

  absl::StatusOr<HealthPage> page_;
  Variables variables_ = RankOneOfTwo();
};

TEST_F(WithPageTest, PhasesNestAndReachTheAgent) {
  EXPECT_EQ(RunWith(variables_,
                    [this] {
                      WorkerSession session = WorkerSession::from_environment();
                      const auto phase = [this] { return page_->Read().phase; };
                      EXPECT_EQ(phase(), Phase::kStartup);
                      {
                        auto data = session.phase(Phase::kData);
                        EXPECT_EQ(phase(), Phase::kData);
                        {
                          auto wait = session.phase(Phase::kSynchronize);
                          EXPECT_EQ(phase(), Phase::kSynchronize);
                        }
                        EXPECT_EQ(phase(), Phase::kData);
                      }
                      EXPECT_EQ(phase(), Phase::kStartup);
                      session.commit(1);
                      EXPECT_EQ(phase(), Phase::kOther);
                      try {
                        auto forward = session.phase(Phase::kForward);
                        throw std::runtime_error("x");
                      } catch (const std::runtime_error&) {
                        EXPECT_EQ(phase(), Phase::kOther);
                      }
                      return ::testing::Test::HasFailure() ? 1 : 0;
                    }),
            0);
}

TEST_F(WithPageTest, WaitsForPeersAreToldFromTheThreadThatCommits) {
  EXPECT_EQ(RunWith(variables_,
                    [this] {
                      WorkerSession session = WorkerSession::from_environment();
                      const auto phase = [this] { return page_->Read().phase; };
                      {
                        const PeerWaitScope startup;
                        EXPECT_EQ(phase(), Phase::kStartup);
                      }
                      EXPECT_FALSE(page_->Read().tells_waits);
                      session.commit(1);
                      {
                        auto backward = session.phase(Phase::kBackward);
                        {
                          const PeerWaitScope wait;
                          EXPECT_EQ(phase(), Phase::kSynchronize);
                        }
                        EXPECT_EQ(phase(), Phase::kBackward);
                        std::thread([&] {
                          const PeerWaitScope wait;
                          EXPECT_EQ(phase(), Phase::kBackward);
                        }).join();
                      }
                      EXPECT_TRUE(page_->Read().tells_waits);
                      auto save = session.phase(Phase::kCheckpoint);
                      const PeerWaitScope wait;
                      EXPECT_EQ(phase(), Phase::kCheckpoint);
                      return ::testing::Test::HasFailure() ? 1 : 0;
                    }),
            0);
}

TEST_F(WithPageTest, FailedSavesReachTheAgent) {
  EXPECT_EQ(RunWith(variables_,
                    [] {
                      WorkerSession session = WorkerSession::from_environment();
                      session.report_save("disk full");
                      session.report_save("disk still full");
                      return 0;
                    }),
            0);
  EXPECT_EQ(page_->Read().failed_saves, 2);
  EXPECT_EQ(page_->Read().failed_saves_in_a_row, 2);
  EXPECT_EQ(page_->Read().save_error, "disk still full");
}

TEST_F(WithPageTest, TheLargestWorldReachesTheAgentAndEndsWithTheGeneration) {
  EXPECT_EQ(page_->Read().max_world_size, 0);
  EXPECT_EQ(RunWith(variables_,
                    [] {
                      WorkerSession::from_environment().set_max_world_size(12);
                      return 0;
                    }),
            0);
  EXPECT_EQ(page_->Read().max_world_size, 12);
  page_->BeginGeneration(99);
  EXPECT_EQ(page_->Read().max_world_size, 0);
}

TEST_F(WithPageTest, StopsAfterTheStepThatTheAgentNames) {
  page_->RequestStop(12);
  EXPECT_EQ(RunWith(variables_,
                    [] {
                      WorkerSession session = WorkerSession::from_environment();
                      for (int64_t step = 10;; ++step) {
                        if (session.should_stop()) return static_cast<int>(step - 1);
                        if (step > 20) return 100;
                        session.commit(step);
                      }
                    }),
            12);
  EXPECT_EQ(page_->Read().step, 12);
  EXPECT_TRUE(page_->Read().stop_aware);
  EXPECT_TRUE(page_->Read().stopped_as_asked);
}

TEST(WorkerSessionTest, WithoutAnAgentSigtermIsAReasonToStop) {
  EXPECT_EQ(RunWith(RankOneOfTwo(),
                    [] {
                      WorkerSession session = WorkerSession::from_environment();
                      session.handle_sigterm();
                      if (session.should_stop()) return 1;
                      raise(SIGTERM);
                      return session.should_stop() && WorkerSession(session).should_stop() ? 0 : 2;
                    }),
            0);
}

TEST_F(WithPageTest, OnlyTheAgentsSigtermIsAReasonToStop) {
  EXPECT_EQ(RunWith(variables_,
                    [] {
                      WorkerSession session = WorkerSession::from_environment();
                      session.handle_sigterm();
                      raise(SIGTERM);  // as from a scheduler that signals every process
                      return session.should_stop() ? 1 : 0;
                    }),
            0);
  const int status = RunWith(variables_, [] {
    WorkerSession session = WorkerSession::from_environment();
    session.handle_sigterm();
    sigset_t blocked, before;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGTERM);
    sigprocmask(SIG_BLOCK, &blocked, &before);
    // SIGTERM must come from the parent. This child therefore plays the agent, and forks a child of
    // its own that plays the worker.
    const pid_t worker = getpid();
    int tells[2];
    if (pipe(tells) != 0) return 1;
    const pid_t child = fork();
    if (child == 0) {
      WorkerSession mine = session;
      sigprocmask(SIG_SETMASK, &before, nullptr);
      (void)!write(tells[1], "x", 1);
      const int64_t deadline_ns = MonotonicNanoseconds() + int64_t{30} * 1'000'000'000;
      while (!mine.should_stop() && MonotonicNanoseconds() < deadline_ns) sched_yield();
      _exit(mine.should_stop() && getppid() == worker ? 0 : 1);
    }
    char byte = 0;
    if (read(tells[0], &byte, 1) != 1) return 1;
    kill(child, SIGTERM);
    int child_status = 0;
    waitpid(child, &child_status, 0);
    return WIFEXITED(child_status) ? WEXITSTATUS(child_status) : 3;
  });
  EXPECT_EQ(status, 0);
}

TEST(WorkerSessionTest, IncompleteOrWrongEnvironmentIsRefusedByName) {
  Variables no_world_size = RankOneOfTwo();
  no_world_size.erase("WORLD_SIZE");
  ExpectRefused(no_world_size, "WORLD_SIZE is not set");
  Variables words = RankOneOfTwo();
  words["RANK"] = "one";
  ExpectRefused(words, "RANK=\"one\"");
  Variables outside = RankOneOfTwo();
  outside["RANK"] = "2";
  ExpectRefused(outside, "RANK=2");
}

TEST(WorkerSessionTest, DescriptorThatIsNoPageIsRefused) {
  Variables variables = RankOneOfTwo();
  variables[kHealthFdVariable] = "987";
  ExpectRefused(variables, "987");
  variables[kHealthFdVariable] = "0";
  ExpectRefused(variables, "not a health page");
}

}  // namespace
}  // namespace ddp::elastic
