#include "elastic/data/index_permutation.h"

#include <xxhash.h>

#include <bit>
#include <cstddef>
#include <cstring>
#include <string>

#include "glog/logging.h"

namespace ddp::elastic {
namespace {

// Appends the low `bytes` bytes of `value`, in the same order on every machine.
void AppendLittleEndian(uint64_t value, int bytes, std::string& text) {
  for (int i = 0; i < bytes; ++i) {
    text.push_back(static_cast<char>((value >> (8 * i)) & 0xff));
  }
}

int HalfBitsFor(uint64_t size) {
  const int bits = std::bit_width(size - 1);
  return bits <= 2 ? 1 : (bits + 1) / 2;
}

}  // namespace

IndexPermutation::IndexPermutation(int64_t size, const Key& key)
    : size_(static_cast<uint64_t>(size)), half_bits_(1) {
  CHECK_GE(size, 1) << "a permutation needs a size";
  half_bits_ = HalfBitsFor(size_);
  // The name separates this use of (seed, epoch) from other uses. The fixed widths separate (0, 1)
  // from (1, 0).
  std::string material = "ddp.elastic.data.order";
  AppendLittleEndian(kVersion, 4, material);
  AppendLittleEndian(key.seed, 8, material);
  AppendLittleEndian(key.epoch, 4, material);
  for (int round = 0; round < kRounds; ++round) {
    round_keys_[static_cast<size_t>(round)] =
        XXH3_64bits_withSeed(material.data(), material.size(), static_cast<XXH64_hash_t>(round));
  }
}

int64_t IndexPermutation::operator()(int64_t index) const {
  CHECK(index >= 0 && static_cast<uint64_t>(index) < size_)
      << "index " << index << " is outside of a permutation of " << size_;
  uint64_t value = static_cast<uint64_t>(index);
  // The loop ends: it follows a cycle of the network's permutation, and `index`, which is inside,
  // lies on that cycle.
  do {
    value = Encrypt(value);
  } while (value >= size_);
  return static_cast<int64_t>(value);
}

uint64_t IndexPermutation::Encrypt(uint64_t value) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_;
  uint64_t right = value & mask;
  for (const uint64_t round_key : round_keys_) {
    const uint64_t little_endian =
        std::endian::native == std::endian::little ? right : __builtin_bswap64(right);
    const uint64_t mixed = XXH3_64bits_withSeed(&little_endian, sizeof(little_endian), round_key);
    const uint64_t next = left ^ (mixed & mask);
    left = right;
    right = next;
  }
  return (left << half_bits_) | right;
}

}  // namespace ddp::elastic
