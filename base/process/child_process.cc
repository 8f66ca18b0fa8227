#include "base/process/child_process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <utility>

namespace ddp {
namespace {

[[noreturn]] void RunChild(pid_t parent, int error_fd, absl::FunctionRef<int()> become) {
  constexpr int kCannotExecute = 127;  // as shells report it
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // If the parent has died before that call, the signal never comes.
  if (getppid() != parent) _exit(kCannotExecute);
  const int error = become();
  (void)!write(error_fd, &error, sizeof(error));
  _exit(kCannotExecute);
}

}  // namespace

ChildProcess StartChild(absl::FunctionRef<int()> become) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return {.failed_call = "pipe"};
  UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) {
    const int error = errno;
    read_end.reset();
    write_end.reset();
    errno = error;
    return {.failed_call = "fork"};
  }
  if (pid == 0) RunChild(parent, write_end.get(), become);
  return {.pid = pid, .exec_error = std::move(read_end)};
}

int ReadExecError(const UniqueFd& exec_error) {
  int error = 0;
  ssize_t count = 0;
  do {
    count = read(exec_error.get(), &error, sizeof(error));
  } while (count < 0 && errno == EINTR);
  return count == sizeof(error) ? error : 0;
}

std::vector<char*> ExecPointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace ddp
