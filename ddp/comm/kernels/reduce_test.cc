#include "ddp/comm/kernels/reduce.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "ddp/comm/kernels/element_type.h"
#include "ddp/comm/kernels/kernel_table.h"
#include "testing/shared_memory/scalar_reference.h"

namespace ddp::internal {
namespace {

// ---- The reference: one element at a time.

// A type that is computed in itself.
template <class T, ElementType kElement>
struct Native {
  using Stored = T;
  using Computed = T;
  static constexpr ElementType kType = kElement;
  static T Load(T value) { return value; }
  static T Round(T value) { return value; }
};

struct Half {
  using Stored = uint16_t;
  using Computed = float;
  static constexpr ElementType kType = ElementType::kHalf;
  static float Load(uint16_t bits) { return FloatOfHalf(bits); }
  static uint16_t Round(float value) { return HalfOf(value); }
};

struct Bfloat16 {
  using Stored = uint16_t;
  using Computed = float;
  static constexpr ElementType kType = ElementType::kBfloat16;
  static float Load(uint16_t bits) { return FloatOfBfloat16(bits); }
  static uint16_t Round(float value) { return Bfloat16Of(value); }
};

template <class T>
T Combine(ReduceKind kind, T left, T right) {
  if (kind == ReduceKind::kMin) return std::min(left, right);
  if (kind == ReduceKind::kMax) return std::max(left, right);
  if constexpr (std::is_floating_point_v<T>) {
    return kind == ReduceKind::kSum ? left + right : left * right;
  } else {
    const uint64_t a = left, b = right;
    switch (kind) {
      case ReduceKind::kSum:
        return static_cast<T>(a + b);
      case ReduceKind::kProduct:
        return static_cast<T>(a * b);
      case ReduceKind::kBitAnd:
        return static_cast<T>(a & b);
      case ReduceKind::kBitOr:
        return static_cast<T>(a | b);
      default:
        return static_cast<T>(a ^ b);
    }
  }
}

template <class Type>
using Stored = typename Type::Stored;

template <class Type>
Stored<Type> Tree(ReduceKind kind, std::span<const Stored<Type>> leaves) {
  if (leaves.size() == 1) return leaves[0];
  const size_t left = std::bit_floor(leaves.size() - 1);
  return Type::Round(
      Combine<typename Type::Computed>(kind, Type::Load(Tree<Type>(kind, leaves.subspan(0, left))),
                                       Type::Load(Tree<Type>(kind, leaves.subspan(left)))));
}

template <class Type>
using Arrays = std::vector<std::vector<Stored<Type>>>;

template <class Type>
std::vector<Stored<Type>> Expected(ReduceKind kind, const Arrays<Type>& arrays, double factor) {
  const auto typed_factor = Type::Load(Type::Round(static_cast<typename Type::Computed>(factor)));
  std::vector<Stored<Type>> expected;
  for (size_t i = 0; i < arrays[0].size(); ++i) {
    std::vector<Stored<Type>> leaves;
    for (const auto& array : arrays) {
      leaves.push_back(factor == 1 ? array[i] : Type::Round(Type::Load(array[i]) * typed_factor));
    }
    expected.push_back(Tree<Type>(kind, leaves));
  }
  return expected;
}

// ---- Numbers

template <class Type>
Stored<Type> Draw(std::mt19937_64& random) {
  using Computed = typename Type::Computed;
  if constexpr (std::is_floating_point_v<Computed>) {
    using Limits = std::numeric_limits<Computed>;
    static const std::vector<Computed> special = {0,
                                                  Computed(-0.0),
                                                  Limits::infinity(),
                                                  -Limits::infinity(),
                                                  Limits::quiet_NaN(),
                                                  Limits::max(),
                                                  Limits::denorm_min(),
                                                  -Limits::min() / 4,
                                                  65504,
                                                  65520,
                                                  1,
                                                  -1,
                                                  std::ldexp(Computed(1), -24),
                                                  std::ldexp(Computed(-3), -20)};
    const int choice = random() % 64;
    if (choice < special.size()) return Type::Round(special[choice]);
    if (choice < 24) {  // any bits, of which few are NaN
      Stored<Type> bits;
      const uint64_t word = random();
      std::memcpy(&bits, &word, sizeof(bits));
      return bits;
    }
    return Type::Round(std::uniform_real_distribution<Computed>(-3, 3)(random));
  } else {
    return static_cast<Stored<Type>>(random());
  }
}

template <class Type>
Arrays<Type> DrawArrays(size_t ranks, size_t count, std::mt19937_64& random) {
  Arrays<Type> arrays(ranks, std::vector<Stored<Type>>(count));
  for (auto& array : arrays) {
    for (auto& element : array) element = Draw<Type>(random);
  }
  return arrays;
}

// An array at an address that need not be aligned, between two bytes that must stay.
class Placed {
 public:
  Placed(const void* elements, size_t bytes, size_t offset)
      : memory_(bytes + offset + 1, std::byte{0xA5}), bytes_(bytes), offset_(offset) {
    if (elements != nullptr) std::memcpy(data(), elements, bytes);
  }

  std::byte* data() { return memory_.data() + offset_; }

  bool NeighboursStay() const {
    return memory_[offset_ + bytes_] == std::byte{0xA5} &&
           (offset_ == 0 || memory_[offset_ - 1] == std::byte{0xA5});
  }

  template <class T>
  std::vector<T> Elements() {
    std::vector<T> elements(bytes_ / sizeof(T));
    if (bytes_ != 0) std::memcpy(elements.data(), data(), bytes_);
    return elements;
  }

 private:
  std::vector<std::byte> memory_;
  size_t bytes_;
  size_t offset_;
};

// Two NaNs are equal: the payload of a result of two NaNs is open. That of bfloat16 is not.
template <class Type>
bool Same(Stored<Type> a, Stored<Type> b) {
  if (std::memcmp(&a, &b, sizeof(a)) == 0) return true;
  if constexpr (std::is_floating_point_v<typename Type::Computed>) {
    if (Type::kType != ElementType::kBfloat16) {
      return std::isnan(Type::Load(a)) && std::isnan(Type::Load(b));
    }
  }
  return false;
}

template <class Type>
testing::AssertionResult AllSame(const std::vector<Stored<Type>>& actual,
                                 const std::vector<Stored<Type>>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (Same<Type>(actual[i], expected[i])) continue;
    return testing::AssertionFailure() << "element " << i << " is " << Type::Load(actual[i])
                                       << " instead of " << Type::Load(expected[i]);
  }
  return testing::AssertionSuccess();
}

// ---- Every version against the reference

struct Case {
  ReduceKind kind = ReduceKind::kSum;
  size_t ranks = 2;
  size_t count = 1;
  double factor = 1;
  bool nulls = false;  // every third rank has a null input
};

// `written`: the outputs. The first of them are inputs, when `in_place`.
template <class Type>
void CheckPlacement(const KernelTable& table, const Case& c, const Arrays<Type>& arrays,
                    const std::vector<Stored<Type>>& expected, size_t written, bool in_place) {
  const size_t bytes = c.count * sizeof(Stored<Type>);
  std::vector<Placed> inputs;
  std::vector<Placed> others;
  for (size_t rank = 0; rank < c.ranks; ++rank) {
    inputs.emplace_back(arrays[rank].data(), bytes, rank % 5);
  }
  for (size_t i = 0; i < written; ++i) others.emplace_back(nullptr, bytes, (i + 3) % 7);
  std::vector<const std::byte*> from;
  for (size_t rank = 0; rank < c.ranks; ++rank) {
    from.push_back(c.nulls && rank % 3 == 1 ? nullptr : inputs[rank].data());
  }
  std::vector<std::byte*> to;
  for (size_t i = 0; i < written; ++i) {
    // In place, the order of the outputs is not that of the ranks.
    const size_t rank = c.ranks - 1 - i;
    to.push_back(in_place && i < c.ranks ? inputs[rank].data() : others[i].data());
  }
  ReduceTreeWith(table, c.kind, Type::kType, from, to, c.count, c.factor);
  for (size_t i = 0; i < written; ++i) {
    Placed& output = in_place && i < c.ranks ? inputs[c.ranks - 1 - i] : others[i];
    EXPECT_TRUE(AllSame<Type>(output.template Elements<Stored<Type>>(), expected));
    EXPECT_TRUE(output.NeighboursStay());
  }
  for (size_t rank = 0; rank < c.ranks; ++rank) {
    EXPECT_TRUE(inputs[rank].NeighboursStay());
    if (in_place && rank + written >= c.ranks) continue;
    EXPECT_EQ(std::memcmp(inputs[rank].data(), arrays[rank].data(), bytes), 0);
  }
}

template <class Type>
void CheckCase(const Case& c, std::mt19937_64& random) {
  Arrays<Type> arrays = DrawArrays<Type>(c.ranks, c.count, random);
  if (c.nulls) {
    for (size_t rank = 1; rank < c.ranks; rank += 3) std::fill_n(arrays[rank].begin(), c.count, 0);
  }
  const std::vector<Stored<Type>> expected = Expected<Type>(c.kind, arrays, c.factor);
  for (const KernelTable* table : SupportedKernels()) {
    SCOPED_TRACE(testing::Message()
                 << table->instruction_set << ", kind " << int(c.kind) << ", type "
                 << int(Type::kType) << ", " << c.ranks << " ranks, " << c.count
                 << " elements, factor " << c.factor << (c.nulls ? ", with null inputs" : ""));
    CheckPlacement<Type>(*table, c, arrays, expected, 1, false);
    CheckPlacement<Type>(*table, c, arrays, expected, 2, false);
    if (c.nulls) continue;  // a null input cannot be an output
    CheckPlacement<Type>(*table, c, arrays, expected, 1, true);
    CheckPlacement<Type>(*table, c, arrays, expected, c.ranks, true);
    CheckPlacement<Type>(*table, c, arrays, expected, c.ranks + 1, true);
  }
}

template <class Type>
class ReduceTreeTest : public testing::Test {
 protected:
  static constexpr bool kFloating = std::is_floating_point_v<typename Type::Computed>;

  std::mt19937_64 random_{20240607};
};

using Types =
    testing::Types<Native<uint8_t, ElementType::kUint8>, Native<int8_t, ElementType::kInt8>,
                   Native<int16_t, ElementType::kInt16>, Native<int32_t, ElementType::kInt32>,
                   Native<int64_t, ElementType::kInt64>, Half, Bfloat16,
                   Native<float, ElementType::kFloat>, Native<double, ElementType::kDouble>>;
TYPED_TEST_SUITE(ReduceTreeTest, Types);

TYPED_TEST(ReduceTreeTest, SizeIsThatOfTheType) {
  EXPECT_EQ(SizeOf(TypeParam::kType), sizeof(Stored<TypeParam>));
}

TYPED_TEST(ReduceTreeTest, EveryKindForAFewRanks) {
  for (int kind = 0; kind < (this->kFloating ? 4 : kReduceKinds); ++kind) {
    for (const size_t ranks : {1, 2, 3, 4, 5, 6, 7, 8}) {
      for (const size_t count : {1, 3, 67, 1029}) {
        CheckCase<TypeParam>({.kind = ReduceKind(kind), .ranks = ranks, .count = count},
                             this->random_);
      }
    }
  }
}

TYPED_TEST(ReduceTreeTest, SumsOfManyRanks) {
  for (const size_t ranks : {9, 11, 13, 15, 16, 31, 64, 100, 253, 254, 255, 256}) {
    CheckCase<TypeParam>({.ranks = ranks, .count = 37}, this->random_);
  }
}

TYPED_TEST(ReduceTreeTest, ANullInputIsZeros) {
  for (const size_t ranks : {2, 3, 4, 5, 8, 9}) {
    CheckCase<TypeParam>({.ranks = ranks, .count = 1029, .nulls = true}, this->random_);
  }
}

TYPED_TEST(ReduceTreeTest, SumsWithAFactor) {
  if (!this->kFloating) return;
  for (const double factor : {1.0 / 3, 0.1, -0.0, 1e-30, 0.5}) {
    for (const size_t ranks : {1, 2, 3, 4, 5, 6, 7, 9}) {
      CheckCase<TypeParam>({.ranks = ranks, .count = 531, .factor = factor}, this->random_);
    }
  }
}

// ---- Single properties, with the kernels that every caller gets

template <class T>
T ReduceOne(ReduceKind kind, ElementType type, std::vector<T> values) {
  std::vector<const std::byte*> from;
  for (const T& value : values) from.push_back(reinterpret_cast<const std::byte*>(&value));
  T result;
  std::byte* const to[] = {reinterpret_cast<std::byte*>(&result)};
  ReduceTree(kind, type, from, to, 1);
  return result;
}

TEST(ReduceTreeOrderTest, RanksAreAddedInPairs) {
  // 1 is lost beside 2^24, and 2 is not.
  const float big = 16777216;
  const auto sum = [](std::vector<float> values) {
    return ReduceOne(ReduceKind::kSum, ElementType::kFloat, values);
  };
  EXPECT_EQ(sum({big, 1, 1}), big);
  EXPECT_EQ(sum({big, 0, 1, 1}), big + 2);
  EXPECT_EQ(sum({big, 1, 1, 1}), big + 2);
  EXPECT_EQ(sum({big, 0, 0, 0, 1, 1}), big + 2);
}

TEST(ReduceTreeOrderTest, MinAndMaxChooseLikeStd) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto of = [](ReduceKind kind, float left, float right) {
    return ReduceOne<float>(kind, ElementType::kFloat, {left, right});
  };
  for (const ReduceKind kind : {ReduceKind::kMin, ReduceKind::kMax}) {
    EXPECT_TRUE(std::isnan(of(kind, nan, 1)));
    EXPECT_EQ(of(kind, 1, nan), 1);
    EXPECT_TRUE(std::signbit(of(kind, -0.0f, 0.0f)));
    EXPECT_FALSE(std::signbit(of(kind, 0.0f, -0.0f)));
  }
}

TEST(ReduceTreeOrderTest, ANaNKeepsItsPayloadBesideANumber) {
  const uint32_t nan = 0xFFC12345;
  const uint32_t one = std::bit_cast<uint32_t>(1.0f);
  EXPECT_EQ(ReduceOne<uint32_t>(ReduceKind::kSum, ElementType::kFloat, {nan, one}), nan);
  EXPECT_EQ(ReduceOne<uint32_t>(ReduceKind::kSum, ElementType::kFloat, {one, nan}), nan);
  EXPECT_EQ(ReduceOne<uint16_t>(ReduceKind::kSum, ElementType::kHalf, {0x3C00, 0xFE12}), 0xFE12);
  EXPECT_EQ(ReduceOne<uint16_t>(ReduceKind::kSum, ElementType::kBfloat16, {0x3F80, 0xFFFF}),
            0x7FC0);
}

TEST(ReduceTreeOrderTest, ZeroPlusANullInputIsPositive) {
  const float minus_zero = -0.0f;
  float sum = 1;
  const std::byte* const from[] = {reinterpret_cast<const std::byte*>(&minus_zero), nullptr};
  std::byte* const to[] = {reinterpret_cast<std::byte*>(&sum)};
  ReduceTree(ReduceKind::kSum, ElementType::kFloat, from, to, 1);
  EXPECT_EQ(std::bit_cast<uint32_t>(sum), 0u);
}

#if defined(__x86_64__)
// at::set_flush_denormal(true) sets these bits for the calling thread alone.
TEST(ReduceTreeOrderTest, AThreadThatFlushesDenormalsAddsTheSame) {
  constexpr unsigned kFlush = 1U << 15 | 1U << 6;
  const std::vector<float> denormals(100, 1e-40f);
  std::vector<float> sums(denormals.size());
  const std::byte* const inputs[] = {reinterpret_cast<const std::byte*>(denormals.data()),
                                     reinterpret_cast<const std::byte*>(denormals.data())};
  auto* const output = reinterpret_cast<std::byte*>(sums.data());
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kFlush);
  ReduceTree(ReduceKind::kSum, ElementType::kFloat, inputs, std::span(&output, 1), sums.size());
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(after & kFlush, kFlush) << "the thread's own setting";
  for (size_t i = 0; i < sums.size(); ++i) ASSERT_EQ(sums[i], denormals[i] * 2) << i;
}
#endif

TEST(ReduceTreeOrderTest, NoElementsAndNoOutputsAreNothing) {
  const std::byte* const from[] = {nullptr, nullptr};
  std::byte* const to[] = {nullptr};
  ReduceTree(ReduceKind::kMax, ElementType::kFloat, from, to, 0);
  ReduceTree(ReduceKind::kSum, ElementType::kFloat, from, {}, 5);
}

TEST(ReduceTreeDeathTest, ACallThatDoesNotFitDies) {
  float value = 1;
  const std::byte* const from[] = {reinterpret_cast<const std::byte*>(&value), nullptr};
  std::byte* const to[] = {reinterpret_cast<std::byte*>(&value)};
  const auto reduce = [&](ReduceKind kind, ElementType type, double factor) {
    ReduceTree(kind, type, from, to, 1, factor);
  };
  EXPECT_DEATH(reduce(ReduceKind::kMax, ElementType::kFloat, 1), "a null input");
  EXPECT_DEATH(reduce(ReduceKind::kSum, ElementType::kInt32, 0.5), "factor 0.5");
  EXPECT_DEATH(reduce(ReduceKind::kProduct, ElementType::kFloat, 0.5), "factor 0.5");
  EXPECT_DEATH(ReduceTree(ReduceKind::kBitOr, ElementType::kFloat, {from, 1}, to, 1), "bitwise");
  EXPECT_DEATH(ReduceTree(ReduceKind::kSum, ElementType::kFloat, {}, to, 1), "0 inputs");
}

}  // namespace
}  // namespace ddp::internal
