#include "testing/ranks/rank_harness.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/process/child_process.h"
#include "base/process/pidfd.h"
#include "base/status_macros.h"

namespace ddp::testing {
namespace {

// Environment variable of a rank's process with the name of its body.
constexpr char kBodyVariable[] = "DDP_TEST_RANK_BODY";
constexpr char kThisBinary[] = "/proc/self/exe";
constexpr char kGeneration[] = "1";
constexpr char kGenerationNonce[] = "0123456789abcdef";

absl::Time Now() { return MonotonicClock().Now(); }

absl::Status ErrnoStatus(const std::string& what, int error) {
  const std::string message = absl::StrCat(what, ": ", strerror(error));
  if (error == ENOENT) return absl::NotFoundError(message);
  if (error == EACCES || error == ENOEXEC) return absl::PermissionDeniedError(message);
  return absl::ResourceExhaustedError(message);
}

absl::Status CheckJob(const RankJob& job) {
  if (job.world_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat("world_size ", job.world_size, " is below 1"));
  }
  if (job.body.empty() == job.argv.empty()) {
    return absl::InvalidArgumentError("a rank job has either a body or an argv");
  }
  return absl::OkStatus();
}

// Returns the environment of one rank as "NAME=value" strings.
std::vector<std::string> RankEnvironment(const RankJob& job, int rank, int master_port) {
  std::map<std::string, std::string> values;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const char* equals = strchr(*entry, '=');
    if (equals != nullptr) values[std::string(*entry, equals - *entry)] = equals + 1;
  }
  const std::string rank_text = absl::StrCat(rank);
  const std::string size_text = absl::StrCat(job.world_size);
  for (const char* name : {"RANK", "LOCAL_RANK", "ROLE_RANK"}) values[name] = rank_text;
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"}) {
    values[name] = size_text;
  }
  values["GROUP_RANK"] = "0";
  values["GROUP_WORLD_SIZE"] = "1";
  values["ROLE_NAME"] = "default";
  values["MASTER_ADDR"] = "127.0.0.1";
  values["MASTER_PORT"] = absl::StrCat(master_port);
  values["TORCHELASTIC_RESTART_COUNT"] = "0";
  values["TORCHELASTIC_MAX_RESTARTS"] = "0";
  values["TORCHELASTIC_RUN_ID"] = "rank-harness";
  values["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  values["OMP_NUM_THREADS"] = "1";
  values["DDP_GENERATION"] = kGeneration;
  values["DDP_GENERATION_NONCE"] = kGenerationNonce;
  values["DDP_STORE"] = job.store_url;
  // Removed: when this test runs under ddprun, these belong to the test and not to its ranks.
  values["DDP_HEALTH_FD"] = "";
  values["TORCHELASTIC_ERROR_FILE"] = "";
  values[kBodyVariable] = job.body;
  for (const auto& [name, value] : job.environment) values[name] = value;

  std::vector<std::string> result;
  for (const auto& [name, value] : values) {
    if (!value.empty()) result.push_back(absl::StrCat(name, "=", value));
  }
  return result;
}

// Runs between fork and exec: makes system calls only. Returns errno when the program cannot be
// executed.
int BecomeProgram(int output_fd, char* const* argv, char* const* environment) {
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  setpgid(0, 0);
  if (dup2(output_fd, STDOUT_FILENO) >= 0 && dup2(output_fd, STDERR_FILENO) >= 0) {
    execvpe(argv[0], argv, environment);
  }
  return errno;
}

absl::Status MakePipe(UniqueFd& read_end, UniqueFd& write_end) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus("pipe", errno);
  read_end.reset(ends[0]);
  write_end.reset(ends[1]);
  return absl::OkStatus();
}

}  // namespace

std::string RankResult::Describe() const {
  const std::string who = absl::StrCat("rank ", rank, " (pid ", pid, ") ");
  if (timed_out) return absl::StrCat(who, "was killed by the harness at its deadline");
  if (signal != 0) {
    return absl::StrCat(who, "was killed by SIG", sigabbrev_np(signal) ? sigabbrev_np(signal) : "",
                        " (", signal, ")");
  }
  return absl::StrCat(who, "exited with code ", exit_code);
}

bool RankRun::succeeded() const {
  return !ranks.empty() && std::all_of(ranks.begin(), ranks.end(),
                                       [](const RankResult& rank) { return rank.succeeded(); });
}

std::string RankRun::Describe() const {
  std::string text;
  for (const RankResult& rank : ranks) {
    absl::StrAppend(&text, "---- ", rank.Describe(), "; its output:\n", rank.output);
    if (!rank.output.empty() && rank.output.back() != '\n') absl::StrAppend(&text, "\n");
  }
  return text;
}

absl::StatusOr<std::unique_ptr<RankGroup>> RankGroup::Start(const RankJob& job) {
  DDP_RETURN_IF_ERROR(CheckJob(job));
  std::unique_ptr<RankGroup> group(new RankGroup);
  DDP_RETURN_IF_ERROR(group->ReservePort(job.master_port));
  group->deadline_ = Now() + job.deadline;
  group->deadline_after_failure_ = job.deadline_after_failure;
  const std::vector<std::string> argv =
      job.body.empty() ? job.argv : std::vector<std::string>{kThisBinary};
  group->ranks_.resize(job.world_size);
  for (int rank = 0; rank < job.world_size; ++rank) {
    DDP_RETURN_IF_ERROR(group->StartRank(job, rank, argv));
  }
  return group;
}

RankGroup::~RankGroup() { KillAll(/*timed_out=*/true); }

// Reserves a free port by binding it without listening. Both sides set SO_REUSEADDR, so a rank can
// still listen on the port. The kernel gives the port to no process that asks for any free port.
absl::Status RankGroup::ReservePort(int port) {
  master_port_ = port;
  if (port != 0) return absl::OkStatus();
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoStatus("socket", errno);
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t size = sizeof(address);
  if (bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return ErrnoStatus("no free port", errno);
  }
  master_port_ = ntohs(address.sin_port);
  reserved_port_ = std::move(fd);
  return absl::OkStatus();
}

absl::Status RankGroup::StartRank(const RankJob& job, int rank,
                                  const std::vector<std::string>& argv) {
  std::vector<std::string> arguments = argv;
  std::vector<std::string> environment = RankEnvironment(job, rank, master_port_);
  const std::vector<char*> argument_pointers = ExecPointers(arguments);
  const std::vector<char*> environment_pointers = ExecPointers(environment);
  Rank& state = ranks_[rank];
  state.result.rank = rank;
  state.ended = true;  // false once there is a process
  UniqueFd output_write;
  DDP_RETURN_IF_ERROR(MakePipe(state.output, output_write));
  if (fcntl(state.output.get(), F_SETFL, O_NONBLOCK) != 0) return ErrnoStatus("fcntl", errno);

  const ChildProcess child = StartChild([&] {
    return BecomeProgram(output_write.get(), argument_pointers.data(), environment_pointers.data());
  });
  const pid_t pid = child.pid;
  if (pid < 0) return ErrnoStatus(child.failed_call, errno);
  state.result.pid = pid;
  state.ended = false;
  setpgid(pid, pid);  // the child does it too; a signal to the group may be sent before that
  state.pidfd = OpenPidfd(pid);
  if (!state.pidfd.valid()) return ErrnoStatus("pidfd_open", errno);
  const int error = ReadExecError(child.exec_error);
  if (error != 0) {
    Reap(state);
    return ErrnoStatus(absl::StrCat("rank ", rank, " cannot start ", argv[0]), error);
  }
  return absl::OkStatus();
}

pid_t RankGroup::pid(int rank) const { return ranks_.at(rank).result.pid; }

const std::string& RankGroup::output(int rank) const { return ranks_.at(rank).result.output; }

void RankGroup::Signal(int rank, int signal) {
  Rank& state = ranks_.at(rank);
  if (!state.ended) kill(state.result.pid, signal);  // not yet reaped: the pid is still its own
}

absl::Status RankGroup::WaitForOutput(int rank, const std::string& text, absl::Duration timeout) {
  const absl::Time until = Now() + timeout;
  Rank& state = ranks_.at(rank);
  while (!absl::StrContains(state.result.output, text)) {
    if (state.ended) {
      return absl::FailedPreconditionError(absl::StrCat(state.result.Describe(),
                                                        " without writing \"", text,
                                                        "\"; its output:\n", state.result.output));
    }
    if (Now() >= until) {
      return absl::DeadlineExceededError(absl::StrCat("rank ", rank, " has not written \"", text,
                                                      "\" in ", absl::FormatDuration(timeout),
                                                      "; its output:\n", state.result.output));
    }
    Pump(until);
  }
  return absl::OkStatus();
}

RankRun RankGroup::Wait() {
  while (!AllEnded()) {
    if (Now() >= NextDeadline()) {
      KillAll(/*timed_out=*/true);
    } else {
      Pump(NextDeadline());
    }
  }
  KillAll(/*timed_out=*/false);  // kills the processes that ranks left in their process groups
  RankRun run;
  for (const Rank& rank : ranks_) run.ranks.push_back(rank.result);
  return run;
}

bool RankGroup::AllEnded() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.ended; });
}

absl::Time RankGroup::NextDeadline() const { return std::min(deadline_, failure_deadline_); }

void RankGroup::Pump(absl::Time until) {
  std::vector<pollfd> descriptors;
  for (const Rank& rank : ranks_) {
    if (rank.ended) continue;
    descriptors.push_back({rank.pidfd.get(), POLLIN, 0});
    if (rank.output.valid()) descriptors.push_back({rank.output.get(), POLLIN, 0});
  }
  constexpr absl::Duration kLongestPoll = absl::Seconds(60);  // poll() takes an int
  const absl::Duration left = std::clamp(until - Now(), absl::ZeroDuration(), kLongestPoll);
  poll(descriptors.data(), descriptors.size(),
       static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
  for (Rank& rank : ranks_) {
    if (rank.ended) continue;
    Drain(rank);
    pollfd exit{rank.pidfd.get(), POLLIN, 0};
    if (poll(&exit, 1, 0) == 1) {
      Drain(rank);  // reads the output written between the first read and the end
      Reap(rank);
    }
  }
}

// Reads the bytes that are in the pipe now. Does not read until its end, because a descendant may
// keep the pipe open.
void RankGroup::Drain(Rank& rank) {
  char buffer[16384];
  while (rank.output.valid()) {
    const ssize_t count = read(rank.output.get(), buffer, sizeof(buffer));
    if (count > 0) {
      rank.result.output.append(buffer, count);
    } else if (count == 0) {
      rank.output.reset();
    } else if (errno != EINTR) {
      return;
    }
  }
}

// Reaps the process and sets the result. Blocks only until the kernel has ended a killed process.
void RankGroup::Reap(Rank& rank) {
  int status = 0;
  while (waitpid(rank.result.pid, &status, 0) < 0 && errno == EINTR) {
  }
  rank.ended = true;
  if (WIFSIGNALED(status)) {
    rank.result.signal = WTERMSIG(status);
  } else {
    rank.result.exit_code = WEXITSTATUS(status);
  }
  if (!rank.result.succeeded()) {
    failure_deadline_ = std::min(failure_deadline_, Now() + deadline_after_failure_);
  }
}

void RankGroup::KillAll(bool timed_out) {
  // The kernel does not reuse a reaped rank's group id while a member of the group lives. When none
  // lives, kill() returns ESRCH, unless the pid numbers have wrapped.
  for (Rank& rank : ranks_) {
    if (rank.result.pid > 0) kill(-rank.result.pid, SIGKILL);
  }
  for (Rank& rank : ranks_) {
    if (rank.ended) continue;
    rank.result.timed_out = timed_out;
    Reap(rank);
    Drain(rank);
  }
}

RankRun RunRanks(const RankJob& job) {
  absl::StatusOr<std::unique_ptr<RankGroup>> group = RankGroup::Start(job);
  if (group.ok()) return (*group)->Wait();
  RankResult failure;
  failure.exit_code = 127;
  failure.output = absl::StrCat("the ranks could not be started: ", group.status().ToString());
  return {{failure}};
}

::testing::AssertionResult RanksSucceed(const RankJob& job) {
  const RankRun run = RunRanks(job);
  if (run.succeeded()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "\n" << run.Describe();
}

std::optional<int> RunRankBody(const std::map<std::string, std::function<int()>>& bodies) {
  const char* name = getenv(kBodyVariable);
  if (name == nullptr) return std::nullopt;
  const auto body = bodies.find(name);
  if (body == bodies.end()) {
    fprintf(stderr, "no rank body \"%s\": main() gives %zu others to RunRankBody()\n", name,
            bodies.size());
    return 2;
  }
  const int exit_code = body->second();
  fflush(stdout);
  if (exit_code == 0 && ::testing::UnitTest::GetInstance()->Failed()) return 1;
  if (exit_code == 0 && ::testing::Test::IsSkipped()) {
    fprintf(stderr, "the rank body \"%s\" skipped itself; skip in a TEST that starts it\n", name);
    return 1;
  }
  return exit_code;
}

}  // namespace ddp::testing
