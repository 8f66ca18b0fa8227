// The loops of ReduceTree, as templates over the vectors of lanes.h. See there for the rules of
// this code.
#ifndef DDP_COMM_KERNELS_REDUCE_LOOPS_H_
#define DDP_COMM_KERNELS_REDUCE_LOOPS_H_

#include <cstddef>
#include <cstdint>

#include "ddp/comm/kernels/element_type.h"
#include "ddp/comm/kernels/lanes.h"

namespace ddp::internal {

// Reduces in blocks that stay in the first cache, together with a partial result for each level of
// the tree. Blocks of up to four inputs need no partial results.
template <class Lanes, ReduceKind kKind, bool kScaled>
class ReduceLoops {
 public:
  // As of ReduceFunction.
  static void Reduce(const std::byte* const* inputs, size_t input_count, std::byte* const* outputs,
                     size_t output_count, size_t count, double factor) {
    alignas(64) std::byte zeros[kBlockBytes];
    for (size_t rank = 0; rank < input_count; ++rank) {
      if (inputs[rank] != nullptr) continue;
      __builtin_memset(zeros, 0, kBlockBytes);
      break;
    }
    const Vector factors = Factors(factor);
    const size_t bytes = count * sizeof(Element);
    for (size_t at = 0; at < bytes; at += kBlockBytes) {
      const size_t block_bytes = bytes - at < kBlockBytes ? bytes - at : kBlockBytes;
      const std::byte* from[kMaxReduceInputs];
      for (size_t rank = 0; rank < input_count; ++rank) {
        from[rank] = inputs[rank] == nullptr ? zeros : inputs[rank] + at;
      }
      std::byte* const first = outputs[0] + at;
      size_t written = 1;
      if (input_count == 2 && output_count >= 2) {
        Fold<2, kScaled, true>(from, block_bytes, factors, first, outputs[1] + at);
        written = 2;
      } else {
        ReduceBlock(from, input_count, block_bytes, factors, first);
      }
      for (; written < output_count; ++written) {
        __builtin_memcpy(outputs[written] + at, first, block_bytes);
      }
    }
  }

 private:
  using Element = typename Lanes::Element;
  using Vector = typename Lanes::Vector;

  static constexpr size_t kBlockBytes = 2048;
  static constexpr size_t kVectorBytes = Lanes::kElements * sizeof(Element);
  static constexpr int kLevels = 6;  // halvings of 256 inputs, until four are left

  static DDP_KERNEL_INLINE Vector Factors(double factor) {
    if constexpr (kScaled) {
      return Lanes::Round(Fill<Lanes>(static_cast<typename Lanes::Scalar>(factor)));
    } else {
      return Vector{};
    }
  }

  using Storage = std::byte[kBlockBytes];

  // Writes the result of one block to `to`, which may be one of `from`.
  static DDP_KERNEL_INLINE void ReduceBlock(const std::byte* const* from, size_t input_count,
                                            size_t bytes, Vector factors, std::byte* to) {
    if (input_count <= 4) return ReduceFew(from, input_count, bytes, factors, to);
    alignas(64) Storage storage[2 * kLevels];
    ReduceHalves(from, input_count, bytes, factors, to, storage);
  }

  static DDP_KERNEL_INLINE void ReduceFew(const std::byte* const* from, size_t input_count,
                                          size_t bytes, Vector factors, std::byte* to) {
    switch (input_count) {
      case 1:
        if (kScaled) return Fold<1, kScaled, false>(from, bytes, factors, to, nullptr);
        if (from[0] != to) __builtin_memcpy(to, from[0], bytes);
        return;
      case 2:
        return Fold<2, kScaled, false>(from, bytes, factors, to, nullptr);
      case 3:
        return Fold<3, kScaled, false>(from, bytes, factors, to, nullptr);
      default:
        return Fold<4, kScaled, false>(from, bytes, factors, to, nullptr);
    }
  }

  // ReduceBlock for more than four inputs: each half of them goes into a block of `storage` first.
  static __attribute__((noinline)) void ReduceHalves(const std::byte* const* from,
                                                     size_t input_count, size_t bytes,
                                                     Vector factors, std::byte* to,
                                                     Storage* storage) {
    const size_t middle = size_t{1} << (63 - __builtin_clzll(input_count - 1));
    const std::byte* halves[2] = {};
    for (int half = 0; half < 2; ++half) {
      const std::byte* const* const inputs = half == 0 ? from : from + middle;
      const size_t count = half == 0 ? middle : input_count - middle;
      halves[half] = count == 1 && !kScaled ? inputs[0] : storage[half];
      if (count > 4) {
        ReduceHalves(inputs, count, bytes, factors, storage[half], storage + 1 + half);
      } else if (halves[half] == storage[half]) {
        ReduceFew(inputs, count, bytes, factors, storage[half]);
      }
    }
    Fold<2, false, false>(halves, bytes, factors, to, nullptr);
  }

  // Writes the tree over kLeaves arrays to `to` and, with kTwo, to `also`. Both may be leaves.
  template <int kLeaves, bool kMultiply, bool kTwo>
  static DDP_KERNEL_INLINE void Fold(const std::byte* const* from, size_t bytes, Vector factors,
                                     std::byte* to, std::byte* also) {
    const std::byte* leaves[kLeaves];  // a copy: the stores below cannot change it
    for (int i = 0; i < kLeaves; ++i) leaves[i] = from[i];
    size_t at = 0;
    for (; at + kVectorBytes <= bytes; at += kVectorBytes) {
      const Vector result = Tree<kLeaves, kMultiply>(leaves, at, factors);
      Lanes::Store(result, to + at);
      if (kTwo) Lanes::Store(result, also + at);
    }
    if (at == bytes) return;
    alignas(64) std::byte rest[kLeaves][kVectorBytes];
    const std::byte* rests[kLeaves];
    for (int i = 0; i < kLeaves; ++i) {
      __builtin_memset(rest[i], 0, kVectorBytes);
      __builtin_memcpy(rest[i], leaves[i] + at, bytes - at);
      rests[i] = rest[i];
    }
    alignas(64) std::byte result[kVectorBytes];
    Lanes::Store(Tree<kLeaves, kMultiply>(rests, 0, factors), result);
    __builtin_memcpy(to + at, result, bytes - at);
    if (kTwo) __builtin_memcpy(also + at, result, bytes - at);
  }

  // Returns the tree over the vectors at `at`. Its root is not rounded.
  template <int kLeaves, bool kMultiply>
  static DDP_KERNEL_INLINE Vector Tree(const std::byte* const* leaves, size_t at, Vector factors) {
    static_assert(1 <= kLeaves && kLeaves <= 4);
    if constexpr (kLeaves == 1) {
      return Leaf<kMultiply>(leaves[0] + at, factors);
    } else if constexpr (kLeaves == 2) {
      return Combine(Leaf<kMultiply>(leaves[0] + at, factors),
                     Leaf<kMultiply>(leaves[1] + at, factors));
    } else {
      return Combine(Lanes::Round(Tree<2, kMultiply>(leaves, at, factors)),
                     Lanes::Round(Tree<kLeaves - 2, kMultiply>(leaves + 2, at, factors)));
    }
  }

  template <bool kMultiply>
  static DDP_KERNEL_INLINE Vector Leaf(const std::byte* from, Vector factors) {
    const Vector leaf = Lanes::Load(from);
    if constexpr (kMultiply) {
      return Lanes::Round(leaf * factors);
    } else {
      return leaf;
    }
  }

  static DDP_KERNEL_INLINE Vector Combine(Vector left, Vector right) {
    if constexpr (kKind == ReduceKind::kSum) return left + right;
    if constexpr (kKind == ReduceKind::kProduct) return left * right;
    if constexpr (kKind == ReduceKind::kMin) return right < left ? right : left;
    if constexpr (kKind == ReduceKind::kMax) return left < right ? right : left;
    if constexpr (kKind == ReduceKind::kBitAnd) return left & right;
    if constexpr (kKind == ReduceKind::kBitOr) return left | right;
    if constexpr (kKind == ReduceKind::kBitXor) return left ^ right;
  }
};

// A sum of floating numbers: with the factor if there is one.
template <class Lanes>
void ReduceSum(const std::byte* const* inputs, size_t input_count, std::byte* const* outputs,
               size_t output_count, size_t count, double factor) {
  if (factor == 1.0) {
    ReduceLoops<Lanes, ReduceKind::kSum, false>::Reduce(inputs, input_count, outputs, output_count,
                                                        count, factor);
  } else {
    ReduceLoops<Lanes, ReduceKind::kSum, true>::Reduce(inputs, input_count, outputs, output_count,
                                                       count, factor);
  }
}

}  // namespace ddp::internal

#endif  // DDP_COMM_KERNELS_REDUCE_LOOPS_H_
