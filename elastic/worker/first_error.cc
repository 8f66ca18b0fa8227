#include "elastic/worker/first_error.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace ddp::elastic {
namespace {

constexpr int kNobody = 0;
constexpr int kDone = -1;

// kNobody, the id of the thread that writes, or kDone.
std::atomic<int> writer{kNobody};
static_assert(std::atomic<int>::is_always_lock_free);

int ThreadId() { return static_cast<int>(syscall(SYS_gettid)); }

}  // namespace

bool ClaimFirstError() {
  int expected = kNobody;
  const int self = ThreadId();
  return writer.compare_exchange_strong(expected, self) || expected == self;
}

void FinishFirstError() { writer.store(kDone); }

void AwaitFirstError() {
  const int self = ThreadId();
  for (int i = 0; i < 5000; ++i) {
    const int now = writer.load();
    if (now == kNobody || now == kDone || now == self) return;
    const timespec pause{.tv_sec = 0, .tv_nsec = 1'000'000};
    nanosleep(&pause, nullptr);
  }
}

}  // namespace ddp::elastic
