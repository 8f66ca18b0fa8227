#include "ddp/comm/host_group/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>

#include "base/clock.h"

namespace ddp::internal {
namespace {

#ifndef SYS_futex_waitv
constexpr long SYS_futex_waitv = 449;  // NOLINT(google-runtime-int): the type of syscall()
#endif

// As the kernel's struct futex_waitv, which older headers lack.
struct WaitV {
  uint64_t value = 0;
  uint64_t address = 0;
  uint32_t flags = 2;  // of 32 bits, shared
  uint32_t reserved = 0;
};

}  // namespace

void FutexWait(const std::atomic<uint32_t>& word, uint32_t expected, absl::Duration timeout) {
  const timespec limit = absl::ToTimespec(std::max(timeout, absl::ZeroDuration()));
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

void FutexWake(const std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool FutexWaitAny(std::span<const FutexWord> words, absl::Duration timeout) {
  std::array<WaitV, kMaxFutexWords> list;
  const size_t count = std::min(words.size(), list.size());
  for (size_t i = 0; i < count; ++i) {
    list[i] = {.value = words[i].expected, .address = reinterpret_cast<uint64_t>(words[i].word)};
  }
  // A year is as good as for ever, and the sum below cannot overflow.
  const absl::Duration limited = std::clamp(timeout, absl::ZeroDuration(), absl::Hours(24 * 365));
  const int64_t until = MonotonicNanoseconds() + absl::ToInt64Nanoseconds(limited);
  const timespec limit = {.tv_sec = until / 1'000'000'000, .tv_nsec = until % 1'000'000'000};
  const auto result = ::syscall(SYS_futex_waitv, list.data(), count, 0, &limit, CLOCK_MONOTONIC);
  return result >= 0 || (errno != ENOSYS && errno != EPERM && errno != EINVAL);
}

}  // namespace ddp::internal
