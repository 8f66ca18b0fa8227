#include "elastic/worker/first_error.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <limits>

namespace ddp::elastic {
namespace {

constexpr int kNobody = 0;
constexpr int kDone = -1;

// kNobody, the ID of the thread that writes, or kDone.
std::atomic<int> writer{kNobody};
static_assert(std::atomic<int>::is_always_lock_free && sizeof(writer) == sizeof(int));

int ThreadId() { return static_cast<int>(syscall(SYS_gettid)); }

// A futex, because std::atomic::wait has no deadline and is not for signal handlers.
long Futex(int operation, int value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<int*>(&writer), operation, value, timeout, nullptr, 0);
}

}  // namespace

bool ClaimFirstError() {
  int expected = kNobody;
  const int self = ThreadId();
  return writer.compare_exchange_strong(expected, self) || expected == self;
}

void FinishFirstError() {
  writer.store(kDone);
  Futex(FUTEX_WAKE_PRIVATE, std::numeric_limits<int>::max(), nullptr);
}

void AwaitFirstError() {
  const int now = writer.load();
  if (now == kNobody || now == kDone || now == ThreadId()) return;
  // A signal may interrupt a wait. kMaxWaits bounds the number of interruptions.
  constexpr int kMaxWaits = 100;
  const timespec timeout{.tv_sec = 5, .tv_nsec = 0};
  for (int i = 0; i < kMaxWaits && writer.load() == now; ++i) {
    if (Futex(FUTEX_WAIT_PRIVATE, now, &timeout) != 0 && errno == ETIMEDOUT) return;
  }
}

}  // namespace ddp::elastic
