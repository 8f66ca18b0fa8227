#include "ddp/common/grad_bucket.h"

#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>

#include "ddp/common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::testing::AllOf;
using ::testing::HasSubstr;

GradBucket Bucket(at::Tensor buffer, std::vector<at::Tensor> parameters) {
  return GradBucket({.index = 3,
                     .buffer = std::move(buffer),
                     .parameters = std::move(parameters),
                     .names = {"fc.bias", "fc.weight"}});
}

// ---- The bucket

TEST(GradBucketTest, GradientsArePartsOfTheBufferInTheShapesOfTheirParameters) {
  const at::Tensor row_major = at::zeros({2, 3});
  const at::Tensor column_major = at::zeros({3, 2}).t();
  const GradBucket bucket = Bucket(at::arange(12, at::kFloat), {row_major, column_major});
  const std::vector<at::Tensor>& gradients = bucket.gradients();
  ASSERT_EQ(gradients.size(), 2u);
  EXPECT_TRUE(at::equal(gradients[0], at::arange(6, at::kFloat).view({2, 3})));
  // In the parameter's own memory order.
  EXPECT_EQ(gradients[1].strides(), column_major.strides());
  EXPECT_TRUE(at::equal(gradients[1], at::arange(6, 12, at::kFloat).view({3, 2}).t()));
  gradients[1].zero_();
  EXPECT_EQ(bucket.buffer().sum().item<float>(), 15);
}

TEST(GradBucketTest, AComplexNumberIsTwoRealOnes) {
  const GradBucket bucket =
      Bucket(at::arange(5, at::kFloat), {at::zeros({2}, at::kComplexFloat), at::zeros({1})});
  const std::vector<at::Tensor>& gradients = bucket.gradients();
  EXPECT_EQ(at::imag(gradients[0])[1].item<float>(), 3);
  EXPECT_EQ(gradients[1].item<float>(), 4);
}

// A parameter that expand() made has no memory order of its own.
TEST(GradBucketTest, AnExpandedParameterHasAContiguousGradient) {
  const GradBucket bucket = Bucket(at::arange(4, at::kFloat), {at::zeros({1, 2}).expand({2, 2})});
  EXPECT_TRUE(at::equal(bucket.gradients()[0], at::arange(4, at::kFloat).view({2, 2})));
}

TEST(GradBucketTest, GradientsFollowANewBuffer) {
  GradBucket bucket = Bucket(at::ones({2}), {at::zeros({2})});
  EXPECT_EQ(&bucket.gradients(), &bucket.gradients());
  EXPECT_TRUE(bucket.gradients()[0].is_alias_of(bucket.buffer()));
  const at::Tensor half = at::full({2}, 3, at::kHalf);
  bucket.set_buffer(half);
  EXPECT_TRUE(bucket.gradients()[0].is_alias_of(half));
}

TEST(GradBucketTest, ASparseGradientIsTheBufferItself) {
  const at::Tensor sparse = at::ones({4}).to_sparse();
  const GradBucket bucket = Bucket(sparse, {at::zeros({4})});
  ASSERT_EQ(bucket.gradients().size(), 1u);
  EXPECT_TRUE(bucket.gradients()[0].is_same(sparse));
}

// ---- The result of a hook

TEST(HookResultTest, IsATensorOrAListOfOne) {
  const at::Tensor tensor = at::ones({2});
  EXPECT_TRUE(internal::TensorOf(tensor).is_same(tensor));
  EXPECT_TRUE(internal::TensorOf(std::vector<at::Tensor>{tensor}).is_same(tensor));
  EXPECT_EQ(ErrorOf<ReductionError>([&] {
              internal::TensorOf(std::vector<at::Tensor>{tensor, tensor});
            }),
            "a future gave a list of 2 tensors where a tensor, or a list of one, was expected");
  EXPECT_EQ(ErrorOf<ReductionError>([] { internal::TensorOf(c10::IValue(3)); }),
            "a future gave Int where a tensor, or a list of one, was expected");
}

TEST(HookResultTest, MustBeLikeTheBuffer) {
  const GradBucket bucket = Bucket(at::ones({4}), {});
  const at::Tensor other = at::zeros({4});
  EXPECT_TRUE(internal::CheckedHookResult(bucket, other).is_same(other));
  const auto refused = [&](const c10::IValue& value) {
    return ErrorOf<ReductionError>([&] { internal::CheckedHookResult(bucket, value); });
  };
  EXPECT_EQ(refused(at::ones({4}, at::kDouble)),
            "the comm hook's result for gradient bucket 3 (fc.bias, fc.weight) is a tensor of "
            "shape [4], Double, on cpu; it must be like the bucket's buffer, a tensor of shape "
            "[4], Float, on cpu");
  EXPECT_THAT(refused(at::ones({2, 2})), HasSubstr("shape [2, 2], Float"));
  EXPECT_THAT(refused(at::ones({4}).to_sparse()), HasSubstr("is a sparse tensor of shape [4]"));
  EXPECT_THAT(refused(at::empty({4}, at::kMeta)), HasSubstr("Float, on meta; it must be"));
  EXPECT_THAT(refused(at::Tensor()), HasSubstr("is an undefined tensor; it must be"));
  EXPECT_THAT(refused(c10::IValue(3)),
              AllOf(HasSubstr("gradient bucket 3 (fc.bias, fc.weight)"), HasSubstr("gave Int")));
}

}  // namespace
}  // namespace ddp
