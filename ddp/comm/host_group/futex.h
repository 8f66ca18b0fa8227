// Futexes in memory that processes share.
#ifndef DDP_COMM_HOST_GROUP_FUTEX_H_
#define DDP_COMM_HOST_GROUP_FUTEX_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/time/time.h"

namespace ddp::internal {

// Blocks while `word` has the value `expected`, until FutexWake(word) or for `timeout`. May return
// early.
void FutexWait(const std::atomic<uint32_t>& word, uint32_t expected, absl::Duration timeout);

// Wakes all threads of all processes that wait for `word`.
void FutexWake(const std::atomic<uint32_t>& word);

// A word to wait for, with the value at which to keep waiting.
struct FutexWord {
  const std::atomic<uint32_t>* word = nullptr;
  uint32_t expected = 0;
};

inline constexpr size_t kMaxFutexWords = 128;

// As FutexWait(), for the first kMaxFutexWords words at once: returns when one of them is woken, or
// has another value. Returns false at once where the kernel cannot (before Linux 5.16, or a
// sandbox).
bool FutexWaitAny(std::span<const FutexWord> words, absl::Duration timeout);

}  // namespace ddp::internal

#endif  // DDP_COMM_HOST_GROUP_FUTEX_H_
