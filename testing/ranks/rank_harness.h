// Runs the ranks of a test as real processes on this host, and reports how each of them ended.
//
// testing/ranks/rank_test.h defines tests with ranks, and has their main(). Include this header,
// besides it, for a test that starts ranks itself: with RanksSucceed(), RunRanks() or RankGroup.
//
// A test with a main() of its own gives its ranks a named body, and runs the body where it is
// started as a rank:
//
//   int main(int argc, char** argv) {
//     ::testing::InitGoogleTest(&argc, argv);
//     if (auto exit_code = ddp::testing::RunRankBody({{"average", Average}})) return *exit_code;
//     return RUN_ALL_TESTS();
//   }
//
// gtest's checks work in a body. A failed check makes the rank exit with 1.
//
// Each rank gets the environment that torchrun would give it on one node: RANK, LOCAL_RANK,
// WORLD_SIZE, MASTER_ADDR and so on, DDP_GENERATION, and DDP_STORE where the test names a store.
#ifndef DDP_TESTING_RANKS_RANK_HARNESS_H_
#define DDP_TESTING_RANKS_RANK_HARNESS_H_

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

// The ranks to run. Exactly one of `body` and `argv` is given.
struct RankJob {
  int world_size = 1;

  std::string body = "";               // a RANK_BODY, or a name that main() gives to RunRankBody()
  std::vector<std::string> argv = {};  // a program and its arguments; argv[0] is looked up on PATH

  // DDP_STORE of every rank. Empty removes the variable, also an inherited one.
  std::string store_url = "";
  // MASTER_PORT. 0 chooses a free port, and reserves it for the ranks while the group lives.
  int master_port = 0;
  // Variables of every rank; they override all others. An empty value removes the variable.
  std::map<std::string, std::string> environment = {};

  // Time limit of the whole group. Ranks that still run then are killed, and count as timed out.
  absl::Duration deadline = absl::Seconds(120);
  // Time limit of the other ranks after a rank has failed. They get time to report the failure; a
  // rank that hangs is killed.
  absl::Duration deadline_after_failure = absl::Seconds(20);
};

// Result of one rank.
struct RankResult {
  int rank = 0;
  pid_t pid = -1;
  bool timed_out = false;  // killed by the harness, at one of the deadlines
  int exit_code = 0;       // meaningful when signal == 0
  int signal = 0;          // the signal that ended it, or 0
  std::string output;      // stdout and stderr, in the order of writing

  bool succeeded() const { return !timed_out && signal == 0 && exit_code == 0; }
  // Returns "rank 1 (pid 12) exited with code 3".
  std::string Describe() const;
};

// Result of a group: one per rank, in rank order.
struct RankRun {
  std::vector<RankResult> ranks;

  bool succeeded() const;
  // Returns how every rank ended, with its whole output, for the message of a failed test.
  std::string Describe() const;
};

// A running group of ranks. The destructor kills the process group of every rank and reaps the
// ranks. The kernel kills the ranks when the thread that started them ends, and so also when this
// process is killed: the group must not live longer than that thread.
//
// Not thread-safe. Only WaitForOutput() and Wait() read output. At other times a rank may block on
// a full pipe (64 KiB).
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
  // The output of the rank that was read so far.
  const std::string& output(int rank) const;

  // Sends `signal` to the rank's process. Does nothing when the process has ended.
  void Signal(int rank, int signal);

  // Blocks until `rank` has written `text`. Errors: kDeadlineExceeded after `timeout`;
  // kFailedPrecondition when the rank has ended without writing `text`. Both quote its output.
  absl::Status WaitForOutput(int rank, const std::string& text, absl::Duration timeout);

  // Blocks until every rank has ended or was killed at a deadline. Call it once.
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
  // Waits until there is output, a rank has ended, or `until` has passed; then reads and reaps.
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

// Starts the job and waits for it. A group that cannot be started gives one failed result.
RankRun RunRanks(const RankJob& job);

// Runs the job as a gtest assertion. A failure prints how every rank ended, with its output.
::testing::AssertionResult RanksSucceed(const RankJob& job);

// In a process that RankGroup started, runs the body that the job names. Returns the exit code for
// the process: the body's; 1 when the body returned 0, but a gtest check has failed or the body
// called GTEST_SKIP(); 2, with a message, when there is no such body. In any other process, returns
// nullopt.
std::optional<int> RunRankBody(const std::map<std::string, std::function<int()>>& bodies);

}  // namespace ddp::testing

#endif  // DDP_TESTING_RANKS_RANK_HARNESS_H_
