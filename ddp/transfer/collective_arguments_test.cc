// Tests the arguments of each collective without a group: which are refused, which are used in
// place, and which are copied. collectives_test.cc runs the collectives.
#include "ddp/transfer/collective_arguments.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include "absl/strings/str_cat.h"
#include "ddp/comm/backend/reduction_support.h"
#include "ddp/common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::ErrorOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Tensors = std::vector<at::Tensor>;

constexpr int kRank = 1;
constexpr int kSize = 3;

CollectiveCaller Caller(std::string (*refusal)(ReduceOp, at::ScalarType) = &GlooRefusal) {
  return {.rank = kRank, .size = kSize, .device = at::Device(at::kCPU), .refusal = refusal};
}

// Returns 0, 1, 2, ... in a tensor of strides that are not contiguous.
at::Tensor Strided(int64_t rows, int64_t columns) {
  return at::arange(rows * columns, at::kFloat).view({columns, rows}).t();
}

struct Refusal {
  std::function<void()> call;
  std::string text;
};

void ExpectRefusals(const std::vector<Refusal>& refusals) {
  for (const Refusal& refusal : refusals) {
    EXPECT_THAT(ErrorOf<ConfigurationError>(refusal.call),
                AllOf(StartsWith("rank 1: "), HasSubstr(refusal.text)));
  }
}

// ---- Refused

TEST(CollectiveArgumentsTest, RefusesTensorsThatNoCollectiveTakes) {
  const CollectiveCaller caller = Caller();
  const at::Tensor good = at::ones({4});
  ExpectRefusals({
      {[&] { PrepareAllReduce(caller, at::Tensor(), ReduceOp::kSum); },
       "all_reduce: a tensor is undefined"},
      {[&] { PrepareAllReduce(caller, at::ones({1}).expand({4}), ReduceOp::kSum); },
       "several elements at one address"},
      {[&] { PrepareAllReduce(caller, at::empty({4}, at::kMeta), ReduceOp::kSum); },
       "a tensor is on meta. This group's tensors are on cpu"},
      {[&] { PrepareBroadcast(caller, good.to_sparse(), 0); },
       "broadcast: a tensor is sparse. Only all_reduce takes those, of layout COO"},
      {[&] { PrepareAllGather(caller, {at::ones({4 * kSize})}, at::ones({4}, at::kInt)); },
       "the tensors differ: Int on cpu and Float on cpu"},
  });
}

TEST(CollectiveArgumentsTest, RefusesOperationsThatATypeOrABackendHasNot) {
  const CollectiveCaller gloo = Caller();
  const CollectiveCaller nccl = Caller(&NcclRefusal);
  const at::Tensor complex = at::ones({4}, at::kComplexFloat);
  const auto reduce = [](const CollectiveCaller& caller, const at::Tensor& tensor, ReduceOp op) {
    return [&caller, tensor, op] { PrepareAllReduce(caller, tensor, op); };
  };
  ExpectRefusals({
      {reduce(gloo, at::ones({4}, at::kShort), ReduceOp::kSum), "Gloo does not reduce Short"},
      {reduce(gloo, complex, ReduceOp::kMax), "complex numbers are summed or averaged only"},
      {reduce(gloo, at::ones({4}).to_sparse(), ReduceOp::kMax), "summed or averaged only"},
      {reduce(gloo, at::ones({4}), ReduceOp::kBitOr), "Float has no bitwise operations"},
      {reduce(nccl, at::ones({4}, at::kInt), ReduceOp::kBitOr), "NCCL has no bitwise operations"},
      {reduce(nccl, at::ones({4}, at::kShort), ReduceOp::kSum), "NCCL does not reduce Short"},
      {reduce(gloo, at::ones({4}, at::kBool), ReduceOp::kAverage),
       "an average of Bool would be cut off"},
      {[&] {
         PrepareReduceScatter(gloo, at::ones({1}, at::kInt), {at::ones({kSize}, at::kInt)},
                              ReduceOp::kAverage);
       },
       "an average of Int would be cut off"},
  });
  PrepareAllReduce(Caller(nullptr), at::ones({4}, at::kShort), ReduceOp::kBitOr);
  PrepareAllReduce(gloo, complex, ReduceOp::kAverage);
  PrepareAllReduce(gloo, at::ones({4}, at::kBool), ReduceOp::kBitXor);
}

TEST(CollectiveArgumentsTest, RefusesRanksThatDoNotExist) {
  const CollectiveCaller caller = Caller();
  const at::Tensor good = at::ones({4});
  ExpectRefusals({
      {[&] { PrepareBroadcast(caller, good, kSize); }, "there is no rank 3 in a group of 3"},
      {[&] { PrepareBroadcast(caller, good, -1); }, "there is no rank -1 in a group of 3"},
      {[&] { PrepareSend(caller, good, kRank, 0); },
       "send to rank 1: a rank has no messages for itself"},
      {[&] { PrepareReceive(caller, good, kSize, 0); }, "recv from rank 3: there is no rank 3"},
      {[&] { PrepareSend(caller, good, 2, -2); }, "tag -2 is negative"},
  });
}

TEST(CollectiveArgumentsTest, RefusesSizesThatDoNotFit) {
  const CollectiveCaller caller = Caller();
  const at::Tensor good = at::ones({4});
  ExpectRefusals({
      {[&] { PrepareAllGather(caller, {at::ones({4})}, at::ones({5})); },
       "the output has 4 elements, and needs 15: 5 for each rank"},
      {[&] { PrepareAllGather(caller, Tensors(kSize + 1, good), good); },
       "4 output tensors for 3 ranks"},
      {[&] {
         PrepareAllGather(caller, {good, good.clone(), at::ones({5})}, good);
       },
       "the output has 5 elements, and needs 4"},
      {[&] { PrepareReduceScatter(caller, good, {good}, ReduceOp::kSum); },
       "the input has 4 elements, and needs 12"},
      {[&] { PrepareAllToAll(caller, at::ones({4}), at::ones({4})); }, "must be a multiple of 3"},
      {[&] { PrepareAllToAll(caller, at::ones({}), at::ones({})); }, "must be a multiple of 3"},
      {[&] { PrepareAllToAll(caller, at::ones({3}), at::ones({6})); },
       "the input has 6 elements, and the output 3"},
      {[&] { PrepareAllToAllSized(caller, {good}, {good}); }, "1 outputs and 1 inputs for 3 ranks"},
      {[&] { SplitForRanks(caller, good, {4}); }, "the sizes [4] do not split"},
      {[&] {
         SplitForRanks(caller, good, {1, 1, 1});
       },
       "a first dimension of 4 between 3 ranks"},
      {[&] {
         SplitForRanks(caller, good, {5, -1, 0});
       },
       "the sizes [5, -1, 0] do not split"},
      {[&] {
         SplitForRanks(caller, at::ones({}), {0, 0, 0});
       },
       "a first dimension of -1"},
  });
}

// ---- In place, or copied

TEST(CollectiveArgumentsTest, ContiguousTensorsAreUsedInPlace) {
  const at::Tensor tensor = at::ones({2, 3});
  const PreparedCollective reduced = PrepareAllReduce(Caller(), tensor, ReduceOp::kMax);
  EXPECT_TRUE(reduced.collective.output.is_same(tensor));
  EXPECT_EQ(reduced.finish, nullptr);
  EXPECT_EQ(reduced.collective.op, ReduceOp::kMax);

  const at::Tensor gathered = at::zeros({kSize, 6});
  const PreparedCollective prepared = PrepareAllGather(Caller(), {gathered}, tensor);
  EXPECT_EQ(prepared.collective.output.data_ptr(), gathered.data_ptr());
  EXPECT_EQ(prepared.collective.input.data_ptr(), tensor.data_ptr());
  EXPECT_EQ(prepared.finish, nullptr);
}

TEST(CollectiveArgumentsTest, PartsThatAreAdjacentAreOneBlock) {
  const at::Tensor whole = at::zeros({kSize, 4});
  const PreparedCollective adjacent = PrepareAllGather(Caller(), whole.unbind(), at::ones({4}));
  EXPECT_EQ(adjacent.collective.output.data_ptr(), whole.data_ptr());
  EXPECT_EQ(adjacent.finish, nullptr);

  // The same parts in another order are copied into place at the end.
  const PreparedCollective swapped =
      PrepareAllGather(Caller(), {whole[1], whole[0], whole[2]}, at::ones({4}));
  EXPECT_FALSE(swapped.collective.output.is_alias_of(whole));
  swapped.collective.output.copy_(at::arange(12, at::kFloat));
  swapped.finish();
  EXPECT_EQ(whole[1][0].item<float>(), 0);
  EXPECT_EQ(whole[0][0].item<float>(), 4);
  EXPECT_EQ(whole[2][3].item<float>(), 11);
}

TEST(CollectiveArgumentsTest, StridedTensorsAreCopiedAndWrittenBack) {
  const at::Tensor tensor = Strided(2, 3);
  const at::Tensor before = tensor.clone();
  const PreparedCollective prepared = PrepareAllReduce(Caller(), tensor, ReduceOp::kSum);
  EXPECT_TRUE(prepared.collective.output.is_contiguous());
  EXPECT_EQ(prepared.collective.output.sizes(), tensor.sizes());
  EXPECT_TRUE(at::equal(prepared.collective.output, before));
  prepared.collective.output.mul_(10);
  EXPECT_TRUE(at::equal(tensor, before));
  prepared.finish();
  EXPECT_TRUE(at::equal(tensor, before * 10));
}

TEST(CollectiveArgumentsTest, AnAverageIsDividedLastAndOnlyAmongSeveral) {
  const at::Tensor tensor = at::full({2}, 6.0F);
  PrepareAllReduce(Caller(), tensor, ReduceOp::kAverage).finish();
  EXPECT_EQ(tensor[1].item<float>(), 2);

  const at::Tensor strided = Strided(2, 2);
  const PreparedCollective copied = PrepareAllReduce(Caller(), strided, ReduceOp::kAverage);
  copied.collective.output.fill_(9);
  copied.finish();  // first writes back
  EXPECT_TRUE(at::equal(strided, at::full({2, 2}, 3.0F)));

  const at::Tensor part = at::full({1}, 3.0F);
  PrepareReduceScatter(Caller(), part, {at::ones({kSize})}, ReduceOp::kAverage).finish();
  EXPECT_EQ(part.item<float>(), 1);
  EXPECT_EQ(PrepareAllReduce({}, tensor, ReduceOp::kAverage).finish, nullptr);
}

TEST(CollectiveArgumentsTest, TheRootOfABroadcastIsOnlyRead) {
  const at::Tensor expanded = at::ones({1}).expand({4});
  const PreparedCollective root = PrepareBroadcast(Caller(), expanded, kRank);
  EXPECT_EQ(root.finish, nullptr);
  EXPECT_TRUE(at::equal(root.collective.output, at::ones({4})));
  EXPECT_EQ(root.collective.root, kRank);

  const at::Tensor strided = Strided(2, 2);
  const PreparedCollective other = PrepareBroadcast(Caller(), strided, 0);
  other.collective.output.fill_(7);
  other.finish();
  EXPECT_TRUE(at::equal(strided, at::full({2, 2}, 7.0F)));
}

TEST(CollectiveArgumentsTest, AnInputThatOverlapsTheOutputIsCopied) {
  const at::Tensor whole = at::arange(12, at::kFloat);
  const PreparedCollective own = PrepareAllGather(Caller(), {whole}, whole.narrow(0, 4, 4));
  EXPECT_FALSE(own.collective.input.is_alias_of(whole));
  EXPECT_TRUE(at::equal(own.collective.input, at::arange(4, 8, at::kFloat)));

  const at::Tensor both = at::zeros({16});
  const PreparedCollective apart =
      PrepareAllGather(Caller(), {both.narrow(0, 0, 12)}, both.narrow(0, 12, 4));
  EXPECT_TRUE(apart.collective.input.is_alias_of(both));
}

TEST(CollectiveArgumentsTest, InputsOfEveryKindAreReadAsTheirValues) {
  const at::Tensor conjugate = at::complex(at::ones({2}), at::ones({2})).conj();
  const PreparedCollective sent = PrepareSend(Caller(), conjugate, 0, 5);
  EXPECT_FALSE(sent.collective.output.is_conj());
  EXPECT_EQ(at::imag(sent.collective.output)[0].item<float>(), -1);
  const PreparedCollective strided = PrepareSend(Caller(), Strided(2, 2), 0, 5);
  EXPECT_TRUE(at::equal(strided.collective.output, at::tensor({0.0F, 2.0F, 1.0F, 3.0F})));

  const at::Tensor target = Strided(2, 2);
  const PreparedCollective received = PrepareReceive(Caller(), target, 0, 5);
  received.collective.output.copy_(at::arange(4, at::kFloat));
  received.finish();
  EXPECT_TRUE(at::equal(target, at::arange(4, at::kFloat).view({2, 2})));
}

TEST(CollectiveArgumentsTest, PartsOfAnySizeKeepTheirSizes) {
  const Tensors inputs = {at::ones({2}), at::ones({0}), at::ones({1, 3})};
  const Tensors outputs = {at::zeros({1}), at::zeros({4}), at::zeros({0})};
  const PreparedCollective prepared = PrepareAllToAllSized(Caller(), outputs, inputs);
  EXPECT_THAT(prepared.collective.input_sizes, ElementsAre(2, 0, 3));
  EXPECT_THAT(prepared.collective.output_sizes, ElementsAre(1, 4, 0));
  EXPECT_EQ(prepared.collective.input.numel(), 5);
  prepared.collective.output.copy_(at::arange(5, at::kFloat));
  prepared.finish();
  EXPECT_EQ(outputs[0].item<float>(), 0);
  EXPECT_EQ(outputs[1][3].item<float>(), 4);

  const Tensors parts = SplitForRanks(Caller(), at::arange(8, at::kFloat).view({4, 2}), {1, 0, 3});
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_EQ(parts[1].numel(), 0);
  EXPECT_EQ(parts[2][0][0].item<float>(), 2);
}

TEST(CollectiveArgumentsTest, WhatIsWrittenHasANewVersion) {
  const at::Tensor tensor = at::ones({3});
  const auto version = [&] {
    return tensor.unsafeGetTensorImpl()->version_counter().current_version();
  };
  const auto before = version();
  MarkWritten(PrepareBroadcast(Caller(), tensor, Caller().rank), Caller().rank);
  EXPECT_EQ(version(), before) << "the root's tensor is read";
  MarkWritten(PrepareAllReduce(Caller(), tensor, ReduceOp::kSum), Caller().rank);
  EXPECT_EQ(version(), before + 1);
  MarkWritten(PrepareReceive(Caller(), tensor, 0, 5), Caller().rank);
  EXPECT_EQ(version(), before + 2);
  const c10::InferenceMode guard;
  MarkWritten(PrepareAllReduce(Caller(), at::ones({3}), ReduceOp::kSum), Caller().rank);
}

// The square root's gradient needs the result, which the sum has overwritten.
TEST(CollectiveArgumentsTest, AutogradFindsThatASavedTensorWasWritten) {
  const at::Tensor input = at::ones({3}).requires_grad_();
  const at::Tensor root = input.sqrt();
  MarkWritten(PrepareAllReduce(Caller(), root, ReduceOp::kSum), Caller().rank);
  EXPECT_THROW(root.sum().backward(), c10::Error);
}

TEST(CollectiveArgumentsTest, GradientsAreNotTracked) {
  const at::Tensor leaf = at::full({2}, 6.0F).requires_grad_();
  PreparedCollective prepared = PrepareAllReduce(Caller(), leaf, ReduceOp::kAverage);
  const at::NoGradGuard no_grad;  // as the group calls it
  prepared.finish();
  EXPECT_TRUE(leaf.is_leaf() && leaf.requires_grad());
  const at::Tensor sparse = at::ones({2}).to_sparse();
  EXPECT_TRUE(PrepareAllReduce(Caller(), sparse, ReduceOp::kSum).collective.output.is_same(sparse));
}

}  // namespace
}  // namespace ddp::internal
