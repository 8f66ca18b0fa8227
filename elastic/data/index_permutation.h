#ifndef DDP_ELASTIC_DATA_INDEX_PERMUTATION_H_
#define DDP_ELASTIC_DATA_INDEX_PERMUTATION_H_

#include <array>
#include <cstdint>

namespace ddp::elastic {

// A keyed bijection of [0, size) on itself that looks random, computed one index at a time: O(1)
// time and memory, the same numbers on every machine. Not cryptography.
//
// A balanced Feistel network over the smallest even number of bits that covers `size`; an index
// that it maps outside of [0, size) is mapped again until it falls inside (fewer than 4 rounds of
// that on average, since the domain is at most 4 times `size`).
//
// The function is a format: orders that it made stand in checkpoints as (seed, epoch, version).
// It never changes; another function gets another version.
//
// Immutable; safe to share between threads.
class IndexPermutation {
 public:
  static constexpr uint32_t kVersion = 1;

  struct Key {
    uint64_t seed = 0;
    uint32_t epoch = 0;
  };

  // `size` >= 1.
  IndexPermutation(int64_t size, const Key& key);

  int64_t size() const { return static_cast<int64_t>(size_); }

  // `index` in [0, size); so is the result.
  int64_t operator()(int64_t index) const;

 private:
  static constexpr int kRounds = 10;

  uint64_t Encrypt(uint64_t value) const;

  uint64_t size_;
  int half_bits_;
  std::array<uint64_t, kRounds> round_keys_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_DATA_INDEX_PERMUTATION_H_
