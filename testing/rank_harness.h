// Runs the ranks of a test as real processes on this host, and reports how each of them ended.
//
// A test names what its ranks do, and its main() hands over to that when it is started as a rank:
//
//   int Average() {                        // runs in every rank's own process
//     EXPECT_EQ(...);                      // gtest's checks work here; a failed one makes the
//     return 0;                            // rank exit with 1
//   }
//
//   TEST(ReducerTest, Averages) {
//     ASSERT_TRUE(ddp::testing::RanksSucceed({.world_size = 2, .body = "average"}));
//   }
//
//   int main(int argc, char** argv) {
//     ::testing::InitGoogleTest(&argc, argv);
//     if (auto exit_code = ddp::testing::RunRankBody({{"average", Average}})) return *exit_code;
//     return RUN_ALL_TESTS();
//   }
//
// Each rank gets the environment that torchrun would give it on one node: RANK, LOCAL_RANK,
// WORLD_SIZE, MASTER_ADDR and so on, DDP_GENERATION, and DDP_STORE where the test names a store.
#ifndef DDP_TESTING_RANK_HARNESS_H_
#define DDP_TESTING_RANK_HARNESS_H_

#include <gtest/gtest.h>
#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace ddp::testing {

// What to run. Exactly one of `body` and `argv` is given.
struct RankJob {
  int world_size = 1;

  std::string body = "";               // a name that this binary's main() gives to RunRankBody()
  std::vector<std::string> argv = {};  // a program and its arguments; argv[0] is looked up on PATH

  // DDP_STORE of every rank; empty: not set, and one inherited from outside is removed.
  std::string store_url = "";
  // MASTER_PORT; 0: one that is free, and kept free for the ranks while the group lives.
  int master_port = 0;
  // Set in every rank, over everything else. A variable with an empty value is removed.
  std::map<std::string, std::string> environment = {};

  // How long the whole group may take. What still runs then is killed, and counts as timed out.
  absl::Duration deadline = absl::Seconds(120);
  // How long the others may go on once a rank has failed: their own report of the failure is
  // worth waiting for, a hang is not.
  absl::Duration deadline_after_failure = absl::Seconds(20);
};

// How a rank ended.
struct RankResult {
  int rank = 0;
  pid_t pid = -1;
  bool timed_out = false;  // killed by the harness, at one of the deadlines
  int exit_code = 0;       // meaningful when signal == 0
  int signal = 0;          // the signal that ended it, or 0
  std::string output;      // stdout and stderr, in the order of writing

  bool succeeded() const { return !timed_out && signal == 0 && exit_code == 0; }
  // "rank 1 (pid 12) exited with code 3".
  std::string Describe() const;
};

// How a group ended: one result per rank, in rank order.
struct RankRun {
  std::vector<RankResult> ranks;

  bool succeeded() const;
  // Every rank's end and its whole output: what a failed test prints.
  std::string Describe() const;
};

// A running group of ranks. Kills and reaps what is left of it on destruction, by pid and process
// group; the kernel does so should this process be killed.
//
// Not thread-safe, and the thread that starts a group must outlive it: the kernel kills the ranks
// when the thread that started them ends. Ranks may block on a full pipe (64 KiB of output)
// between two calls of WaitForOutput() and Wait().
class RankGroup {
 public:
  // Starts every rank. Errors: kInvalidArgument (the job contradicts itself), kNotFound or
  // kPermissionDenied (the program cannot be executed), kResourceExhausted (fork, pipe, port).
  static absl::StatusOr<std::unique_ptr<RankGroup>> Start(const RankJob& job);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  pid_t pid(int rank) const;
  int master_port() const { return master_port_; }
  // All that the rank has written so far.
  const std::string& output(int rank) const;

  // Sends `signal` to one rank's process. Nothing happens when it has ended.
  void Signal(int rank, int signal);

  // Returns once `rank` has written `text`. Errors: kDeadlineExceeded after `timeout`,
  // kFailedPrecondition when the rank ends without having written it; both quote its output.
  absl::Status WaitForOutput(int rank, const std::string& text, absl::Duration timeout);

  // Returns when every rank has ended or was killed at a deadline. To be called once.
  RankRun Wait();

 private:
  struct Rank {
    RankResult result;
    UniqueFd pidfd;
    UniqueFd output;
    bool ended = false;
  };

  RankGroup() = default;
  absl::Status StartRank(const RankJob& job, int rank, const std::vector<std::string>& argv);
  absl::Status ReservePort(int port);
  bool AllEnded() const;
  absl::Time NextDeadline() const;
  // Waits for output or an end, at most until `until`, and takes in what there is.
  void Pump(absl::Time until);
  void Drain(Rank& rank);
  void Reap(Rank& rank);
  void KillAll(bool timed_out);

  std::vector<Rank> ranks_;
  UniqueFd reserved_port_;
  int master_port_ = 0;
  absl::Time deadline_ = absl::InfiniteFuture();
  absl::Time failure_deadline_ = absl::InfiniteFuture();
  absl::Duration deadline_after_failure_;
};

// Starts the job and waits for it. A group that cannot be started is one failed result.
RankRun RunRanks(const RankJob& job);

// The same as a gtest assertion: on failure it prints how every rank ended and what it wrote.
::testing::AssertionResult RanksSucceed(const RankJob& job);

// In a process that RunRanks started: runs the body of the asked name and returns the process's
// exit code, which is the body's, or 1 when the body returned 0 but a gtest check has failed in
// it. Exits with 2 and a clear line when there is no such body. In any other process: nullopt.
std::optional<int> RunRankBody(const std::map<std::string, std::function<int()>>& bodies);

}  // namespace ddp::testing

#endif  // DDP_TESTING_RANK_HARNESS_H_
