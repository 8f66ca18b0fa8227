#include "ddp/aggregate_fields.h"

#include <any>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

struct Empty {};
struct One {
  int a;
};
struct Nested {
  One one;
  std::string text;
};
struct Greedy {  // types that take a value of any kind themselves
  std::optional<int> a;
  std::variant<int, std::string> b;
  std::any c;
  std::function<void(int)> d;
  std::optional<std::vector<std::string>> e;
  std::vector<std::any> f;
};
struct Unmovable {
  std::atomic<int> a;
  std::unique_ptr<int> b;
  std::vector<std::unique_ptr<int>> c;
  std::atomic<bool> d;
};
struct References {
  int& a;
  const std::string& b;
  std::string c;
  std::unique_ptr<int>&& d;
};
struct WithArrays {
  int a[3];
  std::string b;
  Nested c[2];
  int d[1];
  float e[2][2];
  std::array<int, 7> f;
};
struct NoDefault {
  explicit NoDefault(int value) : value(value) {}
  int value;
};
struct NoDefaults {
  NoDefault a;
  int b;
  NoDefault c;
};
struct BitFields {
  unsigned a : 1;
  unsigned b : 2;
  std::string c;
  const int d;
};
struct Defaults {
  int a = 3;
  std::string b = "b";
  std::map<std::string, int> c = {{"x", 1}};
};
struct Derived : One {
  int b;
};
struct OnlyBase : Nested {};
struct EmptyBase : Empty {
  int b;
};
struct HoldsItsKind {
  std::vector<HoldsItsKind> children;
  std::unique_ptr<HoldsItsKind> next;
  int value;
};
struct BigArray {
  char name[256];
  int value;
};
class Private {
 public:
  int a = 0;

 private:
  [[maybe_unused]] int b_ = 0;
};
struct TwentyFour {
  int a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12;
  std::string b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12;
};
struct TwentyFive {
  TwentyFour a;
  int b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12;
  int c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12;
};

TEST(AggregateFieldsTest, CountsTheFieldsOfPlainStructs) {
  EXPECT_EQ(kFieldCount<One>, 1);
  EXPECT_EQ(kFieldCount<Nested>, 2);
  EXPECT_EQ(kFieldCount<Greedy>, 6);
  EXPECT_EQ(kFieldCount<Unmovable>, 4);
  EXPECT_EQ(kFieldCount<References>, 4);
  EXPECT_EQ(kFieldCount<WithArrays>, 6);
  EXPECT_EQ(kFieldCount<NoDefaults>, 3);
  EXPECT_EQ(kFieldCount<BitFields>, 4);
  EXPECT_EQ(kFieldCount<Defaults>, 3);
  EXPECT_EQ(kFieldCount<HoldsItsKind>, 3);
  EXPECT_EQ(kFieldCount<TwentyFour>, 24);
}

TEST(AggregateFieldsTest, SeesNothingInOtherTypes) {
  EXPECT_EQ(kFieldCount<Empty>, 0);
  EXPECT_EQ(kFieldCount<int>, 0);
  EXPECT_EQ(kFieldCount<std::string>, 0);
  EXPECT_EQ(kFieldCount<Private>, 0);
  EXPECT_EQ(kFieldCount<Derived>, 0);
  EXPECT_EQ(kFieldCount<OnlyBase>, 0);
  EXPECT_EQ(kFieldCount<EmptyBase>, 0);
  EXPECT_EQ(kFieldCount<TwentyFive>, 0);
  EXPECT_EQ(kFieldCount<BigArray>, 0);
}

TEST(AggregateFieldsTest, KnowsTheTypesOfTheFields) {
  EXPECT_TRUE((std::is_same_v<FieldTypes<Nested>, std::tuple<One, std::string>>));
  EXPECT_TRUE((std::is_same_v<FieldTypes<const Nested>, std::tuple<const One, const std::string>>));
  EXPECT_TRUE((std::is_same_v<FieldTypes<BitFields>,
                              std::tuple<unsigned, unsigned, std::string, const int>>));
  EXPECT_TRUE(
      (std::is_same_v<FieldTypes<References>,
                      std::tuple<int&, const std::string&, std::string, std::unique_ptr<int>&&>>));
}

struct Addresses {
  template <typename... Fields>
  std::vector<const void*> operator()(const std::remove_reference_t<Fields>&... fields) const {
    return {static_cast<const void*>(&fields)...};
  }
};

TEST(AggregateFieldsTest, GivesTheFieldsThemselves) {
  Nested nested{{7}, "text"};
  EXPECT_EQ(WithFields(nested, Addresses()), (std::vector<const void*>{&nested.one, &nested.text}));
  std::string text;
  std::unique_ptr<int> pointer;
  int number = 0;
  const References references{number, text, "c", std::move(pointer)};
  EXPECT_EQ(WithFields(references, Addresses()),
            (std::vector<const void*>{&number, &text, &references.c, &pointer}));
  BitFields bits{1, 2, "c", 4};
  EXPECT_EQ(WithFields(bits, Addresses())[2], &bits.c);
}

struct Sum {
  template <typename... Fields>
  int operator()(const std::remove_reference_t<Fields>&... fields) const {
    int sum = 0;
    const auto add = [&sum](const auto& field) {
      if constexpr (std::is_same_v<decltype(field), const int&>) sum += field;
    };
    (add(fields), ...);
    return sum;
  }
};

TEST(AggregateFieldsTest, ReachesTheLastOfManyFields) {
  TwentyFour many{};
  many.a1 = 1;
  many.a12 = 20;
  many.b12 = "last";
  EXPECT_EQ(WithFields(many, Sum()), 21);
  EXPECT_EQ(WithFields(many, Addresses())[23], &many.b12);
}

}  // namespace
}  // namespace ddp::internal
