#include "elastic/worker/worker_session.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>

#include "absl/strings/str_cat.h"
#include "elastic/health/health_page.h"
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

// Runs `body` in a child whose environment holds `variables` of a launcher and no others. The child
// exits with what `body` returns: the page is bound to a process's life.
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

// The message of the exception that from_environment throws, checked in the child.
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
                      EXPECT_EQ(session.restart_count(), 0);
                      EXPECT_EQ(session.run_id(), "");
                      return ::testing::Test::HasFailure() ? 1 : 0;
                    }),
            0);
}

TEST(WorkerSessionTest, TellsWhatTheLauncherSaid) {
  EXPECT_EQ(RunWith(RankOneOfTwo(),
                    [] {
                      WorkerSession session = WorkerSession::from_environment();
                      session.commit(1);  // nobody listens
                      EXPECT_EQ(session.rank(), 1);
                      EXPECT_EQ(session.world_size(), 2);
                      EXPECT_EQ(session.local_rank(), 1);
                      EXPECT_EQ(session.generation(), 4u);
                      EXPECT_EQ(session.generation_nonce(), "c0ffee");
                      EXPECT_EQ(session.restart_count(), 3);
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
                      // A second session of one process speaks through the same page.
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
