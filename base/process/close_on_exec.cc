#include "base/process/close_on_exec.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/types.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ddp {
namespace {

constexpr unsigned kCloseRangeCloseOnExec = 1U << 2;  // CLOSE_RANGE_CLOEXEC

// A larger limit of open files means "unlimited"; a loop up to it would take seconds.
constexpr rlim_t kMostDescriptors = 1 << 20;

// Layout of an entry of getdents64(2); the C library does not declare it.
struct Entry {
  uint64_t inode;
  int64_t offset;
  unsigned short size;
  unsigned char type;
  char name[];
};

// Returns the number that `text` is, or -1 for another text, such as ".".
int NumberOf(const char* text) {
  if (*text == '\0') return -1;
  int number = 0;
  for (; *text != '\0'; ++text) {
    if (*text < '0' || *text > '9' || number > 100'000'000) return -1;
    number = number * 10 + (*text - '0');
  }
  return number;
}

bool SetByList(int first) {
  const int folder = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return false;
  alignas(Entry) char buffer[4096];
  long count = 0;
  while ((count = syscall(SYS_getdents64, folder, buffer, sizeof(buffer))) > 0) {
    for (long at = 0; at < count;) {
      const auto* const entry = reinterpret_cast<const Entry*>(buffer + at);
      const int fd = NumberOf(entry->name);
      if (fd >= first) (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
      at += entry->size;
    }
  }
  close(folder);
  return count == 0;
}

int SetOneByOne(int first) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return errno;
  if (limit.rlim_cur > kMostDescriptors) return ENOSYS;
  for (int fd = first; fd < static_cast<int>(limit.rlim_cur); ++fd) {
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
  return 0;
}

}  // namespace

int SetCloseOnExecFrom(int first) {
  if (syscall(SYS_close_range, static_cast<unsigned>(first), ~0U, kCloseRangeCloseOnExec) == 0) {
    return 0;
  }
  return SetByList(first) ? 0 : SetOneByOne(first);
}

}  // namespace ddp
