#include "launcher/process/process_tree.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/process/pidfd.h"
#include "base/process/process_state.h"
#include "base/unique_fd.h"

namespace ddp::launcher {
namespace {

std::vector<pid_t> NumericEntries(const std::string& path) {
  std::vector<pid_t> result;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(path.c_str()), &::closedir);
  if (folder == nullptr) return result;
  while (const dirent* entry = ::readdir(folder.get())) {
    if (std::isdigit(static_cast<unsigned char>(entry->d_name[0])) != 0) {
      result.push_back(static_cast<pid_t>(std::strtol(entry->d_name, nullptr, 10)));
    }
  }
  return result;
}

// Returns the parent of `pid`, or 0.
pid_t ParentOf(pid_t pid) {
  const std::vector<std::string> fields = ProcessStat(pid);
  return fields.size() < 2 ? 0 : static_cast<pid_t>(std::strtol(fields[1].c_str(), nullptr, 10));
}

// Finds the children on kernels without /proc/<pid>/task/<tid>/children.
std::vector<pid_t> ChildrenByScan(pid_t parent) {
  std::vector<pid_t> result;
  for (const pid_t pid : NumericEntries("/proc")) {
    if (ParentOf(pid) == parent) result.push_back(pid);
  }
  return result;
}

// Sends SIGKILL to `pid` if it is (still) a child of `parent`: the number may have come to mean
// another process since the list was read.
void KillChildOf(pid_t parent, pid_t pid) {
  const UniqueFd pidfd = OpenPidfd(pid);
  if (!pidfd.valid() || ParentOf(pid) != parent) return;
  (void)SignalPidfd(pidfd.get(), pid, SIGKILL);
}

// Kills all processes below `root`, parents first, so that none of them starts a replacement.
void KillBelow(pid_t root) {
  std::vector<pid_t> open = {root};
  while (!open.empty()) {
    const pid_t parent = open.back();
    open.pop_back();
    for (const pid_t pid : ChildrenOf(parent)) {
      KillChildOf(parent, pid);
      open.push_back(pid);
    }
  }
}

bool IsZombie(pid_t pid) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT | __WALL) ==
             0 &&
         info.si_pid == pid;
}

void Reap(pid_t pid) {
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | __WALL);
}

std::vector<pid_t> OwnChildren(const std::set<pid_t>& spared) {
  std::vector<pid_t> children = ChildrenOf(::getpid());
  std::erase_if(children, [&](pid_t pid) { return spared.count(pid) != 0; });
  return children;
}

// Blocks until one of `children` has ended, for 20 ms at most: other children may have been
// adopted.
void AwaitAnEnd(const std::vector<pid_t>& children) {
  constexpr int kMomentMs = 20;
  constexpr size_t kMaxWatched = 64;
  std::vector<UniqueFd> pidfds;
  std::vector<pollfd> polled;
  for (size_t i = 0; i < std::min(children.size(), kMaxWatched); ++i) {
    pidfds.push_back(OpenPidfd(children[i]));
    polled.push_back({.fd = pidfds.back().get(), .events = POLLIN, .revents = 0});
  }
  ::poll(polled.data(), polled.size(), kMomentMs);
}

}  // namespace

bool ProcShowsThisNamespace() {
  char self[16] = {};
  const ssize_t length = ::readlink("/proc/self", self, sizeof(self) - 1);
  return length > 0 && absl::StrCat(::getpid()) == self;
}

std::vector<pid_t> ChildrenOf(pid_t pid) {
  std::vector<pid_t> result;
  if (!ProcShowsThisNamespace()) return result;
  const std::string tasks = absl::StrCat("/proc/", pid, "/task");
  bool readable = false;
  for (const pid_t task : NumericEntries(tasks)) {
    std::ifstream file(absl::StrCat(tasks, "/", task, "/children"));
    readable = readable || file.is_open();
    pid_t child = 0;
    while (file >> child) result.push_back(child);
  }
  if (!readable && ::kill(pid, 0) == 0) return ChildrenByScan(pid);
  return result;
}

KillPass KillChildrenOnce(const std::set<pid_t>& spared) {
  KillPass pass;
  pass.left = OwnChildren(spared);
  pass.found_any = !pass.left.empty();
  for (const pid_t pid : pass.left) {
    // The number means this child until we reap it.
    ::kill(pid, SIGKILL);
    KillBelow(pid);
  }
  std::erase_if(pass.left, [](pid_t pid) {
    const bool ended = IsZombie(pid);
    if (ended) Reap(pid);
    return ended;
  });
  return pass;
}

bool KillChildren(const std::set<pid_t>& spared, absl::Duration timeout) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  int empty_looks = 0;
  while (true) {
    const KillPass pass = KillChildrenOnce(spared);
    empty_looks = pass.found_any ? 0 : empty_looks + 1;
    if (empty_looks == 2) return true;
    if (clock.Now() >= deadline) return pass.left.empty();
    if (!pass.left.empty()) AwaitAnEnd(pass.left);
  }
}

void ReapChildren(const std::set<pid_t>& spared) {
  for (const pid_t pid : OwnChildren(spared)) {
    if (IsZombie(pid)) Reap(pid);
  }
}

}  // namespace ddp::launcher
