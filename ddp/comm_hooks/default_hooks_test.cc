// Tests the comm hooks of the library, and the arguments and results of every comm hook, on real
// processes.
#include "ddp/default_hooks.h"

#include <ATen/ATen.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ddp/comm/kernels/compress.h"
#include "ddp/comm_hook.h"
#include "ddp/common/error.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using internal::BindCommHook;
using internal::CheckedHookResult;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kRows = 1000;

// A matrix and a vector; equal on every rank, except the gradients.
GradBucket DenseBucket(const at::Tensor& buffer) {
  const int64_t columns = buffer.numel() / kRows - 1;
  return GradBucket({.index = 2,
                     .is_last = true,
                     .buffer = buffer,
                     .parameters = {torch::zeros({kRows, columns}), torch::zeros({kRows})},
                     .names = {"layer.weight", "layer.bias"}});
}

at::Tensor GradientOf(int rank) {
  at::Tensor gradient = torch::arange(kRows * 4, at::kFloat) * 0.001 + rank;
  return gradient.sin_().mul_(rank + 1);
}

// Rows that only some ranks share; row 0 is there twice.
at::Tensor SparseGradientOf(int rank) {
  const at::Tensor indices = torch::empty({1, 4}, at::kLong);
  for (int i = 0; i < 4; ++i) indices[0][i] = i == 3 ? 0 : i * (rank + 1);
  return at::sparse_coo_tensor(indices, GradientOf(rank).narrow(0, 0, 12).view({4, 3}), {50, 3});
}

// Returns each rank's contribution in `type`, summed like the backend's sum, as float. Exact: a sum
// of two numbers has one rounding in any order.
at::Tensor Average(int ranks, at::ScalarType type,
                   const std::function<at::Tensor(int)>& gradient_of) {
  at::Tensor sum;
  for (int rank = 0; rank < ranks; ++rank) {
    const at::Tensor part = gradient_of(rank).to(type).mul_(1.0 / ranks);
    sum = sum.defined() ? sum.add_(part) : part;
  }
  return sum.to(at::kFloat);
}

at::Tensor ResultOf(const CommHook& hook, GradBucket& bucket) {
  const TensorFuture future = hook(bucket);
  future->waitAndThrow();
  return CheckedHookResult(bucket, future->value());
}

const std::map<std::string, at::ScalarType>& Types() {
  static const auto& types = *new std::map<std::string, at::ScalarType>{
      {"allreduce", at::kFloat}, {"fp16", at::kHalf}, {"bf16", at::kBFloat16}};
  return types;
}

std::map<std::string, CommHook> HooksOver(const std::shared_ptr<ProcessGroup>& group) {
  return {{"allreduce", BindCommHook(group, allreduce_hook)},
          {"fp16", BindCommHook(group, fp16_compress_hook)},
          {"bf16", BindCommHook(group, bf16_compress_hook)}};
}

RANK_TEST(DefaultHooksTest, AveragesDenseGradients, 2) {
  const auto group = init_process_group();
  for (const auto& [name, hook] : HooksOver(group)) {
    GradBucket bucket = DenseBucket(GradientOf(group->rank()));
    const at::Tensor result = ResultOf(hook, bucket);
    EXPECT_TRUE(result.is_same(bucket.buffer())) << name;  // no second copy of the gradients
    EXPECT_TRUE(at::equal(result, Average(group->size(), Types().at(name), GradientOf))) << name;
    EXPECT_TRUE(at::equal(bucket.gradients()[1], result.narrow(0, 3 * kRows, kRows)));
  }
}

RANK_TEST(DefaultHooksTest, AveragesSparseGradients, .world_size = 2,
          .not_on_device = "sparse gradients are refused, as with NCCL") {
  const auto group = init_process_group();
  for (const auto& [name, hook] : HooksOver(group)) {
    GradBucket bucket({.buffer = SparseGradientOf(group->rank()),
                       .parameters = {torch::zeros({50, 3})},
                       .names = {"table"}});
    EXPECT_TRUE(bucket.gradients()[0].is_same(bucket.buffer()));
    const at::Tensor result = ResultOf(hook, bucket).to_dense();
    const at::Tensor expected = Average(group->size(), at::kFloat, SparseGradientOf).to_dense();
    EXPECT_TRUE(at::allclose(result, expected, 1e-6, 1e-6)) << name;
  }
}

// A hook's state, of a type that the library does not know.
struct Recorder {
  std::shared_ptr<ProcessGroup> group;
  int calls = 0;
  at::ScalarType type = at::kFloat;
  std::vector<std::vector<int64_t>> shapes;
};

TensorFuture Record(const std::shared_ptr<Recorder>& state, GradBucket& bucket) {
  ++state->calls;
  state->type = bucket.buffer().scalar_type();
  state->shapes.clear();
  for (const at::Tensor& gradient : bucket.gradients()) {
    state->shapes.push_back(gradient.sizes().vec());
    EXPECT_TRUE(gradient.is_alias_of(bucket.buffer()));
  }
  EXPECT_EQ(bucket.index(), 2);
  EXPECT_TRUE(bucket.is_last());
  EXPECT_THAT(bucket.names(), ElementsAre("layer.weight", "layer.bias"));
  return allreduce_hook(state->group, bucket);
}

RANK_TEST(DefaultHooksTest, WrappersShowTheHookALowerType, 2) {
  const auto group = init_process_group();
  const auto state = std::make_shared<Recorder>(Recorder{.group = group});
  const auto check = [&](const CommHook& hook, at::ScalarType type) {
    GradBucket bucket = DenseBucket(GradientOf(group->rank()));
    const at::Tensor buffer = bucket.buffer();
    const at::Tensor result = ResultOf(hook, bucket);
    EXPECT_TRUE(result.is_same(buffer));
    EXPECT_TRUE(at::equal(result, Average(group->size(), type, GradientOf)));
    EXPECT_EQ(state->type, type);
    EXPECT_THAT(state->shapes, ElementsAre(ElementsAre(kRows, 3), ElementsAre(kRows)));
  };
  // Once the caller passes the state, once the hook has it already.
  check(BindCommHook(state, fp16_compress_wrapper(Record)), at::kHalf);
  check(bf16_compress_wrapper(BindCommHook(state, Record)), at::kBFloat16);
  EXPECT_EQ(state->calls, 2);
}

RANK_TEST(DefaultHooksTest, NoopKeepsEveryRanksOwn, 2) {
  const auto group = init_process_group();
  GradBucket bucket = DenseBucket(GradientOf(group->rank()));
  EXPECT_TRUE(at::equal(ResultOf(noop_hook, bucket), GradientOf(group->rank())));
}

// ---- Tests without ranks.

template <typename Function>
std::string ReductionErrorOf(const Function& function) {
  try {
    function();
  } catch (const ReductionError& error) {
    return error.what_without_backtrace();
  }
  return "no ReductionError";
}

std::string ComplaintAbout(const c10::IValue& value) {
  const GradBucket bucket = DenseBucket(torch::zeros({kRows * 4}));
  return ReductionErrorOf([&] { CheckedHookResult(bucket, value); });
}

TEST(CheckedHookResultTest, NamesBucketParametersAndBothSides) {
  EXPECT_EQ(ComplaintAbout(torch::zeros({kRows * 4}, at::kDouble)),
            "the comm hook's result for gradient bucket 2 (layer.weight, layer.bias) is a tensor "
            "of shape [4000], Double, on cpu; it must be like the bucket's buffer, a tensor of "
            "shape [4000], Float, on cpu");
  EXPECT_THAT(ComplaintAbout(torch::zeros({10})), HasSubstr("is a tensor of shape [10], Float"));
  EXPECT_THAT(ComplaintAbout(torch::zeros({kRows, 4})), HasSubstr("of shape [1000, 4]"));
  EXPECT_THAT(ComplaintAbout(torch::zeros({kRows * 4}, at::kMeta)), HasSubstr("on meta; it must"));
  EXPECT_THAT(ComplaintAbout(torch::zeros({kRows * 4}).to_sparse()), HasSubstr("a sparse tensor"));
  EXPECT_THAT(ComplaintAbout(at::Tensor()), HasSubstr("is an undefined tensor"));
  EXPECT_THAT(ComplaintAbout(c10::IValue(1.5)), HasSubstr("a future gave Double where a tensor"));
  EXPECT_THAT(ComplaintAbout(c10::IValue()), HasSubstr("a future gave None"));
  const std::vector<at::Tensor> two(2, torch::zeros({kRows * 4}));
  EXPECT_THAT(ComplaintAbout(two), HasSubstr("a list of 2 tensors"));
}

TEST(CheckedHookResultTest, TakesATensorOrAListOfOne) {
  const GradBucket bucket = DenseBucket(torch::zeros({kRows * 4}));
  const at::Tensor result = torch::ones({kRows * 4});
  EXPECT_TRUE(CheckedHookResult(bucket, result).is_same(result));
  EXPECT_TRUE(CheckedHookResult(bucket, std::vector<at::Tensor>{result}).is_same(result));
}

TEST(CheckedHookResultTest, ShortensManyNames) {
  std::vector<std::string> names;
  for (int i = 0; i < 1000; ++i) names.push_back("p" + std::to_string(i));
  const GradBucket bucket({.buffer = torch::zeros({1000}), .names = names});
  EXPECT_THAT(ReductionErrorOf([&] { CheckedHookResult(bucket, torch::zeros({1})); }),
              HasSubstr("(p0, p1, p2, p3, p4, p5, p6, p7 and 992 more) is"));
}

TEST(GradBucketTest, GradientsAreTheBuffersPartsInTheParametersShapes) {
  const at::Tensor image = torch::zeros({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor complex = torch::zeros({3, 2}, at::kComplexFloat).t();
  const at::Tensor expanded = torch::zeros({1}).expand({4});
  const at::Tensor buffer = torch::arange(120 + 12 + 0 + 4, at::kFloat);
  GradBucket bucket(
      {.buffer = buffer, .parameters = {image, complex, torch::zeros({0, 7}), expanded}});
  const std::vector<at::Tensor> gradients = bucket.gradients();
  ASSERT_EQ(gradients.size(), 4u);
  EXPECT_EQ(gradients[0].strides(), image.strides());
  EXPECT_EQ(gradients[1].strides(), complex.strides());
  EXPECT_EQ(gradients[2].sizes(), at::IntArrayRef({0, 7}));
  EXPECT_EQ(gradients[3].strides(), at::IntArrayRef({1}));
  EXPECT_EQ(gradients[0][0][1][0][0].item<float>(), 1);
  EXPECT_EQ(gradients[1][1][0].item<c10::complex<float>>(), c10::complex<float>(122, 123));
  EXPECT_EQ(gradients[3][0].item<float>(), 132);
  for (const at::Tensor& gradient : gradients) EXPECT_TRUE(gradient.is_alias_of(buffer));
  // The parts follow the new buffer.
  bucket.set_buffer(buffer.to(at::kDouble) * 2);
  EXPECT_EQ(bucket.gradients()[3][0].item<double>(), 264);
  EXPECT_EQ(bucket.gradients()[1].scalar_type(), at::kComplexDouble);
}

// ---- The kernels that the hooks use, against LibTorch

// Floats with every upper half of their bits: all exponents, infinities and NaNs among them.
at::Tensor ManyFloats() {
  std::vector<int32_t> bits;
  for (uint32_t upper = 0; upper < 65536; ++upper) {
    for (const uint32_t lower : {0x0000u, 0x7FFFu, 0x8000u, 0x8001u, 0x1000u, 0x3001u}) {
      bits.push_back(static_cast<int32_t>(upper << 16 | lower));
    }
  }
  return at::tensor(bits).view(at::kFloat);
}

void ExpectEqualBits(const at::Tensor& actual, const at::Tensor& expected) {
  // A NaN has other bits in LibTorch's vectors than in its single numbers.
  EXPECT_TRUE(at::equal(actual.isnan(), expected.isnan()));
  EXPECT_TRUE(
      at::equal(actual.nan_to_num(0).view(at::kShort), expected.nan_to_num(0).view(at::kShort)));
}

TEST(CompressKernelTest, HasTheBitsOfLibTorch) {
  const at::Tensor floats = ManyFloats();
  const float* const from = floats.const_data_ptr<float>();
  for (const at::ScalarType type : {at::kHalf, at::kBFloat16}) {
    const auto element =
        type == at::kHalf ? internal::ElementType::kHalf : internal::ElementType::kBfloat16;
    const at::Tensor actual = at::empty(floats.sizes(), type);
    uint16_t* const to = static_cast<uint16_t*>(actual.mutable_data_ptr());
    for (const int divisor : {1, 2, 3, 6, 8, 1000}) {
      internal::DivideAs(element, from, divisor, floats.numel(), to);
      const at::Tensor expected = floats.to(type);
      internal::DivideByRanks(expected, divisor);
      SCOPED_TRACE(::testing::Message() << type << " / " << divisor);
      ExpectEqualBits(actual, expected);
    }
    const at::Tensor back = at::empty_like(floats);
    internal::WidenFrom(element, to, floats.numel(), back.mutable_data_ptr<float>());
    EXPECT_TRUE(at::equal(back.nan_to_num(0), actual.to(at::kFloat).nan_to_num(0)));
  }
}

TEST(CompressWrapperTest, ABufferOfAnyKindTakesTheSameValues) {
  const at::Tensor values = GradientOf(1);
  const at::Tensor wide = torch::zeros({kRows * 4, 2});
  const auto result_of = [](const at::Tensor& buffer) {
    GradBucket bucket = DenseBucket(buffer);
    const auto version = buffer._version();
    const at::Tensor result = ResultOf(fp16_compress_wrapper(noop_hook), bucket);
    EXPECT_GT(buffer._version(), version);
    return result.to(at::kFloat);
  };
  const at::Tensor expected = values.to(at::kHalf).to(at::kFloat);
  EXPECT_TRUE(at::equal(result_of(values.clone()), expected));
  EXPECT_TRUE(at::equal(result_of(values.to(at::kDouble)), expected));
  const at::Tensor strided = wide.select(1, 1);
  strided.copy_(values);
  EXPECT_TRUE(at::equal(result_of(strided), expected));
  EXPECT_EQ(wide.select(1, 0).count_nonzero().item<int64_t>(), 0);
}

TEST(CompressWrapperTest, PassesOnWhatTheHookDoesWrong) {
  GradBucket bucket = DenseBucket(torch::ones({kRows * 4}));
  const auto result_of = [&](CommHook hook) { ResultOf(fp16_compress_wrapper(hook), bucket); };
  EXPECT_THROW(result_of([](GradBucket&) -> TensorFuture { throw std::runtime_error("full"); }),
               std::runtime_error);
  EXPECT_THAT(ReductionErrorOf([&] { result_of([](GradBucket&) { return TensorFuture(); }); }),
              HasSubstr("returned no future"));
  // The continuation finds a result of another type.
  const auto float_hook = [](GradBucket& inner) {
    GradBucket other = inner;
    other.set_buffer(inner.buffer().to(at::kFloat));
    return noop_hook(other);
  };
  EXPECT_THAT(
      ReductionErrorOf([&] { result_of(float_hook); }),
      AllOf(StartsWith("the comm hook's result for gradient bucket 2"), EndsWith("Half, on cpu")));
  // bfloat16 has 8 bits: 1.01 becomes 1.0078125.
  GradBucket fine = DenseBucket(torch::full({kRows * 4}, 1.01));
  EXPECT_EQ(ResultOf(bf16_compress_wrapper(noop_hook), fine)[0].item<float>(), 1.0078125);
}

// ---- Hooks with a state

TEST(BindCommHookTest, AHookIsCalledWithItsState) {
  const auto calls = std::make_shared<int>(0);
  const CommHook hook =
      BindCommHook(calls, [](const std::shared_ptr<int>& state, GradBucket& bucket) {
        *state += bucket.index();
        return TensorFuture();
      });
  GradBucket bucket({.index = 3, .buffer = torch::ones({1})});
  hook(bucket);
  EXPECT_EQ(*calls, 3);
}

// update_process_group() finds, and replaces, a state that is the group, and no other.
TEST(BindCommHookTest, OnlyAStateThatIsTheGroupCanBeReplaced) {
  const auto with_group = [](const std::shared_ptr<ProcessGroup>&, GradBucket&) {
    return TensorFuture();
  };
  CommHook hook = BindCommHook(std::shared_ptr<ProcessGroup>(), with_group);
  EXPECT_NE(hook.target<internal::GroupCommHook>(), nullptr);
  hook = BindCommHook(3, [](int, GradBucket&) { return TensorFuture(); });
  EXPECT_EQ(hook.target<internal::GroupCommHook>(), nullptr);

  using Buffers = std::map<std::string, at::Tensor>;
  BufferCommHook buffers = internal::BindBufferCommHook(
      std::shared_ptr<ProcessGroup>(), [](const std::shared_ptr<ProcessGroup>&, const Buffers&) {
        return std::vector<TensorFuture>();
      });
  EXPECT_NE(buffers.target<internal::GroupBufferCommHook>(), nullptr);
  buffers = internal::BindBufferCommHook(
      3, [](int, const Buffers&) { return std::vector<TensorFuture>(); });
  EXPECT_EQ(buffers.target<internal::GroupBufferCommHook>(), nullptr);
}

}  // namespace
}  // namespace ddp
