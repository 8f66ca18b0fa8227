// Length: all cases share the fixture, which is an agent with a fake rendezvous and fake workers.

#include "elastic/agent/agent.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/process/oom_kills.h"
#include "base/task_thread.h"
#include "base/unique_fd.h"
#include "elastic/agent/event_log.h"
#include "elastic/agent/job_result.h"
#include "elastic/agent/launch_config.h"
#include "elastic/agent/node_status_tracker.h"
#include "elastic/agent/process_spawner.h"
#include "elastic/health/health_page.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "testing/fake_clock.h"
#include "testing/fake_process_spawner.h"
#include "testing/fake_rendezvous.h"
#include "testing/file_tree.h"

namespace ddp::elastic {
namespace {

using ::ddp::testing::FakeProcessSpawner;
using ::ddp::testing::FakeRendezvous;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using Worker = FakeProcessSpawner::Worker;

class AgentTest : public ::testing::Test {
 protected:
  AgentTest()
      : log_path_(absl::StrCat(::testing::TempDir(), "/agent-events-", getpid(), ".jsonl")) {
    setenv("OMP_NUM_THREADS", "1", 1);
    config_.job.run_id = "digits";
    config_.nproc_per_node = 2;
    config_.command = {"./train", "--rank=${local_rank}"};
  }
  ~AgentTest() override { unlink(log_path_.c_str()); }

  void SetUp() override {
    absl::StatusOr<std::unique_ptr<EventLoop>> loop = EventLoop::Create();
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
    loop_->AddTimer(absl::Seconds(60), [] {
      ADD_FAILURE() << "the job did not end";
      abort();
    });
    rendezvous_ = std::make_unique<FakeRendezvous>(loop_.get(), /*max_restarts=*/2);
    config_.job.limits.max_restarts = 2;
  }

  // Calls `what` in the next turn of the loop.
  void Soon(std::function<void()> what) { loop_->AddTimer(absl::ZeroDuration(), std::move(what)); }

  // Calls `behave` for each started worker, in the next turn of the loop.
  void OnStart(std::function<void(const Worker&)> behave) {
    spawner_.OnSpawn(
        [this, behave](const Worker& worker) { Soon([behave, worker] { behave(worker); }); });
  }

  // Workers end by the signals that they get.
  void ObeySignals() {
    spawner_.OnSignal([this](const Worker& worker, int signal) {
      Soon([this, pid = worker.pid, signal] { spawner_.Exit(pid, {.signal = signal}); });
    });
  }

  JobResult Run() {
    absl::StatusOr<EventLog> log = EventLog::Open(log_path_, config_.job.run_id);
    EXPECT_TRUE(log.ok()) << log.status();
    NodeStatusTracker status({.job = config_.job, .host = config_.host});
    Agent agent(config_, {.event_loop = loop_.get(),
                          .spawner = &spawner_,
                          .rendezvous = rendezvous_.get(),
                          .clock = &clock_,
                          .event_log = &*log,
                          .status = &status,
                          .files = files_,
                          .oom_kills = oom_kills_});
    ::testing::internal::CaptureStderr();
    const JobResult result = agent.Run();
    stderr_ = ::testing::internal::GetCapturedStderr();
    return result;
  }

  std::vector<nlohmann::json> Events(const std::string& name) const {
    std::ifstream file(log_path_);
    std::vector<nlohmann::json> events;
    for (std::string line; std::getline(file, line);) {
      nlohmann::json event = nlohmann::json::parse(line);
      if (event["event"] == name) events.push_back(std::move(event));
    }
    return events;
  }

  // Ends all workers when the log has `count` first steps, which the agent's timer finds.
  void EndAllOnceLogged(size_t count) {
    if (Events("first_step").size() < count) {
      loop_->AddTimer(absl::Milliseconds(1), [this, count] { EndAllOnceLogged(count); });
      return;
    }
    for (const Worker& worker : std::vector<Worker>(spawner_.workers())) {
      spawner_.Exit(worker.pid, {});
    }
  }

  // Makes the worker do one step per turn, beginning with `step`, until it should stop.
  void StepUntilAsked(const Worker& worker, int64_t step) {
    absl::StatusOr<HealthPage> page = HealthPage::Map(dup(worker.spec.inherited_fds[0]));
    page->CommitStep(step);
    if (page->ShouldStop()) {
      stopped_after_.push_back(step);
      return spawner_.Exit(worker.pid, {});
    }
    Soon([this, worker, step] { StepUntilAsked(worker, step + 1); });
  }

  const std::string log_path_;
  LaunchConfig config_;
  MonotonicClock clock_;
  std::unique_ptr<EventLoop> loop_;
  FakeProcessSpawner spawner_;
  std::unique_ptr<FakeRendezvous> rendezvous_;
  TaskThread* files_ = nullptr;
  OomKills* oom_kills_ = nullptr;
  std::string stderr_;
  std::vector<int64_t> stopped_after_;
  std::vector<HealthPage> pages_;  // of workers that hang
};

TEST_F(AgentTest, RunsTheWorkersToTheEnd) {
  OnStart([this](const Worker& worker) { spawner_.Exit(worker.pid, {}); });
  const JobResult result = Run();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.failures, IsEmpty());
  EXPECT_EQ(result.reason, "");
  EXPECT_EQ(stderr_, "");
  EXPECT_THAT(rendezvous_->requests(), ElementsAre("join", "complete 1", "leave"));

  ASSERT_EQ(spawner_.workers().size(), 2u);
  const WorkerSpec& spec = spawner_.workers()[1].spec;
  EXPECT_EQ(spec.local_rank, 1);
  EXPECT_EQ(spec.rank, 1);
  EXPECT_EQ(spec.attempt, 0);
  EXPECT_THAT(spec.argv, ElementsAre("./train", "--rank=1"));
  EXPECT_THAT(spec.environment, Contains(Pair("WORLD_SIZE", "2")));
  EXPECT_THAT(spec.environment, Contains(Pair("DDP_STORE", "unix:///fake.sock?prefix=g1")));
  ASSERT_EQ(spec.inherited_fds.size(), 1u);
  EXPECT_EQ(spec.environment.at("DDP_HEALTH_FD"), std::to_string(spec.inherited_fds[0]));
  EXPECT_EQ(spec.environment.at("MASTER_PORT"),
            std::to_string(rendezvous_->offers()[0].master_port));

  EXPECT_EQ(Events("generation_started").size(), 1u);
  EXPECT_EQ(Events("worker_exited").size(), 2u);
  EXPECT_EQ(Events("job_finished").at(0)["exit_code"], 0);
}

TEST_F(AgentTest, AKilledRankStartsANewGeneration) {
  ObeySignals();
  OnStart([this](const Worker& worker) {
    if (worker.pid > 1002) return spawner_.Exit(worker.pid, {});
    if (worker.spec.rank == 1) spawner_.Exit(worker.pid, {.signal = SIGKILL});
  });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_EQ(stderr_, "restart 1 of 2: generation 2: rank 1 was killed by SIGKILL\n");
  EXPECT_THAT(spawner_.workers()[0].signals, ElementsAre(SIGTERM));
  ASSERT_EQ(spawner_.workers().size(), 4u);
  const WorkerSpec& second = spawner_.workers()[2].spec;
  EXPECT_EQ(second.attempt, 1);
  EXPECT_THAT(second.environment, Contains(Pair("TORCHELASTIC_RESTART_COUNT", "1")));
  EXPECT_THAT(second.environment, Contains(Pair("DDP_GENERATION", "2")));
  EXPECT_THAT(second.environment, Contains(Pair("DDP_STORE", "unix:///fake.sock?prefix=g2")));
  EXPECT_EQ(spawner_.strays_killed(), 2);

  const nlohmann::json restart = Events("restart").at(0);
  EXPECT_EQ(restart["generation"], 2);
  EXPECT_EQ(restart["restart"], 1);
  EXPECT_EQ(restart["max_restarts"], 2);
  EXPECT_EQ(restart["reason"], "rank 1 was killed by SIGKILL");
  EXPECT_EQ(Events("worker_exited").at(0)["signal"], SIGKILL);
}

TEST_F(AgentTest, ARankThatTheOomKillerEndedIsReportedAsThat) {
  ::ddp::testing::FileTree tree;
  tree.Write("proc/vmstat", "oom_kill 1\n");
  OomKills kills(tree.root());
  oom_kills_ = &kills;
  ObeySignals();
  OnStart([&](const Worker& worker) {
    if (worker.spec.rank == 0) return;
    // The first two, one of them behind a shell, are the kernel's; the last one is a user's.
    if (worker.spec.attempt < 2) tree.Write("proc/vmstat", absl::StrCat("oom_kill ", worker.pid));
    spawner_.Exit(worker.pid, worker.spec.attempt == 1 ? ExitStatus{.exit_code = 128 + SIGKILL}
                                                       : ExitStatus{.signal = SIGKILL});
  });
  const JobResult result = Run();
  EXPECT_THAT(stderr_, AllOf(HasSubstr("rank 1 was killed by SIGKILL, out of memory: that of"),
                             HasSubstr("rank 1 exited with code 137, out of memory: that of")));
  EXPECT_EQ(result.failures.at(0).status.cause, "");
  EXPECT_THAT(Events("worker_exited").at(0)["cause"], HasSubstr("out of memory"));
}

// An agent with a keeper, the process that the user started, and a clock that stands still.
class AgentWithKeeperTest : public AgentTest {
 protected:
  AgentWithKeeperTest() {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    keeper_.reset(ends[0]);
    life_.reset(ends[1]);
    config_.job.limits.max_nodes = 2;
  }

  // Runs until the agent calls on_silent.
  void RunUntilSilent() {
    absl::StatusOr<EventLog> log = EventLog::Open(log_path_, config_.job.run_id);
    ASSERT_TRUE(log.ok()) << log.status();
    NodeStatusTracker status({.job = config_.job, .host = config_.host});
    Agent agent(config_, {.event_loop = loop_.get(),
                          .spawner = &spawner_,
                          .rendezvous = rendezvous_.get(),
                          .clock = &fake_clock_,
                          .event_log = &*log,
                          .status = &status,
                          .keeper_fd = keeper_.get(),
                          .on_silent = [this] { loop_->Stop(); }});
    agent.Run();
  }

  ::ddp::testing::FakeClock fake_clock_;
  UniqueFd keeper_;
  UniqueFd life_;  // of the keeper
};

TEST_F(AgentWithKeeperTest, WhoEndsWithTheKeeperIsNotReported) {
  OnStart([this](const Worker& worker) {
    if (worker.spec.rank != 1) return;
    life_.reset();
    spawner_.Exit(worker.pid, {.signal = SIGKILL});
  });
  RunUntilSilent();
  EXPECT_THAT(rendezvous_->requests(), ElementsAre("join"));
}

TEST_F(AgentWithKeeperTest, AReportIsTakenBackWhenTheKeeperEndsAMomentLater) {
  ObeySignals();
  OnStart([this](const Worker& worker) {
    if (worker.spec.rank != 1) return;
    spawner_.Exit(worker.pid, {.signal = SIGKILL});
    fake_clock_.Advance(absl::Milliseconds(50));
    life_.reset();
  });
  RunUntilSilent();
  EXPECT_THAT(rendezvous_->requests(),
              ElementsAre("join", "report rank 1 was killed by SIGKILL", "cancel", "take back 1"));
}

TEST_F(AgentWithKeeperTest, AReportStandsWhenTheKeeperEndsLater) {
  ObeySignals();
  OnStart([this](const Worker& worker) {
    if (worker.spec.rank != 1) return;
    spawner_.Exit(worker.pid, {.signal = SIGKILL});
    fake_clock_.Advance(absl::Milliseconds(51));
    life_.reset();
  });
  RunUntilSilent();
  EXPECT_THAT(rendezvous_->requests(),
              ElementsAre("join", "report rank 1 was killed by SIGKILL", "cancel"));
}

TEST_F(AgentTest, TheReportNamesTheRootCauseOfTheLastGeneration) {
  ObeySignals();
  OnStart([this](const Worker& worker) {
    if (worker.spec.rank == 0) {
      spawner_.Exit(worker.pid, {.exit_code = 3, .error_file = "/logs/0/error.json"});
    }
  });
  const JobResult result = Run();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.reason, "rank 0 exited with code 3, and the budget of 2 restarts is spent");
  ASSERT_EQ(result.failures.size(), 2u);
  EXPECT_TRUE(result.failures[1].was_stopped);
  EXPECT_FALSE(result.failures[0].was_stopped);
  EXPECT_EQ(result.failures[0].rank, 0);
  EXPECT_EQ(result.failures[0].pid, 1005);
  EXPECT_EQ(result.failures[0].status.exit_code, 3);
  EXPECT_EQ(result.failures[0].error_file, "/logs/0/error.json");
  EXPECT_EQ(stderr_,
            "restart 1 of 2: generation 2: rank 0 exited with code 3\n"
            "restart 2 of 2: generation 3: rank 0 exited with code 3\n");
}

TEST_F(AgentTest, AWorkerThatIgnoresSigtermIsKilledAfterTheGrace) {
  config_.job.times.fault_grace = absl::Milliseconds(1);
  spawner_.OnSignal([this](const Worker& worker, int signal) {
    if (signal != SIGKILL) return;
    Soon([this, pid = worker.pid] { spawner_.Exit(pid, {.signal = SIGKILL}); });
  });
  OnStart([this](const Worker& worker) {
    if (worker.pid == 1001) spawner_.Exit(worker.pid, {.exit_code = 1});
    if (worker.pid > 1002) spawner_.Exit(worker.pid, {});
  });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_THAT(spawner_.workers()[1].signals, ElementsAre(SIGTERM, SIGKILL));
}

TEST_F(AgentTest, ForwardsAUsersSignalAndWaits) {
  ObeySignals();
  OnStart([](const Worker& worker) {
    if (worker.spec.rank == 1) kill(getpid(), SIGINT);
  });
  const JobResult result = Run();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.reason, "stopped by SIGINT");
  EXPECT_THAT(result.failures, IsEmpty());
  EXPECT_EQ(stderr_, "ddprun: received SIGINT: stopping 2 workers, at most 30s\n");
  for (const Worker& worker : spawner_.workers()) EXPECT_THAT(worker.signals, ElementsAre(SIGINT));
}

TEST_F(AgentTest, ASecondSignalKills) {
  spawner_.OnSignal([this](const Worker& worker, int signal) {
    if (signal == SIGKILL) {
      Soon([this, pid = worker.pid] { spawner_.Exit(pid, {.signal = SIGKILL}); });
    } else if (worker.spec.rank == 1) {
      // An earlier one would be the same request.
      loop_->AddTimer(absl::Milliseconds(600), [] { kill(getpid(), SIGTERM); });
    }
  });
  OnStart([](const Worker& worker) {
    if (worker.spec.rank == 1) kill(getpid(), SIGTERM);
  });
  EXPECT_EQ(Run().exit_code, 1);
  for (const Worker& worker : spawner_.workers()) {
    EXPECT_THAT(worker.signals, ElementsAre(SIGTERM, SIGKILL));
  }
}

TEST_F(AgentTest, GivesTheSignalsBack) {
  sigset_t before;
  sigprocmask(SIG_SETMASK, nullptr, &before);
  OnStart([this](const Worker& worker) { spawner_.Exit(worker.pid, {}); });
  Run();
  sigset_t after;
  sigprocmask(SIG_SETMASK, nullptr, &after);
  for (int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT}) {
    EXPECT_EQ(sigismember(&before, signal), sigismember(&after, signal));
  }
}

TEST_F(AgentTest, AWorkerThatCannotBeStartedEndsTheJob) {
  ObeySignals();
  spawner_.FailSpawn(1, absl::NotFoundError("./train: no such program"));
  const JobResult result = Run();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.reason, "./train: no such program");
  EXPECT_THAT(spawner_.workers()[0].signals, ElementsAre(SIGKILL));
}

TEST_F(AgentTest, WithoutTheRendezvousNothingStarts) {
  rendezvous_->SetReach(absl::UnavailableError("Redis is away"));
  const JobResult result = Run();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.reason, "the job cannot start: Redis is away");
  EXPECT_THAT(spawner_.workers(), IsEmpty());
}

TEST_F(AgentTest, LosingTheRendezvousDoesNotStopTheWorkers) {
  OnStart([this](const Worker& worker) {
    if (worker.spec.rank != 1) return;
    rendezvous_->Notify({.kind = News::Kind::kOutOfReach, .cause = "Redis is away"});
    rendezvous_->Notify({.kind = News::Kind::kBackInReach});
    for (const Worker& each : std::vector<Worker>(spawner_.workers())) spawner_.Exit(each.pid, {});
  });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_EQ(stderr_,
            "ddprun: the rendezvous is out of reach, the workers go on: Redis is away\n"
            "ddprun: the rendezvous is in reach again\n");
}

TEST_F(AgentTest, AUserMayGiveUpWhileTheRendezvousIsSilent) {
  rendezvous_->StopAnswering();
  Soon([] { kill(getpid(), SIGTERM); });
  const JobResult result = Run();
  EXPECT_EQ(result.reason, "stopped by SIGTERM");
  EXPECT_THAT(rendezvous_->requests(), ElementsAre("join", "cancel", "leave"));
}

TEST_F(AgentTest, LogsTheFirstStepWithTheWorkersOwnStamp) {
  int64_t stamp_ns = 0;
  OnStart([&](const Worker& worker) {
    absl::StatusOr<HealthPage> page = HealthPage::Map(dup(worker.spec.inherited_fds[0]));
    ASSERT_TRUE(page.ok()) << page.status();
    if (worker.spec.rank == 1) {
      page->CommitStep(7);
      page->CommitStep(8);
      stamp_ns = page->Read().first_commit_monotonic_ns;
    }
    spawner_.Exit(worker.pid, {});
  });
  EXPECT_EQ(Run().exit_code, 0);
  const std::vector<nlohmann::json> events = Events("first_step");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0]["rank"], 1);
  EXPECT_EQ(events[0]["step"], 7);
  EXPECT_EQ(events[0]["generation"], 1);
  EXPECT_EQ(events[0]["monotonic_ns"], stamp_ns);
}

TEST_F(AgentTest, SeesTheFirstStepOfAWorkerThatRunsOn) {
  OnStart([this](const Worker& worker) {
    HealthPage::Map(dup(worker.spec.inherited_fds[0]))->CommitStep(1);
    if (worker.spec.rank != 1) return;
    EndAllOnceLogged(2);
  });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_EQ(Events("first_step").size(), 2u);
}

// A worker that polls should_stop(), beside a worker that does not.
TEST_F(AgentTest, ADrainStopsEachWorkerInItsOwnWay) {
  ObeySignals();
  std::vector<bool> asked;
  OnStart([&](const Worker& worker) {
    if (worker.pid > 1002) return spawner_.Exit(worker.pid, {});
    absl::StatusOr<HealthPage> page = HealthPage::Map(dup(worker.spec.inherited_fds[0]));
    ASSERT_TRUE(page.ok()) << page.status();
    page->CommitStep(4);
    if (worker.spec.rank == 0) {
      EXPECT_FALSE(page->ShouldStop());
      return;
    }
    rendezvous_->Notify({.kind = News::Kind::kDrain,
                         .generation = {.number = 1, .nonce = "nonce-1"},
                         .cause = "node b joins",
                         .stop_at_step = 5});
    const Worker& aware = spawner_.workers()[0];
    absl::StatusOr<HealthPage> other = HealthPage::Map(dup(aware.spec.inherited_fds[0]));
    asked.push_back(other->ShouldStop());
    other->CommitStep(5);
    asked.push_back(other->ShouldStop());
    spawner_.Exit(aware.pid, {});
  });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_THAT(asked, ElementsAre(false, true));
  EXPECT_THAT(spawner_.workers()[0].signals, IsEmpty());
  EXPECT_THAT(spawner_.workers()[1].signals, ElementsAre(SIGTERM));
  EXPECT_THAT(rendezvous_->requests(), ElementsAre("join", "join", "complete 2", "leave"));
  EXPECT_EQ(Events("drain").at(0)["stop_at_step"], 5);
  EXPECT_THAT(Events("restart"), IsEmpty());
}

// All workers of this node get the same step, which none has reached.
TEST_F(AgentTest, AUsersSignalStopsAwareWorkersAtOneStep) {
  OnStart([this](const Worker& worker) {
    StepUntilAsked(worker, worker.spec.rank == 0 ? 7 : 9);
    if (worker.spec.rank == 1) kill(getpid(), SIGTERM);
  });
  EXPECT_EQ(Run().reason, "stopped by SIGTERM");
  ASSERT_EQ(stopped_after_.size(), 2u);
  EXPECT_EQ(stopped_after_[0], stopped_after_[1]);
  EXPECT_GT(stopped_after_[0], 9);
  for (const Worker& worker : spawner_.workers()) EXPECT_THAT(worker.signals, IsEmpty());
}

TEST_F(AgentTest, AWorkerThatHangsIsAFailure) {
  ObeySignals();
  // Longer than the pause between two looks.
  config_.job.hangs.floor = absl::Milliseconds(600);
  OnStart([this](const Worker& worker) {
    if (worker.pid > 1002) return spawner_.Exit(worker.pid, {});
    absl::StatusOr<HealthPage> page = HealthPage::Map(dup(worker.spec.inherited_fds[0]));
    ASSERT_TRUE(page.ok()) << page.status();
    // A living thread attaches the page, as in a worker that hangs.
    ASSERT_TRUE(page->Attach().ok());
    for (int step = 1; step <= 100; ++step) page->CommitStep(step);
    pages_.push_back(*std::move(page));
  });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_THAT(stderr_, HasSubstr("restart 1 of 2: generation 2: rank "));
  EXPECT_THAT(stderr_, HasSubstr("made no step for"));
  EXPECT_EQ(Events("hang").size(), 1u);
}

// Ctrl-Z and fg: the workers hang only after they have continued.
TEST_F(AgentTest, WorkersThatCtrlZStopsAreNotHung) {
  config_.job.hangs.floor = absl::Milliseconds(600);
  spawner_.OnSignal([this](const Worker& worker, int signal) {
    if (signal == SIGSTOP || signal == SIGCONT) return;
    Soon([this, pid = worker.pid, signal] { spawner_.Exit(pid, {.signal = signal}); });
  });
  OnStart([this](const Worker& worker) {
    if (worker.pid > 1002) return spawner_.Exit(worker.pid, {});
    absl::StatusOr<HealthPage> page = HealthPage::Map(dup(worker.spec.inherited_fds[0]));
    ASSERT_TRUE(page.ok()) << page.status();
    // Not this thread: it would keep a pointer into the page.
    std::thread([&page] { ASSERT_TRUE(page->Attach().ok()); }).join();
    for (int step = 1; step <= 100; ++step) page->CommitStep(step);
    pages_.push_back(*std::move(page));
    if (worker.spec.rank == 0) return;
    kill(getpid(), SIGTSTP);
    loop_->AddTimer(absl::Milliseconds(1500), [this] {
      EXPECT_EQ(Events("hang").size(), 0u);
      EXPECT_EQ(rendezvous_->report().at_work.value_or(RankAtWork()).phase, "stopped");
      kill(getpid(), SIGCONT);
    });
  });
  EXPECT_EQ(Run().exit_code, 0);
  for (const int worker : {0, 1}) {
    EXPECT_THAT(spawner_.workers().at(worker).signals, ElementsAre(SIGSTOP, SIGCONT, SIGTERM));
  }
  EXPECT_THAT(stderr_,
              AllOf(HasSubstr("received SIGTSTP: the workers are stopped"),
                    HasSubstr("the workers go on after 1"), HasSubstr("made no step for")));
  EXPECT_EQ(Events("hang").size(), 1u);
}

// A worker fails while Ctrl-Z holds the job. The other one goes on to its end; those of the next
// generation are held from their start.
TEST_F(AgentTest, WorkersThatCtrlZStopsAreHeldOverGenerations) {
  spawner_.OnSignal([this](const Worker& worker, int signal) {
    const bool is_first = worker.pid <= 1002;
    if (signal == SIGSTOP && worker.spec.rank == 1 && is_first) {
      Soon([this] { spawner_.Exit(1001, {.exit_code = 1}); });
    }
    if (signal == SIGSTOP && worker.spec.rank == 1 && !is_first) kill(getpid(), SIGCONT);
    if (signal != SIGCONT) return;
    Soon([this, pid = worker.pid, is_first] {
      spawner_.Exit(pid, is_first ? ExitStatus{.signal = SIGTERM} : ExitStatus{});
    });
  });
  OnStart([](const Worker& worker) {
    if (worker.pid == 1002) kill(getpid(), SIGTSTP);
  });
  EXPECT_EQ(Run().exit_code, 0);
  ASSERT_EQ(spawner_.workers().size(), 4u);
  EXPECT_THAT(spawner_.workers().at(1).signals, ElementsAre(SIGSTOP, SIGTERM, SIGCONT));
  for (const int worker : {2, 3}) {
    EXPECT_THAT(spawner_.workers().at(worker).signals, ElementsAre(SIGSTOP, SIGCONT));
  }
}

// A stop reaches workers that Ctrl-Z holds: they can save.
TEST_F(AgentTest, AStopContinuesWorkersThatCtrlZStopped) {
  spawner_.OnSignal([this](const Worker& worker, int signal) {
    if (signal == SIGSTOP && worker.spec.rank == 1) kill(getpid(), SIGTERM);
    if (signal != SIGCONT) return;
    Soon([this, pid = worker.pid] { spawner_.Exit(pid, {.signal = SIGTERM}); });
  });
  OnStart([](const Worker& worker) {
    if (worker.spec.rank == 1) kill(getpid(), SIGTSTP);
  });
  EXPECT_EQ(Run().reason, "stopped by SIGTERM");
  for (const Worker& worker : spawner_.workers()) {
    EXPECT_THAT(worker.signals, ElementsAre(SIGSTOP, SIGTERM, SIGCONT));
  }
}

// Rank 0 of another node works. When it does not any more, the wait counts.
TEST_F(AgentTest, AWaitForARankOfAnotherNodeIsToldAndIsNoHang) {
  ObeySignals();
  config_.job.hangs.floor = absl::Milliseconds(600);
  config_.job.hangs.waiting_floor = absl::Milliseconds(600);
  config_.job.limits.max_nodes = 2;
  rendezvous_->SetPlacement({.group_rank = 1,
                             .group_world_size = 2,
                             .local_world_size = 2,
                             .first_rank = 1,
                             .world_size = 3,
                             .role_world_size = 3,
                             .master_addr = "127.0.0.1",
                             .master_port = 1});
  rendezvous_->SetAtWork(RankAtWork{
      .rank = 0, .phase = "evaluation", .stalled_for = absl::Seconds(90), .host = "other"});
  OnStart([this](const Worker& worker) {
    if (worker.pid > 1002) return spawner_.Exit(worker.pid, {});
    absl::StatusOr<HealthPage> page = HealthPage::Map(dup(worker.spec.inherited_fds[0]));
    ASSERT_TRUE(page.ok()) << page.status();
    // Not this thread: it would keep a pointer into the page.
    std::thread([&page] { ASSERT_TRUE(page->Attach().ok()); }).join();
    for (int step = 1; step <= 100; ++step) page->CommitStep(step);
    page->EnterPhase(Phase::kSynchronize);
    pages_.push_back(*std::move(page));
    loop_->AddTimer(absl::Seconds(2), [this] {
      EXPECT_EQ(Events("hang").size(), 0u);
      EXPECT_FALSE(rendezvous_->report().at_work.has_value());
      rendezvous_->SetAtWork(std::nullopt);
    });
  });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_THAT(stderr_, HasSubstr(" waits for rank 0 of node other, which is in evaluation and has "
                                 "made no step for 1m30s; its own node watches it"));
  EXPECT_EQ(Events("hang").size(), 1u);
}

TEST_F(AgentTest, TellsTheRendezvousHowFarItIs) {
  OnStart([this](const Worker& worker) {
    absl::StatusOr<HealthPage> page = HealthPage::Map(dup(worker.spec.inherited_fds[0]));
    ASSERT_TRUE(page.ok()) << page.status();
    page->CommitStep(40 + worker.spec.rank);
    if (worker.spec.rank == 1) EndAllOnceLogged(2);
  });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_EQ(rendezvous_->report().step, 41);
  EXPECT_THAT(rendezvous_->report().row, HasSubstr("[1,1,1002,41,"));
}

TEST_F(AgentTest, SaysOnceThatItSetsOmpNumThreads) {
  unsetenv("OMP_NUM_THREADS");
  OnStart([this](const Worker& worker) {
    spawner_.Exit(worker.pid, {.exit_code = worker.pid <= 1002 ? 1 : 0});
  });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_THAT(spawner_.workers()[0].spec.environment, Contains(Pair("OMP_NUM_THREADS", "1")));
  const size_t first = stderr_.find("OMP_NUM_THREADS");
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(stderr_.find("OMP_NUM_THREADS", first + 1), std::string::npos);
}

TEST_F(AgentTest, APortInUseIsNamedBeforeAnythingStarts) {
  UniqueFd listener(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  config_.master_port = ntohs(address.sin6_port);
  const JobResult result = Run();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.reason, HasSubstr(absl::StrCat("port ", config_.master_port)));
  EXPECT_THAT(spawner_.workers(), IsEmpty());
}

// Heartbeats are sent while the loop runs.
TEST_F(AgentTest, TheLoopGoesOnWhileStraysDie) {
  OnStart([this](const Worker& worker) { spawner_.Exit(worker.pid, {}); });
  int ticks = 0;
  std::function<void()> tick = [&] {
    EXPECT_THAT(rendezvous_->requests(), ElementsAre("join"));  // nothing is complete yet
    if (++ticks == 20) return spawner_.EndStrays();
    loop_->AddTimer(absl::Milliseconds(1), tick);
  };
  spawner_.HoldStrays([&] { tick(); });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_EQ(ticks, 20);
  EXPECT_THAT(rendezvous_->requests(), ElementsAre("join", "complete 1", "leave"));
}

TEST_F(AgentTest, StraysThatDoNotDieEndTheWaitAtTheLimit) {
  config_.job.times.kill_timeout = absl::Milliseconds(20);
  spawner_.HoldStrays();
  OnStart([this](const Worker& worker) { spawner_.Exit(worker.pid, {}); });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_EQ(stderr_,
            "ddprun: some processes of the workers did not end by SIGKILL within 20ms "
            "(--kill-timeout): going on without\n");
}

TEST_F(AgentTest, TheLoopGoesOnWhileAWorkerIsSlowToStart) {
  spawner_.HoldStart(1);
  int ticks = 0;
  std::function<void()> tick = [&] {
    if (++ticks == 20) return spawner_.FinishStart();
    loop_->AddTimer(absl::Milliseconds(1), tick);
  };
  OnStart([&](const Worker& worker) {
    if (worker.spec.rank == 0) return tick();
    for (const Worker& each : std::vector<Worker>(spawner_.workers())) spawner_.Exit(each.pid, {});
  });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_EQ(ticks, 20);
  EXPECT_EQ(Events("generation_started").size(), 1u);
}

TEST_F(AgentTest, ASignalCutsASlowStartShort) {
  ObeySignals();
  spawner_.HoldStart(1);
  OnStart([](const Worker&) { kill(getpid(), SIGTERM); });
  const JobResult result = Run();
  EXPECT_EQ(result.reason, "stopped by SIGTERM");
  EXPECT_FALSE(spawner_.start_is_held());
  ASSERT_EQ(spawner_.workers().size(), 1u);
  EXPECT_THAT(spawner_.workers()[0].signals, ElementsAre(SIGTERM));
  EXPECT_THAT(Events("generation_started"), IsEmpty());
}

TEST_F(AgentTest, AFailureCutsASlowStartShortAndTheJobRestarts) {
  ObeySignals();
  spawner_.HoldStart(1);
  OnStart([this](const Worker& worker) {
    if (worker.pid > 1001) return spawner_.Exit(worker.pid, {});
    spawner_.HoldStart(-1);
    spawner_.Exit(worker.pid, {.exit_code = 3});
  });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_EQ(stderr_, "restart 1 of 2: generation 2: rank 0 exited with code 3\n");
  EXPECT_EQ(spawner_.workers().size(), 3u);
}

// The error file is on a stalled mount.
TEST_F(AgentTest, TheEndOfAWorkerDoesNotWaitLongForItsErrorFile) {
  ObeySignals();
  int gate[2];
  ASSERT_EQ(pipe2(gate, O_CLOEXEC), 0);
  const auto stalled = std::make_shared<UniqueFd>(gate[0]);
  const UniqueFd open_gate(gate[1]);  // closed at the end of the test
  const auto files = *TaskThread::Create(loop_.get(), "worker-files");
  files_ = files.get();
  files->Run([stalled] { (void)!read(stalled->get(), std::string(1, '.').data(), 1); }, nullptr);
  int ticks = 0;
  std::function<void()> tick = [&] {
    ++ticks;
    loop_->AddTimer(absl::Milliseconds(1), tick);
  };
  OnStart([&](const Worker& worker) {
    if (worker.pid > 1002) return spawner_.Exit(worker.pid, {});
    if (worker.spec.rank != 0) return;
    spawner_.Exit(worker.pid, {.exit_code = 3, .error_file = log_path_});
    tick();
  });
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_GT(ticks, 20);
  EXPECT_EQ(stderr_, "restart 1 of 2: generation 2: rank 0 exited with code 3\n");
}

TEST_F(AgentTest, AVictimIsKnownByItsErrorFile) {
  ObeySignals();
  const std::string path = log_path_ + ".error";
  std::ofstream(path) << R"({"message": {"message": "a peer is gone", "extraInfo": )"
                      << R"({"timestamp": "1", "victim": true}}})";
  const auto files = *TaskThread::Create(loop_.get(), "worker-files");
  files_ = files.get();
  OnStart([&](const Worker& worker) {
    if (worker.spec.rank == 0) {
      spawner_.Exit(worker.pid, {.exit_code = 3, .error_file = path});
    }
  });
  const JobResult result = Run();
  ASSERT_FALSE(result.failures.empty());
  EXPECT_TRUE(result.failures[0].is_victim);
  unlink(path.c_str());
}

}  // namespace
}  // namespace ddp::elastic
