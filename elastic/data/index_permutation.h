#ifndef DDP_ELASTIC_DATA_INDEX_PERMUTATION_H_
#define DDP_ELASTIC_DATA_INDEX_PERMUTATION_H_

#include <array>
#include <cstdint>

namespace ddp::elastic {

// Computes a pseudorandom permutation of [0, size), one index at a time, in O(1) time and memory.
// The numbers are the same on every machine. Not for cryptography.
//
// Algorithm: a balanced Feistel network with cycle walking. The network permutes the smallest even
// number of bits that covers `size`. A result outside of [0, size) is mapped again until it falls
// inside. The domain is at most 4 times `size`, so an index takes at most 4 passes on average.
//
// Checkpoints record an order as (seed, epoch, version). The function of a version therefore never
// changes; another function gets another version.
//
// Immutable. Threads: any.
class IndexPermutation {
 public:
  static constexpr uint32_t kVersion = 1;

  struct Key {
    uint64_t seed = 0;
    uint32_t epoch = 0;
  };

  // Requires `size` >= 1; else fails a CHECK.
  IndexPermutation(int64_t size, const Key& key);

  int64_t size() const { return static_cast<int64_t>(size_); }

  // Maps `index` in [0, size) to [0, size). An index outside fails a CHECK.
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
