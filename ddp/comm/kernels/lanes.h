// Vectors of numbers in the syntax that GCC and clang share, for the kernels of every instruction
// set.
//
// The kernels are compiled once for each instruction set, with its own compiler options. The linker
// may merge equal inline functions of all these files, and would then give the instructions of one
// to another. Two rules prevent this:
// - Every template here has the parameter Isa, which differs between the files.
// - These files call no inline function of the standard library.
//
// An Isa has:
//   kVectorBytes: the size of a vector register.
//   Floats, Words, Shorts: vectors of kVectorBytes / 4 numbers of type float, uint32_t, uint16_t.
//   static Floats FromHalf(Shorts): exact; makes a signalling NaN quiet.
//   static Shorts ToHalf(Floats): rounds to nearest even; keeps the upper bits of a NaN's payload
//   and makes it quiet.
#ifndef DDP_COMM_KERNELS_LANES_H_
#define DDP_COMM_KERNELS_LANES_H_

#include <cstddef>
#include <cstdint>

#define DDP_KERNEL_INLINE inline __attribute__((always_inline))

namespace ddp::internal {

// The vectors for `Isa` of numbers that are computed in their own type. Lanes for other types have
// the same members.
template <class Isa, class T>
struct PlainLanes {
  using Element = T;
  using Scalar = T;  // what a vector consists of
  typedef T Vector __attribute__((vector_size(Isa::kVectorBytes)));
  static constexpr size_t kElements = Isa::kVectorBytes / sizeof(T);

  static DDP_KERNEL_INLINE Vector Load(const void* from) {
    Vector vector;
    __builtin_memcpy(&vector, from, sizeof(vector));
    return vector;
  }
  // Rounds to the element's type, and stores.
  static DDP_KERNEL_INLINE void Store(Vector vector, void* to) {
    __builtin_memcpy(to, &vector, sizeof(vector));
  }
  // Rounds to the element's type.
  static DDP_KERNEL_INLINE Vector Round(Vector vector) { return vector; }
};

template <class Isa>
struct Bfloat16Lanes {
  using Element = uint16_t;
  using Scalar = float;
  using Vector = typename Isa::Floats;
  using Words = typename Isa::Words;
  using Shorts = typename Isa::Shorts;
  static constexpr size_t kElements = Isa::kVectorBytes / sizeof(float);

  static DDP_KERNEL_INLINE Vector Load(const void* from) {
    Shorts bits;
    __builtin_memcpy(&bits, from, sizeof(bits));
    return (Vector)(__builtin_convertvector(bits, Words) << 16);
  }
  static DDP_KERNEL_INLINE void Store(Vector vector, void* to) {
    const Words high = RoundedHigh(vector) >> 16;
    const Shorts bits = __builtin_convertvector(high, Shorts);
    __builtin_memcpy(to, &bits, sizeof(bits));
  }
  static DDP_KERNEL_INLINE Vector Round(Vector vector) {
    return (Vector)(RoundedHigh(vector) & 0xFFFF0000u);
  }

 private:
  // The upper half of each word is the rounded number. The lower half is arbitrary.
  static DDP_KERNEL_INLINE Words RoundedHigh(Vector vector) {
    const Words bits = (Words)vector;
    const Words rounded = bits + (((bits >> 16) & 1u) + 0x7FFFu);
    const Words quiet_nan = Words{} + 0x7FC00000u;
    return vector == vector ? rounded : quiet_nan;
  }
};

template <class Isa>
struct HalfLanes {
  using Element = uint16_t;
  using Scalar = float;
  using Vector = typename Isa::Floats;
  static constexpr size_t kElements = Isa::kVectorBytes / sizeof(float);

  static DDP_KERNEL_INLINE Vector Load(const void* from) {
    typename Isa::Shorts bits;
    __builtin_memcpy(&bits, from, sizeof(bits));
    return Isa::FromHalf(bits);
  }
  static DDP_KERNEL_INLINE void Store(Vector vector, void* to) {
    const typename Isa::Shorts bits = Isa::ToHalf(vector);
    __builtin_memcpy(to, &bits, sizeof(bits));
  }
  static DDP_KERNEL_INLINE Vector Round(Vector vector) {
    return Isa::FromHalf(Isa::ToHalf(vector));
  }
};

// Returns a vector with `value` in every element.
template <class Lanes>
DDP_KERNEL_INLINE typename Lanes::Vector Fill(typename Lanes::Scalar value) {
  typename Lanes::Vector vector;
  for (size_t i = 0; i < Lanes::kElements; ++i) vector[i] = value;
  return vector;
}

}  // namespace ddp::internal

#endif  // DDP_COMM_KERNELS_LANES_H_
