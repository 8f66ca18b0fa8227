#include "launcher/end_to_end/ddprun_driver.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/process/child_process.h"
#include "base/process/pidfd.h"
#include "launcher/process/private_folder.h"
#include "launcher/process/process_tree.h"

namespace ddp::launcher {
namespace {

// Path relative to the folder in which bazel starts a test. Start() makes it absolute, for workers
// that change their folder.
constexpr char kDdprun[] = "launcher/ddprun";

absl::Time Now() { return MonotonicClock().Now(); }

int Milliseconds(absl::Time deadline) {
  return static_cast<int>(std::max<int64_t>(
      0, absl::ToInt64Milliseconds(absl::Ceil(deadline - Now(), absl::Milliseconds(1)))));
}

// The folder is under /tmp, so that the path of a unix socket stays short.
std::string MakeFolder() {
  std::string path = "/tmp/ddprun_test_XXXXXX";
  EXPECT_NE(::mkdtemp(path.data()), nullptr);
  return path;
}

std::map<std::string, std::string> Environment(const DdprunDriver::Options& options,
                                               const std::string& folder) {
  std::map<std::string, std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    const std::string name = text.substr(0, equals);
    if (name.rfind("PET_", 0) == 0 || name.rfind("DDP_", 0) == 0) continue;
    result[name] = text.substr(equals + 1);
  }
  result["TMPDIR"] = folder;
  result["OMP_NUM_THREADS"] = "1";  // avoids the line that says that ddprun sets it
  for (const auto& [name, value] : options.environment) result[name] = value;
  return result;
}

}  // namespace

// Owns a thread, which ends with the streams or with the reader. Thread-safe.
class DdprunDriver::Reader {
 public:
  Reader(UniqueFd out, UniqueFd err)
      : pipes_{std::move(out), std::move(err)},
        stop_(::eventfd(0, EFD_CLOEXEC)),
        thread_([this] { Run(); }) {}
  ~Reader() {
    ::eventfd_write(stop_.get(), 1);
    thread_.join();
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Appends what has arrived since the last call to `out` and `err`; see TakeOutput().
  bool Take(std::string& out, std::string& err, absl::Time deadline) {
    const MutexLock lock(mutex_);
    while (arrived_[0].empty() && arrived_[1].empty()) {
      if (ended_ || !changed_.WaitFor(mutex_, deadline - Now())) return false;
    }
    out += std::exchange(arrived_[0], {});
    err += std::exchange(arrived_[1], {});
    return true;
  }

 private:
  void Run() {
    std::array<char, 65536> buffer;
    while (pipes_[0].valid() || pipes_[1].valid()) {
      std::array<pollfd, 3> polled{};
      for (size_t i = 0; i < 2; ++i) polled[i] = {.fd = pipes_[i].get(), .events = POLLIN};
      polled[2] = {.fd = stop_.get(), .events = POLLIN};
      ::poll(polled.data(), polled.size(), -1);
      if (polled[2].revents != 0) return;
      for (size_t i = 0; i < 2; ++i) {
        if (!pipes_[i].valid() || polled[i].revents == 0) continue;
        const ssize_t count = ::read(pipes_[i].get(), buffer.data(), buffer.size());
        if (count <= 0) pipes_[i].reset();
        const MutexLock lock(mutex_);
        arrived_[i].append(buffer.data(), static_cast<size_t>(std::max<ssize_t>(count, 0)));
        ended_ = !pipes_[0].valid() && !pipes_[1].valid();
        changed_.NotifyAll();
      }
    }
  }

  std::array<UniqueFd, 2> pipes_;  // stdout, stderr
  const UniqueFd stop_;
  Mutex mutex_;
  CondVar changed_;
  std::array<std::string, 2> arrived_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // the last field: it reads the others
};

DdprunDriver::DdprunDriver(const Options& options) : folder_(MakeFolder()) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  Start(options);
}

DdprunDriver::~DdprunDriver() {
  KillChildren({}, kDeadline);
  EXPECT_TRUE(RemoveFolder(folder_).ok());
}

void DdprunDriver::Start(const Options& options) {
  std::vector<std::string> argv = options.before;
  argv.push_back(std::filesystem::absolute(kDdprun).string());
  argv.insert(argv.end(), options.arguments.begin(), options.arguments.end());
  std::vector<std::string> environment;
  for (const auto& [name, value] : Environment(options, folder_)) {
    environment.push_back(absl::StrCat(name, "=", value));
  }
  const std::vector<char*> argv_pointers = ExecPointers(argv);
  const std::vector<char*> environment_pointers = ExecPointers(environment);
  std::array<int, 2> out{};
  std::array<int, 2> err{};
  ASSERT_EQ(::pipe2(out.data(), O_CLOEXEC), 0);
  ASSERT_EQ(::pipe2(err.data(), O_CLOEXEC), 0);
  pid_ = ::fork();
  ASSERT_GE(pid_, 0);
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::setpgid(0, 0);
    ::dup2(options.stdout_fd >= 0 ? options.stdout_fd : out[1], STDOUT_FILENO);
    ::dup2(options.stderr_fd >= 0 ? options.stderr_fd : err[1], STDERR_FILENO);
    ::execve(argv_pointers[0], argv_pointers.data(), environment_pointers.data());
    ::_exit(126);
  }
  pidfd_ = OpenPidfd(pid_);
  ::close(out[1]);
  ::close(err[1]);
  reader_ = std::make_unique<Reader>(UniqueFd(out[0]), UniqueFd(err[0]));
}

pid_t DdprunDriver::AgentPid() const {
  const std::vector<pid_t> children = ChildrenOf(pid_);
  EXPECT_EQ(children.size(), 1U);
  return children.empty() ? -1 : children[0];
}

std::vector<pid_t> DdprunDriver::Tree() const {
  std::vector<pid_t> tree = {pid_};
  for (size_t i = 0; i < tree.size(); ++i) {
    const std::vector<pid_t> children = ChildrenOf(tree[i]);
    tree.insert(tree.end(), children.begin(), children.end());
  }
  return tree;
}

// Takes the output that has arrived; blocks until there is some or `deadline` has passed. Returns
// false when both streams have ended or the deadline has passed.
bool DdprunDriver::TakeOutput(absl::Time deadline) { return reader_->Take(out_, err_, deadline); }

void DdprunDriver::AwaitStdout(const std::string& text, int times) {
  const absl::Time deadline = Now() + kDeadline;
  while (Count(out_, text) < times) {
    if (!TakeOutput(deadline)) {
      FAIL() << "never printed '" << text << "' " << times << " times; stdout:\n"
             << out_ << "\nstderr:\n"
             << err_;
    }
  }
}

void DdprunDriver::AwaitStderr(const std::string& text) {
  const absl::Time deadline = Now() + kDeadline;
  while (Count(err_, text) == 0) {
    if (!TakeOutput(deadline)) {
      FAIL() << "never printed '" << text << "'; stdout:\n" << out_ << "\nstderr:\n" << err_;
    }
  }
}

int DdprunDriver::Wait() {
  const absl::Time deadline = Now() + kDeadline;
  while (TakeOutput(deadline)) {
  }
  pollfd polled{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  if (Now() >= deadline || ::poll(&polled, 1, Milliseconds(deadline)) != 1) {
    ADD_FAILURE() << "ddprun did not end; stdout:\n" << out_ << "\nstderr:\n" << err_;
    ::kill(pid_, SIGKILL);
  }
  Reap();
  return result_;
}

void DdprunDriver::Reap() {
  if (reaped_) return;
  int status = 0;
  ASSERT_EQ(::waitpid(pid_, &status, 0), pid_);
  reaped_ = true;
  result_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

std::vector<std::string> DdprunDriver::TemporaryEntries() const {
  std::vector<std::string> result;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    result.push_back(entry.path().filename().string());
  }
  return result;
}

HeldProcess::HeldProcess(pid_t pid) : pid_(pid), pidfd_(OpenPidfd(pid)) {}

bool HeldProcess::AwaitEnd(absl::Time deadline) const {
  if (!pidfd_.valid()) return true;
  pollfd polled{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  return ::poll(&polled, 1, Milliseconds(deadline)) == 1;
}

int Count(const std::string& whole, const std::string& text) {
  int count = 0;
  for (size_t at = whole.find(text); at != std::string::npos;
       at = whole.find(text, at + text.size())) {
    ++count;
  }
  return count;
}

}  // namespace ddp::launcher
