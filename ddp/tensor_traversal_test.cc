#include "ddp/tensor_traversal.h"

#include <ATen/Functions.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

#include <any>
#include <array>
#include <atomic>
#include <deque>
#include <filesystem>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

#include "gtest/gtest.h"

namespace mine {

// Not plain: its tensors are private.
class Prediction {
 public:
  explicit Prediction(at::Tensor scores) : scores_(std::move(scores)) {}
  const at::Tensor& scores() const { return scores_; }

  template <typename F>
  friend void for_each_tensor_in(Prediction& prediction, F&& visit) {
    visit(prediction.scores_);
    ddp::for_each_tensor(prediction.more, visit);
  }
  template <typename F>
  friend void for_each_tensor_in(const Prediction& prediction, F&& visit) {
    visit(prediction.scores_);
    ddp::for_each_tensor(prediction.more, visit);
  }

  std::vector<at::Tensor> more;

 private:
  at::Tensor scores_;
};

struct Base {
  at::Tensor a;
};
struct Derived : Base {
  at::Tensor b;
};
template <typename F>
void for_each_tensor_in(const Derived& derived, F&& visit) {
  visit(derived.a);
  visit(derived.b);
}

class Closed {
 public:
  at::Tensor tensor() const { return tensor_; }

 private:
  at::Tensor tensor_;
};

}  // namespace mine

namespace ddp {
namespace {

at::Tensor Number(double value) { return at::scalar_tensor(value, at::kDouble); }

// Returns the numbers in the tensors of a value, in order; -1 for an undefined tensor.
template <typename T>
std::vector<int> Numbers(const T& value) {
  std::vector<int> numbers;
  for_each_tensor(value, [&](const at::Tensor& tensor) {
    numbers.push_back(tensor.defined() ? tensor.item<int>() : -1);
  });
  return numbers;
}

// Adds 10 to each tensor by replacing it.
const auto kReplace = [](at::Tensor& tensor) { tensor = tensor.add(10); };

template <typename T>
std::vector<int> Replaced(T value) {
  for_each_tensor(value, kReplace);
  return Numbers(value);
}

using Ints = std::vector<int>;

TEST(TensorTraversalTest, FindsTensorsInContainers) {
  const at::Tensor a = Number(1), b = Number(2), c = Number(3);
  EXPECT_EQ(Numbers(a), Ints({1}));
  EXPECT_EQ(Numbers(at::Tensor()), Ints({-1}));
  EXPECT_EQ(Replaced(a), Ints({11}));
  EXPECT_EQ(Replaced(std::vector<at::Tensor>{a, b}), Ints({11, 12}));
  EXPECT_EQ(Replaced(std::array<at::Tensor, 2>{a, b}), Ints({11, 12}));
  EXPECT_EQ(Replaced(std::deque<at::Tensor>{a, b}), Ints({11, 12}));
  EXPECT_EQ(Replaced(std::list<at::Tensor>{a, b}), Ints({11, 12}));
  EXPECT_EQ(Replaced(std::pair(a, 5)), Ints({11}));
  EXPECT_EQ(Replaced(std::tuple(a, std::string("x"), b, c)), Ints({11, 12, 13}));
  EXPECT_EQ(Replaced(std::optional(a)), Ints({11}));
  EXPECT_EQ(Replaced(std::optional<at::Tensor>()), Ints());
  EXPECT_EQ(Replaced(std::variant<int, at::Tensor>(a)), Ints({11}));
  EXPECT_EQ(Replaced(std::variant<int, at::Tensor>(4)), Ints());
  EXPECT_EQ(Replaced(std::map<std::string, at::Tensor>{{"x", b}, {"y", a}}), Ints({12, 11}));
  EXPECT_EQ(Replaced(std::unordered_map<int, at::Tensor>{{1, a}}), Ints({11}));
  EXPECT_EQ(Replaced(std::vector<std::map<int, std::optional<at::Tensor>>>{{{1, a}, {2, {}}}}),
            Ints({11}));

  std::vector<at::Tensor> vector = {a, b};
  const std::span<at::Tensor> span(vector);
  for_each_tensor(span, kReplace);
  EXPECT_EQ(Numbers(vector), Ints({11, 12}));
  for_each_tensor(std::tuple(std::ref(vector), 1), kReplace);
  EXPECT_EQ(Numbers(vector), Ints({21, 22}));
  at::Tensor array[2][2] = {{a, b}, {c, a}};
  for_each_tensor(array, kReplace);
  EXPECT_EQ(Numbers(array), Ints({11, 12, 13, 11}));
}

TEST(TensorTraversalTest, FindsTensorsBehindPointers) {
  auto unique = std::make_unique<std::vector<at::Tensor>>(2, Number(1));
  for_each_tensor(unique, kReplace);
  EXPECT_EQ(Numbers(unique), Ints({11, 11}));
  auto shared = std::make_shared<std::pair<at::Tensor, at::Tensor>>(Number(1), Number(2));
  for_each_tensor(shared, kReplace);
  EXPECT_EQ(Numbers(shared), Ints({11, 12}));
  EXPECT_EQ(Numbers(std::shared_ptr<at::Tensor>()), Ints());
}

TEST(TensorTraversalTest, FindsTensorsInValuesOfTheInterpreter) {
  const at::Tensor a = Number(1), b = Number(2);
  EXPECT_EQ(Replaced(c10::IValue(a)), Ints({11}));
  EXPECT_EQ(Replaced(c10::IValue(7)), Ints());
  EXPECT_EQ(Replaced(c10::IValue()), Ints());
  EXPECT_EQ(Replaced(c10::IValue(std::vector<at::Tensor>{a, b})), Ints({11, 12}));
  EXPECT_EQ(Replaced(c10::List<at::Tensor>({a, b})), Ints({11, 12}));
  EXPECT_EQ(Replaced(c10::IValue(c10::ivalue::Tuple::create({a, c10::IValue(3), b}))),
            Ints({11, 12}));
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("x", a);
  EXPECT_EQ(Numbers(c10::IValue(dict)), Ints({1}));
  EXPECT_EQ(Replaced(dict), Ints({11}));
  EXPECT_EQ(Replaced(c10::IValue(dict)), Ints({21}));
}

// A struct that a module may return when it has several results.
struct Plain {
  at::Tensor scores;
  std::map<std::string, at::Tensor> features;
  std::optional<int> count;
  std::pair<at::Tensor, std::string> named;
};
struct Outer {
  unsigned flag : 1;
  Plain plain;
  std::unique_ptr<Plain> more;
  at::Tensor array[2];
  std::atomic<int> counter;
};
struct Tree {
  std::vector<Tree> children;
  at::Tensor value;
};
struct Borrowed {
  at::Tensor& changed;
  const at::Tensor& constant;
};

TEST(TensorTraversalTest, LooksIntoPlainStructs) {
  Outer outer{1, {Number(1), {{"x", Number(2)}}, 4, {Number(3), "n"}}, nullptr, {}, 0};
  outer.array[1] = Number(4);
  outer.more = std::make_unique<Plain>();
  EXPECT_EQ(Numbers(outer), Ints({1, 2, 3, -1, -1, -1, 4}));
  outer.more = nullptr;
  outer.array[0] = Number(5);
  for_each_tensor(outer, kReplace);
  EXPECT_EQ(Numbers(outer), Ints({11, 12, 13, 15, 14}));

  const Tree tree{{{{}, Number(1)}, {{{{}, Number(2)}}, Number(3)}}, Number(4)};
  EXPECT_EQ(Numbers(tree), Ints({1, 2, 3, 4}));
}

TEST(TensorTraversalTest, LeavesConstantTensorsAsTheyAre) {
  at::Tensor changed = Number(1);
  const at::Tensor constant = Number(2);
  Borrowed borrowed{changed, constant};
  EXPECT_EQ(Numbers(borrowed), Ints({1, 2}));
  for_each_tensor(borrowed, kReplace);
  EXPECT_EQ(Numbers(borrowed), Ints({11, 2}));

  const std::vector<at::Tensor> vector = {Number(1)};
  for_each_tensor(vector, kReplace);
  for_each_tensor(at::TensorList(vector), kReplace);
  EXPECT_EQ(Numbers(at::TensorList(vector)), Ints({1}));
}

TEST(TensorTraversalTest, AsksTheClassItself) {
  mine::Prediction prediction(Number(1));
  prediction.more = {Number(2)};
  for_each_tensor(prediction, kReplace);
  EXPECT_EQ(Numbers(prediction), Ints({11, 12}));
  std::vector<mine::Prediction> several = {prediction, prediction};
  for_each_tensor(several, kReplace);
  EXPECT_EQ(Numbers(several), Ints({21, 22, 21, 22}));

  mine::Derived derived{{Number(1)}, Number(2)};
  EXPECT_EQ(Numbers(derived), Ints({1, 2}));
  for_each_tensor(derived, kReplace);  // the function of the class takes constant objects
  EXPECT_EQ(Numbers(derived), Ints({1, 2}));
}

TEST(TensorTraversalTest, PassesOverEverythingElse) {
  int calls = 0;
  const auto count = [&](const at::Tensor&) { ++calls; };
  for_each_tensor(3, count);
  for_each_tensor(2.5, count);
  for_each_tensor(nullptr, count);
  for_each_tensor("text", count);
  for_each_tensor(std::string("text"), count);
  for_each_tensor(std::filesystem::path("a/b"), count);
  for_each_tensor(std::vector<bool>{true}, count);
  for_each_tensor(std::set<int>{1}, count);
  for_each_tensor(std::any(Number(1)), count);
  for_each_tensor(mine::Closed(), count);
  for_each_tensor([] {}, count);
  for_each_tensor(std::monostate(), count);
  std::atomic<int> immovable = 1;
  for_each_tensor(immovable, count);
  for_each_tensor(std::make_unique<int[]>(3), count);
  EXPECT_EQ(calls, 0);
}

class Incomplete;

TEST(TensorTraversalTest, KnowsByTheTypeWhatThereMayBe) {
  EXPECT_TRUE(may_hold_tensors_v<at::Tensor>);
  EXPECT_TRUE(may_hold_tensors_v<const at::Tensor&>);
  EXPECT_TRUE((may_hold_tensors_v<std::vector<std::tuple<int, at::Tensor>>>));
  EXPECT_TRUE(may_hold_tensors_v<Outer>);
  EXPECT_TRUE(may_hold_tensors_v<Tree>);
  EXPECT_TRUE(may_hold_tensors_v<mine::Prediction>);
  EXPECT_TRUE(may_hold_tensors_v<c10::IValue>);
  EXPECT_FALSE(may_hide_tensors_v<Tree>);
  EXPECT_FALSE((may_hide_tensors_v<std::vector<std::tuple<int, at::Tensor>>>));

  EXPECT_FALSE(may_hold_tensors_v<void>);
  EXPECT_FALSE(may_hold_tensors_v<std::string>);
  EXPECT_FALSE(may_hide_tensors_v<std::string>);
  EXPECT_FALSE((may_hold_tensors_v<std::map<int, double>>));
  EXPECT_FALSE((may_hide_tensors_v<std::map<int, double>>));
  EXPECT_FALSE(may_hold_tensors_v<mine::Closed>);
  EXPECT_TRUE(may_hide_tensors_v<mine::Closed>);
  EXPECT_TRUE(may_hide_tensors_v<std::vector<mine::Closed>>);
  EXPECT_TRUE(may_hide_tensors_v<std::shared_ptr<Incomplete>>);
  EXPECT_TRUE(may_hide_tensors_v<mine::Base*>);
}

}  // namespace
}  // namespace ddp
