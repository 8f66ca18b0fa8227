#include "ddp/mixed_precision/mixed_precision_parameters.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ddp/activation_checkpoint.h"
#include "ddp/comm_hook.h"
#include "ddp/common/error.h"
#include "ddp/common/torch_versions.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/mixed_precision.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using internal::CastBuffers;
using internal::CastInput;
using internal::CheckedHookResult;
using internal::CheckMixedPrecision;
using internal::MixedPrecisionParameters;
using internal::reduce_dtype_hook;

using ::ddp::testing::RankStore;
using ::testing::AllOf;
using ::testing::HasSubstr;

// One layer of every kind with its own way of saving parameters for the backward.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool sparse = false) {
    words = register_module(
        "words", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 8).sparse(sparse)));
    linear = register_module("linear", torch::nn::Linear(8, 8));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    conv = register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(4, 4, 1)));
    batch_norm = register_module("batch_norm", torch::nn::BatchNorm1d(4));
    last = register_module("last", torch::nn::Linear(8, 2));
    scale = register_parameter("scale", torch::full({2}, 1.25));
    frozen = register_parameter("frozen", torch::full({2}, 0.75), /*requires_grad=*/false);
  }
  torch::Tensor forward(const torch::Tensor& words_in) {
    torch::Tensor x = torch::relu(linear->forward(words->forward(words_in)));
    x = batch_norm->forward(conv->forward(norm->forward(x)));
    return last->forward(x) * scale * frozen;
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear linear{nullptr}, last{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Conv1d conv{nullptr};
  torch::nn::BatchNorm1d batch_norm{nullptr};
  torch::Tensor scale, frozen;
};
TORCH_MODULE(Net);

Net MakeNet(bool sparse = false) {
  torch::manual_seed(1);
  Net net(sparse);
  CastBuffers(net->buffers(), torch::kBFloat16);
  return net;
}

torch::Tensor Words() {
  torch::manual_seed(2);
  return torch::randint(0, 10, {3, 4});
}

// Runs a forward as the wrapper does; a hook on the output begins the backward.
torch::Tensor Forward(MixedPrecisionParameters& precision,
                      const std::function<torch::Tensor()>& run) {
  precision.BeginForward();
  const torch::Tensor output = run();
  precision.EndForward(/*backward_may_follow=*/torch::GradMode::is_enabled());
  if (output.requires_grad()) {
    output.register_hook([&precision](const torch::Tensor&) { precision.BeginBackward(); });
  }
  return output;
}

void Backward(MixedPrecisionParameters& precision, const torch::Tensor& output) {
  output.to(torch::kFloat).pow(2).sum().backward({}, /*retain_graph=*/true);
  precision.EndBackward();
}

// Returns the gradients of the same net in bfloat16, as float.
std::vector<torch::Tensor> ExpectedGradients(bool sparse) {
  Net net = MakeNet(sparse);
  net->to(torch::kBFloat16);
  net->forward(Words()).to(torch::kFloat).pow(2).sum().backward();
  std::vector<torch::Tensor> gradients;
  for (const torch::Tensor& parameter : net->parameters()) {
    const torch::Tensor gradient = parameter.grad();
    gradients.push_back(gradient.defined() ? gradient.to(torch::kFloat).to_dense() : gradient);
  }
  return gradients;
}

class Whole {  // checks that everything is as before
 public:
  explicit Whole(Net net) : net_(std::move(net)) {
    for (const torch::Tensor& parameter : net_->parameters()) {
      data_.push_back(parameter.data_ptr());
      values_.push_back(parameter.detach().clone());
      if (parameter.requires_grad()) {
        accumulators_.push_back(torch::autograd::impl::grad_accumulator(parameter));
      }
    }
  }
  void Expect() const {
    size_t accumulator = 0;
    for (size_t i = 0; i < data_.size(); ++i) {
      const torch::Tensor parameter = net_->parameters()[i];
      EXPECT_EQ(parameter.scalar_type(), torch::kFloat) << i;
      EXPECT_EQ(parameter.data_ptr(), data_[i]) << i;
      EXPECT_TRUE(torch::equal(parameter, values_[i])) << i;
      if (!parameter.requires_grad()) continue;
      EXPECT_TRUE(parameter.is_leaf());
      EXPECT_EQ(torch::autograd::impl::grad_accumulator(parameter), accumulators_[accumulator++]);
    }
  }

 private:
  Net net_;
  std::vector<void*> data_;
  std::vector<torch::Tensor> values_;
  std::vector<torch_versions::NodePtr> accumulators_;
};

TEST(MixedPrecisionParametersTest, GradientsAreThoseOfTheLowerPrecisionAsFullPrecisionNumbers) {
  for (const bool sparse : {false, true}) {
    Net net = MakeNet(sparse);
    MixedPrecisionParameters precision(net->parameters(), torch::kBFloat16);
    const Whole whole(net);
    const torch::Tensor output = Forward(precision, [&] {
      EXPECT_EQ(net->linear->weight.scalar_type(), torch::kBFloat16);
      EXPECT_EQ(net->frozen.scalar_type(), torch::kBFloat16);
      return net->forward(Words());
    });
    EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
    whole.Expect();
    Backward(precision, output);
    whole.Expect();
    const std::vector<torch::Tensor> expected = ExpectedGradients(sparse);
    for (size_t i = 0; i < expected.size(); ++i) {
      const torch::Tensor gradient = net->parameters()[i].grad();
      ASSERT_EQ(gradient.defined(), expected[i].defined()) << i;
      if (!gradient.defined()) continue;
      EXPECT_EQ(gradient.scalar_type(), torch::kFloat) << i;
      EXPECT_TRUE(torch::equal(gradient.to_dense(), expected[i])) << i;
    }
    EXPECT_EQ(net->words->weight.grad().is_sparse(), sparse);
  }
}

TEST(MixedPrecisionParametersTest, WorksWithoutAnAccumulatorOfAnybodyElse) {
  Net net = MakeNet();
  MixedPrecisionParameters precision(net->parameters(), torch::kBFloat16);
  Backward(precision, Forward(precision, [&] { return net->forward(Words()); }));
  EXPECT_EQ(net->linear->weight.grad().scalar_type(), torch::kFloat);
}

TEST(MixedPrecisionParametersTest, AccumulatesInFullPrecision) {
  const torch::Tensor w = torch::ones({1}, torch::requires_grad());
  MixedPrecisionParameters precision({w}, torch::kBFloat16);
  for (const float x : {256.0F, 1.0F, 1.0F}) {
    const torch::Tensor y =
        Forward(precision, [&] { return w * torch::full({1}, x, torch::kBFloat16); });
    y.sum().backward();
    precision.EndBackward();
  }
  EXPECT_EQ(w.grad().item<float>(), 258);  // in bfloat16, 256 + 1 is 256
}

TEST(MixedPrecisionParametersTest, TheOptimizerStepsInFullPrecision) {
  torch::Tensor w = torch::ones({1}, torch::requires_grad());
  MixedPrecisionParameters precision({w}, torch::kBFloat16);
  torch::optim::SGD optimizer({w}, torch::optim::SGDOptions(1.0 / 4096).momentum(0.0));
  for (int step = 0; step < 32; ++step) {
    optimizer.zero_grad();
    const torch::Tensor y = Forward(precision, [&] { return w * 1; });
    y.sum().backward();
    precision.EndBackward();
    optimizer.step();
  }
  EXPECT_FLOAT_EQ(w.item<float>(), 1.0F - 32.0F / 4096);  // each step is lost in bfloat16
  precision.BeginForward();
  EXPECT_EQ(w.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(w.item<float>(), 0.9921875F);  // converted again
  precision.EndForward(false);
}

TEST(MixedPrecisionParametersTest, ForwardsAndBackwardsNeedNotComeInPairs) {
  Net net = MakeNet();
  MixedPrecisionParameters precision(net->parameters(), torch::kBFloat16);
  const Whole whole(net);
  const auto run = [&] { return net->forward(Words()); };
  Forward(precision, run);  // its backward never runs
  whole.Expect();
  {
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(Forward(precision, run).scalar_type(), torch::kBFloat16);
  }
  whole.Expect();
  const torch::Tensor first = Forward(precision, run);
  const torch::Tensor second = Forward(precision, run);
  Backward(precision, second);
  whole.Expect();
  const torch::Tensor once = net->linear->weight.grad().clone();
  Backward(precision, first);  // no forward between, so its copies are made again
  Backward(precision, first);  // the graph still exists
  whole.Expect();
  EXPECT_TRUE(torch::allclose(net->linear->weight.grad(), once * 3, 1e-5, 1e-6));
}

TEST(MixedPrecisionParametersTest, ComesBackFromExceptions) {
  Net net = MakeNet();
  const Whole whole(net);
  {
    MixedPrecisionParameters precision(net->parameters(), torch::kBFloat16);
    precision.BeginForward();
    EXPECT_ANY_THROW(net->forward(torch::ones({3})));
    precision.EndForward(false);
    whole.Expect();

    // A backward that throws without a call of EndBackward().
    torch::Tensor output = Forward(precision, [&] {
      const torch::Tensor x = net->forward(Words());
      return x * 1;
    });
    net->scale.register_hook([](const torch::Tensor&) { throw std::runtime_error("on purpose"); });
    EXPECT_ANY_THROW(output.sum().backward());
    EXPECT_TRUE(precision.low());
    net->scale = torch::Tensor();  // only the handle's; the module keeps it
    precision.BeginForward();
    precision.EndForward(false);
    whole.Expect();
    precision.BeginForward();
  }
  whole.Expect();  // as the destructor left it
}

TEST(MixedPrecisionParametersTest, SeesThatAParameterChangedBeforeItsBackward) {
  torch::Tensor w = torch::ones({1}, torch::requires_grad());
  MixedPrecisionParameters precision({w}, torch::kBFloat16);
  const torch::Tensor x = torch::ones({1}, torch::requires_grad().dtype(torch::kBFloat16));
  const torch::Tensor y = Forward(precision, [&] { return w * x; });
  {
    const torch::NoGradGuard no_grad;
    w.add_(1);
  }
  try {
    y.sum().backward();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("modified by an inplace operation"));
  }
}

TEST(MixedPrecisionParametersTest, RecomputesCheckpointedSegmentsInTheLowerPrecision) {
  for (const bool reentrant : {false, true}) {
    torch::manual_seed(3);
    torch::nn::Linear block(4, 4);
    const torch::Tensor x = torch::randn({2, 4}, torch::requires_grad().dtype(torch::kBFloat16));
    MixedPrecisionParameters precision(block->parameters(), torch::kBFloat16);
    Backward(precision, Forward(precision, [&] { return block->forward(x); }));
    const torch::Tensor expected = block->weight.grad().clone();
    block->zero_grad();
    Backward(precision, Forward(precision, [&] {
               return checkpoint({.use_reentrant = reentrant}, block, x);
             }));
    EXPECT_EQ(block->weight.grad().scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(block->weight.grad(), expected));
  }
}

TEST(MixedPrecisionParametersTest, ConvertsFloatingPointTensorsOnly) {
  const torch::Tensor x = torch::ones({2}, torch::requires_grad());
  const torch::Tensor input = CastInput(x, torch::kBFloat16);
  EXPECT_EQ(input.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(CastInput(torch::ones({2}, torch::kLong), torch::kBFloat16).scalar_type(),
            torch::kLong);
  EXPECT_EQ(CastInput(torch::ones({1}, torch::kDouble), torch::kBFloat16).scalar_type(),
            torch::kBFloat16);
  EXPECT_FALSE(CastInput(torch::Tensor(), torch::kBFloat16).defined());
  input.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), torch::kFloat);

  Net net = MakeNet();
  for (const auto& buffer : net->named_buffers()) {
    EXPECT_EQ(buffer.value().scalar_type(),
              buffer.value().is_floating_point() ? torch::kBFloat16 : torch::kLong)
        << buffer.key();
  }
  EXPECT_EQ(net->batch_norm->running_mean.scalar_type(), torch::kBFloat16);  // the handle too

  // Tensors that are in low precision already, or not floating-point, stay unchanged.
  const torch::Tensor low = torch::ones({2}, torch::kBFloat16);
  const torch::Tensor whole_number = torch::ones({2}, torch::kLong);
  void* const data = low.data_ptr();
  MixedPrecisionParameters precision({low, whole_number}, torch::kBFloat16);
  precision.BeginForward();
  EXPECT_EQ(low.data_ptr(), data);
  EXPECT_EQ(whole_number.scalar_type(), torch::kLong);
}

TEST(MixedPrecisionParametersTest, RefusesTypesThatAreNoFloatingPoint) {
  CheckMixedPrecision({.param_dtype = torch::kHalf, .reduce_dtype = torch::kDouble});
  try {
    CheckMixedPrecision({.param_dtype = torch::kHalf, .buffer_dtype = torch::kInt});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const ConfigurationError& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                AllOf(HasSubstr("buffer_dtype=Int"), HasSubstr("floating-point")));
  }
  EXPECT_EQ((MixedPrecision{.param_dtype = torch::kHalf}).reduction_dtype(), torch::kHalf);
  EXPECT_EQ((MixedPrecision{.param_dtype = torch::kHalf, .reduce_dtype = torch::kFloat})
                .reduction_dtype(),
            torch::kFloat);
  EXPECT_EQ(MixedPrecision().reduction_dtype(), std::nullopt);
}

// --- Tests on the ranks of a group.

RANK_TEST(MixedPrecisionParametersTest, TheReductionHasATypeOfItsOwn, .world_size = 2,
          .stores = {RankStore::kTcpStore}) {
  const auto group = init_process_group();
  const auto of_rank = [](int rank) { return torch::full({3}, 1.0 / 3 + rank); };
  for (const torch::ScalarType dtype : {torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    const torch::Tensor buffer = of_rank(group->rank());
    GradBucket bucket({.buffer = buffer, .parameters = {torch::zeros({3})}, .names = {"w"}});
    const TensorFuture future = reduce_dtype_hook(group, dtype)(bucket);
    future->waitAndThrow();
    const torch::Tensor result = CheckedHookResult(bucket, future->value());
    torch::Tensor expected = torch::zeros({3}, dtype);
    for (int rank = 0; rank < group->size(); ++rank) {
      expected += of_rank(rank).to(dtype) / group->size();
    }
    EXPECT_EQ(result.scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(result, expected.to(torch::kFloat))) << dtype;
    EXPECT_TRUE(result.is_same(buffer));
  }
}

torch::Tensor WordsOf(int rank, int step) {
  torch::manual_seed(100 * step + rank);
  return torch::randint(0, 10, {3, 4});
}

// Returns the gradients of all ranks' batches, computed in bfloat16, each divided and added in
// `dtype`.
std::vector<torch::Tensor> AverageGradients(Net& net, int ranks, int step,
                                            torch::ScalarType dtype) {
  std::vector<torch::Tensor> sums;
  for (int rank = 0; rank < ranks; ++rank) {
    Net low = MakeNet();
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        low->parameters()[i].copy_(net->parameters()[i]);
      }
    }
    low->to(torch::kBFloat16);
    low->forward(WordsOf(rank, step)).to(torch::kFloat).pow(2).sum().backward();
    size_t next = 0;
    for (const torch::Tensor& parameter : low->parameters()) {
      if (!parameter.requires_grad()) continue;
      const torch::Tensor part = parameter.grad().to(dtype) / ranks;
      if (rank == 0) sums.push_back(part);
      if (rank > 0) sums[next] += part;
      ++next;
    }
  }
  return sums;
}

// Trains with the whole wrapper, across a rebuild of the buckets, with every way of reducing.
RANK_TEST(MixedPrecisionParametersTest, TrainsInLowerPrecision, .world_size = 2,
          .stores = {RankStore::kTcpStore}) {
  const auto group = init_process_group();
  for (const bool view : {false, true}) {
    for (const auto reduce_dtype : {std::optional<torch::ScalarType>(), {torch::kFloat}}) {
      Net net = MakeNet();
      DistributedDataParallel model(
          net, group,
          {.first_bucket_cap_mb = 0.0001,
           .gradient_as_bucket_view = view,
           .find_unused_parameters = view,
           .mixed_precision = MixedPrecision{.param_dtype = torch::kBFloat16,
                                             .reduce_dtype = reduce_dtype,
                                             .buffer_dtype = torch::kBFloat16}});
      torch::optim::SGD optimizer(net->parameters(), 0.01);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const auto expected =
            AverageGradients(net, group->size(), step, reduce_dtype.value_or(torch::kBFloat16));
        const torch::Tensor output = model.forward(WordsOf(group->rank(), step));
        EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
        EXPECT_EQ(net->linear->weight.scalar_type(), torch::kFloat);
        output.to(torch::kFloat).pow(2).sum().backward();
        size_t next = 0;
        for (const auto& parameter : net->named_parameters()) {
          EXPECT_EQ(parameter.value().scalar_type(), torch::kFloat) << parameter.key();
          if (!parameter.value().requires_grad()) continue;
          const torch::Tensor gradient = parameter.value().grad();
          EXPECT_EQ(gradient.scalar_type(), torch::kFloat) << parameter.key();
          EXPECT_TRUE(torch::equal(gradient, expected[next++].to(torch::kFloat)))
              << parameter.key() << ", step " << step;
        }
        optimizer.step();
      }
      const torch::NoGradGuard no_grad;
      EXPECT_EQ(model.forward(WordsOf(0, 0)).scalar_type(), torch::kBFloat16);
      EXPECT_EQ(net->linear->weight.scalar_type(), torch::kFloat);
    }
  }
}

}  // namespace
}  // namespace ddp
