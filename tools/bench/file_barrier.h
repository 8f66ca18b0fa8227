// A barrier of several processes in a file, without a library that may be measured.
#ifndef DDP_TOOLS_BENCH_FILE_BARRIER_H_
#define DDP_TOOLS_BENCH_FILE_BARRIER_H_

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "base/unique_fd.h"

namespace ddp {

// Yields the core while it waits, since threads of a backend share the core. Thread-compatible. The
// mapping lasts until the process ends. A rank that never comes blocks the others without end: the
// program that started them kills them.
class FileBarrier {
 public:
  // `path`: a file of 64 zero bytes per rank, for one run alone. Throws std::runtime_error when it
  // cannot be mapped.
  FileBarrier(const std::string& path, int rank, int size) : rank_(rank), size_(size) {
    const UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
    void* const memory = fd.valid() ? mmap(nullptr, size * kStride * sizeof(uint64_t),
                                           PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0)
                                    : MAP_FAILED;
    if (memory == MAP_FAILED) throw std::runtime_error("--barrier=" + path + " cannot be mapped");
    counts_ = static_cast<uint64_t*>(memory);
  }

  // Blocks until every rank has called it as often as this one.
  void Wait() {
    ++round_;
    Count(rank_).store(round_);
    for (int rank = 0; rank < size_; ++rank) {
      while (Count(rank).load() < round_) sched_yield();
    }
  }

 private:
  static constexpr int kStride = 8;
  std::atomic_ref<uint64_t> Count(int rank) {
    return std::atomic_ref<uint64_t>(counts_[rank * kStride]);
  }
  const int rank_;
  const int size_;
  uint64_t* counts_ = nullptr;
  uint64_t round_ = 0;
};

}  // namespace ddp

#endif  // DDP_TOOLS_BENCH_FILE_BARRIER_H_
