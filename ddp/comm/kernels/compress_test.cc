#include "ddp/comm/kernels/compress.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ddp/comm/kernels/kernel_table.h"
#include "testing/shared_memory/scalar_reference.h"

namespace ddp::internal {
namespace {

template <ElementType kType>
void Divide(const float* from, float divisor, size_t count, uint16_t* to) {
  DivideAs(kType, from, divisor, count, to);
}
template <ElementType kType>
void Widen(const uint16_t* from, size_t count, float* to) {
  WidenFrom(kType, from, count, to);
}

// One of the two 16-bit types: its functions under test and its reference.
struct Type {
  std::string name;
  CompressFunctions KernelTable::*functions;
  NarrowFunction divide;
  WidenFunction widen;
  uint16_t (*round)(float);
  float (*value)(uint16_t);
};

std::vector<Type> Types() {
  return {{"bfloat16", &KernelTable::bfloat16, Divide<ElementType::kBfloat16>,
           Widen<ElementType::kBfloat16>, Bfloat16Of, FloatOfBfloat16},
          {"half", &KernelTable::half, Divide<ElementType::kHalf>, Widen<ElementType::kHalf>,
           HalfOf, FloatOfHalf}};
}

// Every upper half of a float's bits, each with the lower halves around the points where rounding
// to 16 bits changes, and numbers of any bits. An odd number of them.
std::vector<float> Floats() {
  std::vector<float> floats = {0x1p-149f};
  std::mt19937 random(7);
  const uint32_t lower[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
  for (uint32_t upper = 0; upper < 65536; ++upper) {
    for (const uint32_t bits : lower) floats.push_back(std::bit_cast<float>(upper << 16 | bits));
    floats.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
    // Half drops 13 bits: one of the points where it rounds, and its neighbours.
    const uint32_t middle = upper << 16 | (random() % 8 << 13) | 0x1000;
    for (const int step : {-1, 0, 1}) floats.push_back(std::bit_cast<float>(middle + step));
  }
  return floats;
}

std::vector<uint16_t> AllBits() {
  std::vector<uint16_t> bits;
  for (uint32_t i = 0; i < 65536; ++i) bits.push_back(i);
  return bits;
}

// Narrows from and to odd addresses.
std::vector<uint16_t> Narrowed(NarrowFunction narrow, const std::vector<float>& floats,
                               float operand) {
  std::vector<char> from(floats.size() * 4 + 1);
  std::vector<char> to(floats.size() * 2 + 2, 'x');
  std::memcpy(from.data() + 1, floats.data(), floats.size() * 4);
  narrow(reinterpret_cast<const float*>(from.data() + 1), operand, floats.size(),
         reinterpret_cast<uint16_t*>(to.data() + 1));
  EXPECT_EQ(to.back(), 'x');
  std::vector<uint16_t> narrowed(floats.size());
  std::memcpy(narrowed.data(), to.data() + 1, floats.size() * 2);
  return narrowed;
}

template <class Reference>
void ExpectNarrowed(NarrowFunction narrow, const std::vector<float>& floats, float operand,
                    const Reference& reference) {
  const std::vector<uint16_t> narrowed = Narrowed(narrow, floats, operand);
  for (size_t i = 0; i < floats.size(); ++i) {
    ASSERT_EQ(narrowed[i], reference(floats[i]))
        << "of " << floats[i] << ", bits " << std::hex << std::bit_cast<uint32_t>(floats[i]);
  }
}

TEST(CompressTest, EveryVersionRoundsAsTheReference) {
  const std::vector<float> floats = Floats();
  for (const KernelTable* table : SupportedKernels()) {
    for (const Type& type : Types()) {
      SCOPED_TRACE(type.name + ", " + table->instruction_set);
      const CompressFunctions& functions = table->*type.functions;
      for (const float operand : {1.0f, 1.0f / 3, 0x1p-30f}) {
        ExpectNarrowed(functions.round_multiply, floats, operand, [&](float value) {
          return type.round(type.value(type.round(value)) * operand);
        });
      }
      ExpectNarrowed(functions.round_divide, floats, 7,
                     [&](float value) { return type.round(type.value(type.round(value)) / 7); });
    }
  }
}

TEST(CompressTest, EveryVersionWidensExactly) {
  const std::vector<uint16_t> bits = AllBits();
  for (const KernelTable* table : SupportedKernels()) {
    for (const Type& type : Types()) {
      SCOPED_TRACE(type.name + ", " + table->instruction_set);
      std::vector<float> floats(bits.size());
      (table->*type.functions).widen(bits.data(), bits.size(), floats.data());
      for (const uint16_t i : bits) {
        ASSERT_EQ(std::bit_cast<uint32_t>(floats[i]), std::bit_cast<uint32_t>(type.value(i))) << i;
      }
    }
  }
}

TEST(CompressTest, OddCountsTouchNothingElse) {
  for (const Type& type : Types()) {
    for (size_t count = 0; count < 70; ++count) {
      const std::vector<float> floats(count, 3);
      std::vector<uint16_t> narrowed(count + 1, 7);
      type.divide(floats.data(), 0.5f, count, narrowed.data());
      EXPECT_EQ(narrowed.back(), 7);
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(type.value(narrowed[i]), 6);
      std::vector<float> widened(count + 1, 7);
      type.widen(narrowed.data(), count, widened.data());
      EXPECT_EQ(widened.back(), 7);
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(widened[i], 6);
    }
  }
}

// Divisors that are powers of two take another way than others, and both round twice.
TEST(CompressTest, ADivisionRoundsTheNumberAndTheQuotient) {
  const std::vector<float> floats = Floats();
  for (const Type& type : Types()) {
    for (const float divisor : {1.0f, 2.0f, 3.0f, 8.0f, 1000.0f, 1024.0f}) {
      SCOPED_TRACE(type.name + " / " + std::to_string(divisor));
      ExpectNarrowed(type.divide, floats, divisor, [&](float value) {
        return type.round(type.value(type.round(value)) / divisor);
      });
    }
    // Divisors whose reciprocal is a denormal, infinite or not a power of two's.
    for (const float divisor : {0x1p127f, -2.0f, 0.0f, std::numeric_limits<float>::infinity()}) {
      SCOPED_TRACE(type.name + " / " + std::to_string(divisor));
      ExpectNarrowed(type.divide, {1, 3, -65504, 0x1p-24f}, divisor, [&](float value) {
        return type.round(type.value(type.round(value)) / divisor);
      });
    }
  }
}

TEST(CompressTest, NaNsAreThoseOfTheTypes) {
  const std::vector<float> nans = {std::bit_cast<float>(0xFF812345u),
                                   std::bit_cast<float>(0x7FFFFFFFu)};
  EXPECT_EQ(Narrowed(Divide<ElementType::kBfloat16>, nans, 1),
            (std::vector<uint16_t>{0x7FC0, 0x7FC0}));
  EXPECT_EQ(Narrowed(Divide<ElementType::kHalf>, nans, 1), (std::vector<uint16_t>{0xFE09, 0x7FFF}));
}

}  // namespace
}  // namespace ddp::internal
