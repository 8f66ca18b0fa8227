// Compares SyncBatchNorm on several ranks with LibTorch's BatchNorm on the joint batch. The ranks
// are threads on a fake backend; in one case they are processes, on Gloo.
//
// Length: each kind of layer and input stands beside its computation in one process.
#include "ddp/nn/sync_batch_norm.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "ddp/activation_checkpoint.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/nn/convert_sync_batchnorm.h"
#include "ddp/process_group.h"
#include "ddp/statistics/statistics_context.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/random_numbers.h"
#include "testing/backend/thread_ranks.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::RandomNumbers;
using ::ddp::testing::SameOnAllRanks;
using ::testing::HasSubstr;
using torch::nn::BatchNormOptions;

constexpr int kChannels = 3;

struct Case {
  std::vector<int64_t> batches = {2, 4};  // of each rank
  std::vector<int64_t> image = {5, 2};    // the sizes after the channels
  bool affine = true;
  bool track = true;
  std::optional<double> momentum = 0.1;
  bool channels_last = false;
  torch::ScalarType type = torch::kFloat;
  double offset = 0;
  double tolerance = 1e-6;
  bool convert = false;  // a BatchNorm in place
};

BatchNormOptions OptionsOf(const Case& test) {
  return BatchNormOptions(kChannels)
      .affine(test.affine)
      .track_running_stats(test.track)
      .momentum(test.momentum);
}

torch::Tensor RandomOf(int seed, const Case& test, int rank) {
  std::vector<int64_t> sizes = {test.batches[rank], kChannels};
  sizes.insert(sizes.end(), test.image.begin(), test.image.end());
  return RandomNumbers(seed + rank, sizes).to(torch::kDouble);
}

torch::Tensor InputOf(const Case& test, int rank, int step) {
  torch::Tensor input = (RandomOf(100 + 10 * step, test, rank) + test.offset).to(test.type);
  if (test.channels_last) input = input.contiguous(torch::MemoryFormat::ChannelsLast);
  return input;
}

// The gradient of the layer's output.
torch::Tensor SlopeOf(const Case& test, int rank, int step) {
  return RandomOf(500 + 10 * step, test, rank).to(test.type);
}

template <typename Function>
torch::Tensor OfAllRanks(const Case& test, const Function& function) {
  std::vector<torch::Tensor> parts;
  for (int rank = 0; rank < static_cast<int>(test.batches.size()); ++rank) {
    parts.push_back(function(rank));
  }
  return torch::cat(parts);
}

int64_t FirstRowOf(const Case& test, int rank) {
  int64_t row = 0;
  for (int other = 0; other < rank; ++other) row += test.batches[other];
  return row;
}

template <typename Layer>
void SetAffine(Layer& layer) {
  if (!layer->weight.defined()) return;
  const torch::NoGradGuard no_grad;
  layer->weight.copy_(torch::tensor({0.5, -2.0, 1.5}));
  layer->bias.copy_(torch::tensor({0.1, 3.0, -1.0}));
}

// LibTorch has no half batch norm with this accuracy: the joint batch is computed in float.
torch::Tensor Widened(const torch::Tensor& tensor) {
  return tensor.to(tensor.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat);
}

void ExpectClose(const torch::Tensor& mine, const torch::Tensor& expected, double tolerance,
                 const std::string& what) {
  ASSERT_EQ(mine.sizes(), expected.sizes()) << what;
  if (mine.numel() == 0) return;
  const torch::Tensor wide = expected.to(torch::kDouble);
  const double scale = std::max(1.0, wide.abs().max().item<double>());
  EXPECT_LE((mine.to(torch::kDouble) - wide).abs().max().item<double>(), tolerance * scale) << what;
}

// Two steps of training and one in eval(), on this rank and as one BatchNorm.
template <typename Layer, typename Reference>
void Compare(ProcessGroup& group, const Case& test, Layer layer, Reference reference) {
  SetAffine(layer);
  SetAffine(reference);
  if (test.type == torch::kDouble) {
    layer->to(torch::kDouble);
    reference->to(torch::kDouble);
  }
  const int rank = group.rank();
  const int64_t first = FirstRowOf(test, rank);
  const auto mine = [&](const torch::Tensor& all) {
    return all.narrow(0, first, test.batches[rank]);
  };
  for (int step = 0; step < 2; ++step) {
    torch::Tensor x = InputOf(test, rank, step).requires_grad_();
    torch::Tensor all =
        Widened(OfAllRanks(test, [&](int r) { return InputOf(test, r, step); })).requires_grad_();
    const torch::Tensor y = layer->forward(x);
    const torch::Tensor expected = reference->forward(all);
    EXPECT_EQ(y.scalar_type(), test.type);
    EXPECT_EQ(y.strides(), x.strides());
    ExpectClose(y, mine(expected), test.tolerance, "output");
    y.backward(SlopeOf(test, rank, step));
    expected.backward(Widened(OfAllRanks(test, [&](int r) { return SlopeOf(test, r, step); })));
    EXPECT_EQ(x.grad().strides(), x.strides());
    ExpectClose(x.grad(), mine(all.grad()), test.tolerance * 10, "gradient of the input");
  }
  for (size_t i = 0; i < layer->parameters().size(); ++i) {
    if (!layer->parameters()[i].defined()) continue;
    torch::Tensor gradient = layer->parameters()[i].grad().clone();
    group.all_reduce(gradient);
    ExpectClose(gradient, reference->parameters()[i].grad(), test.tolerance * 10, "parameter");
  }
  for (const auto& buffer : layer->named_buffers()) {
    if (!buffer.value().defined()) continue;
    ExpectClose(buffer.value(), reference->named_buffers()[buffer.key()], test.tolerance,
                buffer.key());
    EXPECT_TRUE(SameOnAllRanks(group, buffer.value().to(torch::kDouble))) << buffer.key();
  }
  layer->eval();
  reference->eval();
  const torch::Tensor x = InputOf(test, rank, 3);
  ExpectClose(layer->forward(x), reference->forward(Widened(x)), test.tolerance, "eval");
}

template <typename Sync, typename Plain>
void CompareAs(const std::shared_ptr<ProcessGroup>& group, const Case& test) {
  const Plain reference(OptionsOf(test));
  if (!test.convert) return Compare(*group, test, Sync(OptionsOf(test), group), reference);
  Plain converted(OptionsOf(test));
  EXPECT_EQ(convert_sync_batchnorm(*converted, group), 1);
  Compare(*group, test, converted, reference);
}

void CompareCase(const std::shared_ptr<ProcessGroup>& group, Case test) {
  SCOPED_TRACE(::testing::Message() << "affine " << test.affine << ", converted " << test.convert);
  if (test.image.size() < 2) {
    CompareAs<SyncBatchNorm1d, torch::nn::BatchNorm1d>(group, test);
  } else if (test.image.size() == 2) {
    CompareAs<SyncBatchNorm2d, torch::nn::BatchNorm2d>(group, test);
  } else {
    CompareAs<SyncBatchNorm3d, torch::nn::BatchNorm3d>(group, test);
  }
}

void CompareBoth(const std::shared_ptr<ProcessGroup>& group, Case test) {
  CompareCase(group, test);
  test.convert = true;
  CompareCase(group, test);
}

THREAD_RANK_TEST(SyncBatchNormTest, EqualsOneBatchNormOverTheJointBatch, 2) {
  CompareBoth(group, {});
  CompareBoth(group, {.image = {}});
  CompareBoth(group, {.image = {7}});
  CompareBoth(group, {.image = {2, 3, 2}});
  CompareBoth(group, {.affine = false});
  CompareBoth(group, {.track = false});
  CompareBoth(group, {.momentum = std::nullopt});
  CompareBoth(group, {.channels_last = true});
  CompareBoth(group, {.type = torch::kDouble, .tolerance = 1e-12});
  CompareCase(group, {.affine = false, .track = false});
}

THREAD_RANK_TEST(SyncBatchNormTest, TakesBatchesOfDifferentSizes, 3) {
  CompareBoth(group, {.batches = {1, 7, 2}});
  CompareBoth(group, {.batches = {3, 0, 2}});
  CompareBoth(group, {.batches = {0, 0, 4}, .image = {3}});
  CompareBoth(group, {.batches = {0, 5, 0}, .image = {}});
  CompareCase(group, {.batches = {1, 1, 1}, .image = {}, .tolerance = 1e-5});
  CompareCase(group, {.batches = {1, 0, 1}, .image = {}, .tolerance = 1e-5});
}

THREAD_RANK_TEST(SyncBatchNormTest, ComputesHalfInFloat, 2) {
  CompareBoth(group, {.type = torch::kHalf, .tolerance = 2e-3});
  CompareBoth(group, {.type = torch::kBFloat16, .tolerance = 1e-2});
  // Sums of squares of 300 are too large for half.
  SyncBatchNorm1d layer(BatchNormOptions(1), group);
  const torch::Tensor signs = torch::arange(-1, 2, 2).view({2, 1}).to(torch::kFloat);
  EXPECT_TRUE(layer->forward((300 * signs).to(torch::kHalf)).to(torch::kFloat).allclose(signs));
  EXPECT_GT(layer->running_var.item<double>(), 9000);
}

THREAD_RANK_TEST(SyncBatchNormTest, ALargeMeanCostsNoAccuracy, 3) {
  // LibTorch's own batch norm loses nine digits here, so the reference has no offset.
  const Case near{.batches = {2, 4, 3}, .type = torch::kDouble};
  Case far = near;
  far.offset = 1.7e9;
  SyncBatchNorm2d layer(OptionsOf(near), group);
  layer->to(torch::kDouble);
  const torch::Tensor expected = layer->forward(InputOf(near, group->rank(), 0));
  const torch::Tensor y = layer->forward(InputOf(far, group->rank(), 0));
  ExpectClose(y, expected, 1e-6, "output");
}

THREAD_RANK_TEST(SyncBatchNormTest, HasOneCollectiveInEachDirection, 2) {
  SyncBatchNorm1d layer(BatchNormOptions(2), group);
  const auto launched = [&] { return group->communicator().log()->launched(); };
  const torch::Tensor y = layer->forward(RandomNumbers(group->rank(), {3, 2}).requires_grad_());
  EXPECT_EQ(launched(), 1);
  y.pow(3).sum().backward();
  EXPECT_EQ(launched(), 2);
}

THREAD_RANK_TEST(SyncBatchNormTest, RefusesAnInputThatDoesNotFit, 1, 2) {
  const auto error = [&](const BatchNormOptions& options, const torch::Tensor& x) {
    torch::nn::BatchNorm2d converted(options);
    convert_sync_batchnorm(*converted, group);
    const std::string text = ErrorOf<ConfigurationError>([&] { converted->forward(x); });
    const torch::Tensor& mean = converted->running_mean;
    EXPECT_TRUE(!mean.defined() || mean.eq(0).all().item<bool>());  // unchanged
    return text;
  };
  const torch::Tensor x = torch::ones({2, 4, 3, 3});
  EXPECT_THAT(error(BatchNormOptions(1).track_running_stats(false), x),
              HasSubstr("the shape [2, 4, 3, 3] and has 1 channels"));
  EXPECT_THAT(error(BatchNormOptions(3), x), HasSubstr("and has 3 channels"));
  EXPECT_THAT(error(BatchNormOptions(4), x.to(torch::kDouble)),
              HasSubstr("an input of the type Double and has parameters or buffers of the type"));
  EXPECT_THAT(error(BatchNormOptions(4), x.to(torch::kLong)), HasSubstr("of the type Long"));
}

THREAD_RANK_TEST(SyncBatchNormTest, AConvertedLayerChecksAndCountsAsLibTorch, 2) {
  torch::nn::BatchNorm1d norm(2);
  convert_sync_batchnorm(*norm, group);
  EXPECT_EQ(norm->forward(torch::ones({0, 2, 3})).numel(), 0);
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 1);
  EXPECT_THAT(ErrorOf<c10::Error>([&] {
                norm->forward(torch::ones({1, 2}));
              }),
              HasSubstr("more than 1 value per channel"));
}

THREAD_RANK_TEST(SyncBatchNormTest, ARankMayNeedNoGradientOfItsInput, 2) {
  for (const bool affine : {true, false}) {
    SyncBatchNorm1d layer(BatchNormOptions(2).affine(affine), group);
    torch::Tensor x = RandomNumbers(group->rank(), {3, 2});
    if (group->rank() == 0) x.requires_grad_();
    layer->forward(x).pow(3).sum().backward();
    EXPECT_EQ(x.grad().defined(), group->rank() == 0);
  }
  SyncBatchNorm1d layer(BatchNormOptions(2), group);
  layer->forward(RandomNumbers(group->rank(), {3, 2})).pow(3).sum().backward();
  EXPECT_TRUE(layer->weight.grad().defined());
}

THREAD_RANK_TEST(SyncBatchNormTest, RunsWithoutGradients, 2) {
  SyncBatchNorm1d layer(BatchNormOptions(1), group);
  const torch::Tensor x = torch::full({1, 1}, group->rank() == 0 ? 2.0 : 4.0);
  torch::Tensor y;
  {
    const torch::NoGradGuard no_grad;
    y = layer->forward(x);
  }
  EXPECT_FALSE(y.requires_grad());
  EXPECT_NEAR(y.item<double>(), group->rank() == 0 ? -1 : 1, 1e-4);
  EXPECT_NEAR(layer->running_mean.item<double>(), 0.3, 1e-6);
  EXPECT_NEAR(layer->running_var.item<double>(), 0.9 + 0.2, 1e-6);
  EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 1);
  torch::nn::BatchNorm2d converted(BatchNormOptions(1));
  convert_sync_batchnorm(*converted, group);
  const c10::InferenceMode inference;
  const torch::Tensor pair = torch::cat({x, x}).view({2, 1, 1, 1});
  EXPECT_NEAR(converted->forward(pair)[0].item<double>(), group->rank() == 0 ? -1 : 1, 1e-4);
}

THREAD_RANK_TEST(SyncBatchNormTest, RefusesOneValueInTheJointBatch, 2,
                 /*not_on_device=*/"the host would wait for the number of values") {
  SyncBatchNorm1d layer(BatchNormOptions(1), group);
  const auto one = [&] { layer->forward(torch::ones({group->rank(), 1})); };
  EXPECT_THAT(ErrorOf<ConfigurationError>(one), HasSubstr("more than one value in each channel"));
  // No value at all is an empty output.
  EXPECT_EQ(layer->forward(torch::ones({0, 1})).numel(), 0);
  EXPECT_EQ(layer->running_var.item<double>(), 1);
}

THREAD_RANK_TEST(SyncBatchNormTest, AnEmptyJointBatchIsNoPartOfTheAverage, 2) {
  SyncBatchNorm1d layer(BatchNormOptions(1).momentum(std::nullopt), group);
  layer->forward(torch::ones({0, 1}));
  EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 0);
  layer->forward(torch::full({1, 1}, group->rank() == 0 ? 2.0 : 4.0));
  EXPECT_EQ(layer->num_batches_tracked.item<int64_t>(), 1);
  EXPECT_EQ(layer->running_mean.item<double>(), 3);
  EXPECT_EQ(layer->running_var.item<double>(), 2);
}

TEST(SyncBatchNormTest, IsABatchNormInAGroupOfOne) {
  testing::RunThreadRanks({.world_size = 1}, [](const std::shared_ptr<ProcessGroup>& group) {
    CompareBoth(group, {.batches = {4}});
    SyncBatchNorm1d layer(BatchNormOptions(1), group);
    EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                  layer->forward(torch::ones({1, 1}));
                }),
                HasSubstr("more than one value"));
  });
}

THREAD_RANK_TEST(SyncBatchNormTest, RefusesSecondDerivatives, 2) {
  SyncBatchNorm1d layer(BatchNormOptions(2), group);
  torch::Tensor x = RandomNumbers(group->rank(), {3, 2}).requires_grad_();
  const torch::Tensor loss = layer->forward(x).pow(3).sum();
  const torch::Tensor gradient = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { gradient.pow(2).sum().backward(); }),
              HasSubstr("SyncBatchNorm has no second derivatives"));
}

TEST(SyncBatchNormTest, NamesTheRemedyWithoutAGroup) {
  SyncBatchNorm2d layer(kChannels);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                layer->forward(torch::ones({2, 3, 1, 1}));
              }),
              HasSubstr("run it by the forward of a DistributedDataParallel, or give the group"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                layer->forward(torch::ones({2, 4, 1, 1}));
              }),
              HasSubstr("SyncBatchNorm2d with 3 channels got an input of the shape [2, 4, 1, 1]"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                layer->forward(torch::ones({2, 3}));
              }),
              HasSubstr("it takes 4 dimensions"));
  layer->eval();
  EXPECT_EQ(layer->forward(torch::ones({2, 3, 1, 1})).numel(), 6);
  std::ostringstream text;
  text << layer;
  EXPECT_EQ(text.str(),
            "ddp::SyncBatchNorm2d(3, eps=1e-05, momentum=0.1, affine=true, "
            "track_running_stats=true)");
}

// ---- Checkpointed segments.

torch::Tensor SquaresOf(const torch::Tensor& output) { return output.pow(2).sum(); }

// A batch of another size on each rank.
torch::Tensor BatchOf(int rank) { return RandomNumbers(rank, {2 + rank % 2, 3}); }

THREAD_RANK_TEST(SyncBatchNormTest, ABlockWithAWrapperCountsACheckpointedBatchOnce, 2) {
  SyncBatchNorm1d norm(BatchNormOptions(3).affine(false), group);
  const auto block = [&](const torch::Tensor& x) {
    const internal::StatisticsScope of_wrapper(nullptr);  // as the forward of a wrapper opens one
    return norm->forward(x);
  };
  SquaresOf(checkpoint(block, BatchOf(group->rank()).requires_grad_())).backward();
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 1);
  const auto nested = [&](const torch::Tensor& x) { return checkpoint(block, x).tanh(); };
  torch::Tensor x = BatchOf(group->rank()).requires_grad_();
  torch::Tensor plain = x.detach().clone().requires_grad_();
  SquaresOf(checkpoint(nested, x)).backward();
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 2);
  SquaresOf(block(plain).tanh()).backward();
  EXPECT_TRUE(x.grad().equal(plain.grad()));
}

THREAD_RANK_TEST(SyncBatchNormTest, ACheckpointedLayerMayNeedNoGradientOfItsInput, 2) {
  for (const bool reentrant : {false, true}) {
    SyncBatchNorm1d norm(BatchNormOptions(3).affine(false), group);
    torch::nn::Linear linear(3, 2);
    const auto block = [&](const std::vector<torch::Tensor>& x) {
      return linear->forward(norm->forward(x[0])) * x[1];
    };
    torch::Tensor x = BatchOf(group->rank());
    if (group->rank() == 0) x.requires_grad_();
    const torch::Tensor scale = torch::ones({1}).requires_grad_();
    const CheckpointOptions options{.use_reentrant = reentrant, .parameters = linear->parameters()};
    SquaresOf(checkpoint(options, block, std::vector<torch::Tensor>{x, scale})).backward();
    EXPECT_EQ(x.grad().defined(), group->rank() == 0);
    EXPECT_TRUE(linear->weight.grad().defined());
  }
}

THREAD_RANK_TEST(SyncBatchNormTest, ACheckpointRefusesABackwardOfAnotherIncarnation, 2) {
  SyncBatchNorm1d norm(BatchNormOptions(3).affine(false), group);
  const torch::Tensor loss = SquaresOf(checkpoint(norm, BatchOf(group->rank()).requires_grad_()));
  group->barrier();  // a rank may be ahead of its collectives
  group->renew();
  EXPECT_THAT(ErrorOf<ReductionError>([&] { loss.backward(); }), HasSubstr("was renewed between"));
}

// ---- Conversion.

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("norm", norm);
    register_module("rest", rest);
    register_module("other", other);
  }
  torch::nn::BatchNorm2d norm{kChannels};
  torch::nn::Sequential rest{torch::nn::BatchNorm2d(2), torch::nn::ReLU()};
  torch::nn::InstanceNorm2d other{
      torch::nn::InstanceNorm2dOptions(kChannels).affine(true).track_running_stats(true)};
};
TORCH_MODULE(Net);

TEST(ConvertSyncBatchNormTest, ConvertsInPlaceAndKeepsNames) {
  Net net;
  const auto names = net->named_parameters().keys();
  const auto buffers = net->named_buffers().keys();
  EXPECT_FALSE(has_sync_batch_norm(*net));
  EXPECT_EQ(convert_sync_batchnorm(*net), 2);
  EXPECT_EQ(convert_sync_batchnorm(*net), 2);
  EXPECT_TRUE(has_sync_batch_norm(*net));
  EXPECT_TRUE(has_sync_batch_norm(*net->rest));
  EXPECT_FALSE(has_sync_batch_norm(*net->other));
  EXPECT_EQ(net->named_parameters().keys(), names);
  EXPECT_EQ(net->named_buffers().keys(), buffers);
  const torch::Tensor x = torch::ones({2, kChannels, 2, 2});
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { net->norm->forward(x); }),
              HasSubstr("has no process group"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { net->rest->forward(x.narrow(1, 0, 2)); }),
              HasSubstr("has no process group"));
  net->other->forward(x);
  net->eval();
  net->norm->forward(x);
  // Other layers, and a clone, are LibTorch's.
  torch::nn::BatchNorm2d(kChannels)->forward(x);
  std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(net->norm->clone())->forward(x);
}

TEST(ConvertSyncBatchNormTest, AConvertedLayerStaysOneAfterTo) {
  torch::nn::BatchNorm2d norm(kChannels);
  convert_sync_batchnorm(*norm);
  norm->to(torch::kDouble);
  EXPECT_TRUE(has_sync_batch_norm(*norm));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                norm->forward(torch::ones({2, kChannels, 2, 2}, torch::kDouble));
              }),
              HasSubstr("has no process group"));
}

TEST(ConvertSyncBatchNormTest, RefusesALayerThatItCouldNotRecognize) {
  struct Plain : torch::nn::Module {
    torch::nn::BatchNorm1d first{2};
    torch::nn::BatchNorm1d bare{BatchNormOptions(2).affine(false).track_running_stats(false)};
  };
  const auto net = std::make_shared<Plain>();
  net->register_module("first", net->first);
  net->register_module("bare", net->bare);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { convert_sync_batchnorm(*net); }),
              HasSubstr("cannot convert bare"));
  EXPECT_FALSE(has_sync_batch_norm(*net));
  torch::nn::BatchNorm1dImpl unowned(2);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { convert_sync_batchnorm(unowned); }),
              HasSubstr("no shared pointer holds"));
}

TEST(ConvertSyncBatchNormTest, DoesNotKeepAGroupAlive) {
  testing::RunThreadRanks({.world_size = 1}, [](const std::shared_ptr<ProcessGroup>& group) {
    torch::nn::BatchNorm2d norm(kChannels);
    const torch::Tensor x = torch::ones({2, kChannels, 2, 2});
    std::shared_ptr<ProcessGroup> own = group->new_group({0});
    const std::weak_ptr<ProcessGroup> watched = own;
    convert_sync_batchnorm(*norm, own);
    norm->forward(x);
    own.reset();
    EXPECT_TRUE(watched.expired());
    EXPECT_THAT(ErrorOf<ConfigurationError>([&] { norm->forward(x); }),
                HasSubstr("has been destroyed"));
  });
}

RANK_TEST(SyncBatchNormTest, AddsUpOverGloo, 2) {
  const std::shared_ptr<ProcessGroup> group = init_process_group();
  CompareBoth(group, {});
  CompareBoth(group, {.batches = {0, 3}, .channels_last = true});
}

}  // namespace
}  // namespace ddp
