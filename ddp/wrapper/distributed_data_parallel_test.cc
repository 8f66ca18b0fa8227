// Tests DistributedDataParallel on real processes. The ranks meet in Redis, as under ddprun; two
// cases meet in a TCPStore, as under torchrun.
//
// Length: one case for each promise of the public header, on the same models and helpers.
#include "ddp/distributed_data_parallel.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>

#include "ddp/common/error.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_harness.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::ErrorOfPeer;
using ::ddp::testing::Flatten;
using ::ddp::testing::Gradients;
using ::ddp::testing::SameOnAllRanks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Three layers of different sizes and a batch norm, so that there are buffers.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(4, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    last = register_module("last", torch::nn::Linear(8, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last->forward(torch::relu(norm->forward(first->forward(x))));
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

// No batch norm: its statistics depend on how a batch is split.
struct PlainNetImpl : torch::nn::Module {
  PlainNetImpl() {
    first = register_module("first", torch::nn::Linear(4, 16));
    last = register_module("last", torch::nn::Linear(16, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last->forward(torch::tanh(first->forward(x)));
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(PlainNet);

PlainNet Copy(const PlainNet& net) {
  torch::NoGradGuard no_grad;
  PlainNet copy;
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    copy->parameters()[i].copy_(net->parameters()[i]);
  }
  return copy;
}

// Returns the average of every rank's gradient, computed by one process.
torch::Tensor ExpectedGradients(const PlainNet& net, int ranks, int64_t step) {
  PlainNet copy = Copy(net);
  for (int rank = 0; rank < ranks; ++rank) {
    torch::manual_seed(1000 * step + rank);
    (copy->forward(torch::randn({5, 4})).pow(2).mean() / ranks).backward();
  }
  return Gradients(*copy);
}

torch::Tensor Batch(int rank, int64_t step) {
  torch::manual_seed(1000 * step + rank);
  return torch::randn({5, 4});
}

RANK_TEST(DistributedDataParallelTest, AveragesGradients, {1, 2, 3}) {
  const auto group = init_process_group();
  for (const bool view : {false, true}) {
    torch::manual_seed(group->rank());  // the constructor must make them equal
    PlainNet net;
    DistributedDataParallel model(net, group, {.gradient_as_bucket_view = view});
    EXPECT_TRUE(SameOnAllRanks(*group, Flatten(net->parameters())));
    for (int64_t step = 0; step < 4; ++step) {
      net->zero_grad(/*set_to_none=*/step % 2 == 0);
      const torch::Tensor expected = ExpectedGradients(net, group->size(), step);
      model.forward(Batch(group->rank(), step)).pow(2).mean().backward();
      const torch::Tensor gradients = Gradients(*net);
      EXPECT_TRUE(torch::allclose(gradients, expected, 1e-5, 1e-7)) << "step " << step;
      EXPECT_TRUE(SameOnAllRanks(*group, gradients)) << "step " << step;
    }
  }
}

RANK_TEST(DistributedDataParallelTest, ViewsAndCopiesGiveTheSameBits, 2) {
  const auto group = init_process_group();
  std::map<bool, torch::Tensor> result;
  for (const bool view : {false, true}) {
    torch::manual_seed(5);
    PlainNet net;
    DistributedDataParallel model(
        net, group,
        {.bucket_cap_mb = 1e-4, .first_bucket_cap_mb = 1e-5, .gradient_as_bucket_view = view});
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int64_t step = 0; step < 5; ++step) {
      optimizer.zero_grad(step % 2 == 0);
      model.forward(Batch(group->rank(), step)).pow(2).mean().backward();
      optimizer.step();
    }
    result[view] = Flatten(net->parameters());
    if (view) {
      // Gradients in one bucket share its storage.
      EXPECT_GT(model.bucket_layout().size(), 1u);
      EXPECT_FALSE(net->last->bias.grad().is_alias_of(net->last->bias));
    }
  }
  EXPECT_TRUE(torch::equal(result[false], result[true]));
}

// Compares k steps on N ranks with k steps of one process on the joint batch.
template <typename Optimizer, typename Options>
void TrainsAsOneProcess(ProcessGroup& group, const std::shared_ptr<ProcessGroup>& shared,
                        const Options& options) {
  torch::manual_seed(3);
  PlainNet joint;
  PlainNet net = Copy(joint);
  DistributedDataParallel model(net, shared);
  Optimizer optimizer(net->parameters(), options);
  Optimizer joint_optimizer(joint->parameters(), options);
  for (int64_t step = 0; step < 12; ++step) {
    optimizer.zero_grad();
    model.forward(Batch(group.rank(), step)).pow(2).mean().backward();
    optimizer.step();

    std::vector<torch::Tensor> batches;
    for (int rank = 0; rank < group.size(); ++rank) batches.push_back(Batch(rank, step));
    joint_optimizer.zero_grad();
    joint->forward(torch::cat(batches)).pow(2).mean().backward();
    joint_optimizer.step();
  }
  const torch::Tensor mine = Flatten(net->parameters());
  EXPECT_TRUE(torch::allclose(mine, Flatten(joint->parameters()), 1e-4, 1e-6))
      << (mine - Flatten(joint->parameters())).abs().max();
  EXPECT_TRUE(SameOnAllRanks(group, mine));
}

RANK_TEST(DistributedDataParallelTest, EqualsOneProcessWithTheJointBatch, {2, 3}) {
  const auto group = init_process_group();
  TrainsAsOneProcess<torch::optim::SGD>(*group, group, torch::optim::SGDOptions(0.1).momentum(0.9));
  TrainsAsOneProcess<torch::optim::AdamW>(*group, group, torch::optim::AdamWOptions(0.01));
}

RANK_TEST(DistributedDataParallelTest, BuffersFollowRankZero, 2) {
  const auto group = init_process_group();
  Net net;
  DistributedDataParallel model(net, group);
  for (int64_t step = 0; step < 3; ++step) {
    net->zero_grad();
    model.forward(Batch(group->rank(), step)).sum().backward();
    EXPECT_FALSE(group->size() > 1 && SameOnAllRanks(*group, net->norm->running_mean));
  }
  model.sync_buffers();
  EXPECT_TRUE(SameOnAllRanks(*group, Flatten(net->buffers())));

  // Two forwards before one backward: the copies must not change the values that the first one
  // saved.
  net->zero_grad();
  (model.forward(Batch(group->rank(), 7)) + model.forward(Batch(group->rank(), 8)))
      .sum()
      .backward();
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));

  Net own;
  DistributedDataParallel unsynced(own, group, {.broadcast_buffers = false});
  for (int64_t step = 0; step < 2; ++step) {
    own->zero_grad();
    unsynced.forward(Batch(group->rank(), step)).sum().backward();
  }
  EXPECT_FALSE(SameOnAllRanks(*group, own->norm->running_mean));
}

// Multiplies by a view of a buffer, like a module written for one process.
struct StatisticsImpl : torch::nn::Module {
  StatisticsImpl() {
    layer = register_module("layer", torch::nn::Linear(2, 2));
    stats = register_buffer("stats", torch::zeros({4}));
    first = stats.narrow(0, 0, 2);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    seen = first.clone();
    const torch::Tensor y = layer->forward(x) * (1 + first.clone());
    const torch::NoGradGuard no_grad;
    stats.add_(own);
    return y;
  }
  torch::nn::Linear layer{nullptr};
  torch::Tensor stats, first, seen;
  double own = 0;
};
TORCH_MODULE(Statistics);

RANK_TEST(DistributedDataParallelTest, ViewsOfBuffersFollow, 2) {
  const auto group = init_process_group();
  Statistics net;
  net->own = group->rank() + 1;
  DistributedDataParallel model(net, group);
  const torch::Tensor outside = net->named_buffers()["stats"].narrow(0, 2, 2);
  for (int step = 0; step < 4; ++step) {
    net->zero_grad();
    model.forward(torch::ones({1, 2})).sum().backward();
    EXPECT_EQ(net->seen[0].item<double>(), step);  // rank 0's value
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
    EXPECT_TRUE(net->first.is_alias_of(net->stats));
    EXPECT_TRUE(torch::equal(outside, net->first));
    EXPECT_EQ(outside[0].item<double>(), step + net->own);
  }
}

// A batch norm in training does not use the statistics that autograd saved.
RANK_TEST(DistributedDataParallelTest, SeveralForwardsOfABatchNormBeforeABackward, 2) {
  const auto group = init_process_group();
  torch::manual_seed(2);
  Net net, copy;
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      copy->parameters()[i].copy_(net->parameters()[i]);
    }
  }
  DistributedDataParallel model(net, group);
  const torch::Tensor mean = net->norm->running_mean.narrow(0, 0, 8);
  for (int64_t step = 0; step < 3; ++step) {
    copy->zero_grad();
    for (int rank = 0; rank < group->size(); ++rank) {
      for (const int64_t part : {0, 1, 2}) {
        (copy->forward(Batch(rank, 3 * step + part)).pow(3).sum() / group->size()).backward();
      }
    }
    net->zero_grad();
    torch::Tensor loss = torch::zeros({});
    for (const int64_t part : {0, 1, 2}) {
      // The middle forward is not synchronized.
      const auto guard = model.no_sync(part == 1);
      loss = loss + model.forward(Batch(group->rank(), 3 * step + part)).pow(3).sum();
    }
    loss.backward();
    EXPECT_TRUE(torch::allclose(Gradients(*net), Gradients(*copy), 1e-3, 1e-4)) << "step " << step;
    EXPECT_TRUE(torch::equal(mean, net->norm->running_mean));
  }
}

// A batch norm in evaluation needs the statistics that its forward has used. Rank 1 trains with
// them, and rank 0 changes them before rank 1's backward. That is an error, never a wrong gradient.
RANK_TEST(DistributedDataParallelTest, SavedBufferThatChangesIsRefused, 2) {
  const auto group = init_process_group();
  Net net;
  DistributedDataParallel model(net, group);
  if (group->rank() != 0) net->norm->eval();
  const torch::Tensor first = model.forward(Batch(group->rank(), 0)).pow(3).sum();
  const torch::Tensor second = model.forward(Batch(group->rank(), 1)).pow(3).sum();
  EXPECT_THAT(ErrorOf<c10::Error>([&] { (first + second).backward(); }),
              HasSubstr(group->rank() == 0 ? "rank 1 failed" : "modified by an inplace operation"));
  // One forward for each backward works, on every rank.
  for (int64_t step = 2; step < 4; ++step) {
    net->zero_grad();
    model.forward(Batch(group->rank(), step)).pow(3).sum().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  }
}

// Buffers of types that no backend sends, expanded, not contiguous, without elements.
RANK_TEST(DistributedDataParallelTest, BuffersOfAnyTypeAreCopied, 2) {
  const auto group = init_process_group();
  const int rank = group->rank();
  struct Holder : torch::nn::Module {
    Holder() { layer = register_module("layer", torch::nn::Linear(2, 2)); }
    torch::Tensor forward(const torch::Tensor& x) { return layer->forward(x); }
    torch::nn::Linear layer{nullptr};
  };
  const auto net = std::make_shared<Holder>();
  std::vector<std::pair<std::string, torch::Tensor>> buffers;
  for (const torch::ScalarType type :
       {torch::kShort, torch::kFloat8_e4m3fn, torch::kFloat8_e5m2, torch::kBool, torch::kHalf,
        torch::kComplexFloat, torch::kUInt16, torch::kLong}) {
    buffers.emplace_back(c10::toString(type), torch::zeros({3}).to(type));
  }
  buffers.emplace_back("expanded", torch::zeros({1}).expand({3}));
  buffers.emplace_back("transposed", torch::zeros({2, 3}).t());
  buffers.emplace_back("empty", torch::zeros({0}));
  for (auto& [name, tensor] : buffers) tensor = net->register_buffer(name, tensor);
  DistributedDataParallel<Holder> model(net, group);
  for (int step = 0; step < 2; ++step) {
    for (const auto& [name, tensor] : buffers) {
      tensor.set_data(name == "expanded" ? torch::full({1}, rank + 1.0).expand({3})
                                         : torch::full(tensor.sizes(), rank + 1.0)
                                               .to(tensor.scalar_type())
                                               .as_strided(tensor.sizes(), tensor.strides()));
    }
    net->zero_grad();
    model.forward(torch::ones({1, 2})).sum().backward();
    for (const auto& [name, tensor] : buffers) {
      EXPECT_TRUE(torch::all(tensor.to(torch::kComplexDouble) == 1).item<bool>()) << name;
    }
  }
  net->register_buffer("table", torch::eye(2, torch::kCPU).to_sparse());
  const std::string text =
      ErrorOf<ConfigurationError>([&] { DistributedDataParallel<Holder> other(net, group); });
  EXPECT_THAT(text, HasSubstr("buffer table is Sparse: only dense tensors"));
  EXPECT_THAT(text, Not(HasSubstr("Exception raised from")));
}

// train() and eval() do not decide whether a forward copies buffers.
RANK_TEST(DistributedDataParallelTest, RanksInTrainAndEvalGoTogether, 2) {
  const auto group = init_process_group();
  Net net;
  DistributedDataParallel model(net, group);
  for (int64_t step = 0; step < 5; ++step) {
    net->train(step == 4 || step == group->rank());  // in train(): rank 0, rank 1, none, none, all
    if (step == 2) net->norm->train();
    net->zero_grad();
    model.forward(Batch(group->rank(), step)).pow(2).sum().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net))) << "step " << step;
    // The statistics of step 2 differ between the ranks, and step 3 changes none.
    EXPECT_EQ(SameOnAllRanks(*group, net->norm->running_var), step == 3) << "step " << step;
  }
  Statistics plain;
  plain->own = group->rank() + 1;
  DistributedDataParallel second(plain, group);
  plain->eval();
  plain->layer->train();
  for (int step = 0; step < 3; ++step) {
    second.forward(torch::ones({1, 2})).sum().backward();
    EXPECT_EQ(plain->seen[0].item<double>(), step);
  }
}

RANK_TEST(DistributedDataParallelTest, NoSyncAccumulatesLocally, 2) {
  const auto group = init_process_group();
  for (const bool view : {false, true}) {
    torch::manual_seed(1);
    PlainNet net;
    DistributedDataParallel model(net, group, {.gradient_as_bucket_view = view});
    // Ranks may accumulate different numbers of times.
    for (int64_t more = 0; more <= group->rank(); ++more) {
      auto guard = model.no_sync();
      model.forward(Batch(group->rank(), more)).pow(2).mean().backward();
    }
    model.forward(Batch(group->rank(), 9)).pow(2).mean().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
    for (int round = 0; round < 3; ++round) {
      net->zero_grad();
      const torch::Tensor expected =
          ExpectedGradients(net, group->size(), 10) + ExpectedGradients(net, group->size(), 11);
      {
        auto guard = model.no_sync();
        model.forward(Batch(group->rank(), 10)).pow(2).mean().backward();
        EXPECT_FALSE(SameOnAllRanks(*group, Gradients(*net)));
      }
      model.forward(Batch(group->rank(), 11)).pow(2).mean().backward();
      EXPECT_TRUE(torch::allclose(Gradients(*net), expected, 1e-5, 1e-7)) << "round " << round;
      EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
    }
  }
}

RANK_TEST(DistributedDataParallelTest, BucketsAreDealtAnewByReadyOrder, {2, 3}) {
  const auto group = init_process_group();
  PlainNet net;
  const DistributedDataParallelOptions small{.bucket_cap_mb = 1e-4, .first_bucket_cap_mb = 1e-5};
  DistributedDataParallel model(net, group, small);
  const auto initial = model.bucket_layout();
  EXPECT_EQ(initial.front().front(), "last.bias");
  const auto step = [&](int64_t number) {
    net->zero_grad();
    model.forward(Batch(group->rank(), number)).pow(2).mean().backward();
    return Gradients(*net);
  };
  step(0);
  const auto rebuilt = model.bucket_layout();
  const torch::Tensor expected = ExpectedGradients(net, group->size(), 1);
  EXPECT_TRUE(torch::allclose(step(1), expected, 1e-5, 1e-7));
  size_t parameters = 0;
  for (const auto& bucket : rebuilt) parameters += bucket.size();
  EXPECT_EQ(parameters, net->parameters().size());
  step(2);
  EXPECT_EQ(model.bucket_layout(), rebuilt);  // rebuilt only once

  // A given layout is kept, from the first step on.
  const std::vector<std::vector<std::string>> layout = {{"first.weight", "last.bias"},
                                                        {"last.weight", "first.bias"}};
  PlainNet other;
  DistributedDataParallel given(other, group, {.bucket_layout = layout});
  for (int64_t number = 0; number < 3; ++number) {
    other->zero_grad();
    const torch::Tensor wanted = ExpectedGradients(other, group->size(), number);
    given.forward(Batch(group->rank(), number)).pow(2).mean().backward();
    EXPECT_TRUE(torch::allclose(Gradients(*other), wanted, 1e-5, 1e-7));
    EXPECT_EQ(given.bucket_layout(), layout);
  }
  EXPECT_THROW(
      DistributedDataParallel(other, group, {.bucket_layout = {{"first.weight", "nowhere"}}}),
      ConfigurationError);
}

RANK_TEST(DistributedDataParallelTest, RefusedBucketLayoutLeavesTheOldOne, 2) {
  const auto group = init_process_group();
  PlainNet net;
  DistributedDataParallel model(net, group);
  const std::vector<std::vector<std::string>> layout = {{"first.weight", "last.bias"},
                                                        {"last.weight", "first.bias"}};
  const std::vector<std::vector<std::string>> other = {
      {"first.weight", "last.bias", "last.weight", "first.bias"}};
  const auto before = model.bucket_layout();
  EXPECT_THAT(ErrorOf<ConfigurationError>(
                  [&] { model.set_bucket_layout(group->rank() == 0 ? layout : other); }),
              HasSubstr("option bucket_layout is"));
  EXPECT_EQ(model.bucket_layout(), before);
  model.set_bucket_layout(layout);  // compares all options: the refused one is in none of them
  EXPECT_EQ(model.bucket_layout(), layout);
  net->zero_grad();
  const torch::Tensor expected = ExpectedGradients(net, group->size(), 0);
  model.forward(Batch(group->rank(), 0)).pow(2).mean().backward();
  EXPECT_TRUE(torch::allclose(Gradients(*net), expected, 1e-5, 1e-7));
  EXPECT_EQ(model.bucket_layout(), layout);
}

// Parameters of many kinds in one model.
struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    single = register_parameter("single", torch::randn({3, 2}));
    wide = register_parameter("wide", torch::randn({2, 3}, torch::kDouble));
    half = register_parameter("half", torch::ones({4}, torch::kBFloat16));
    empty = register_parameter("empty", torch::zeros({0, 3}));
    image = register_parameter("image",
                               torch::randn({2, 3, 4, 4}).to(torch::MemoryFormat::ChannelsLast));
    complex = register_parameter("complex", torch::randn({2, 2}, torch::kComplexFloat));
    frozen = register_parameter("frozen", torch::randn({2}), /*requires_grad=*/false);
  }
  torch::Tensor forward(double x) {
    return (single * x).sum() + (wide * x).sum() + (half * x).sum() + (empty * x).sum() +
           (image * x).sum() + torch::real(complex * x).sum();
  }
  torch::Tensor single, wide, half, empty, image, complex, frozen;
};
TORCH_MODULE(Mixed);

RANK_TEST(DistributedDataParallelTest, AnyDenseParameterWorks, 2) {
  const auto group = init_process_group();
  for (const bool view : {false, true}) {
    Mixed net;
    DistributedDataParallel model(net, group, {.gradient_as_bucket_view = view});
    EXPECT_TRUE(SameOnAllRanks(*group, net->frozen));
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(step == 1);
      model.forward(group->rank() + 1.0).backward();
      const double mean = (group->size() + 1) / 2.0;
      for (const auto& item : net->named_parameters()) {
        if (!item.value().requires_grad()) continue;
        const torch::Tensor gradient = item.value().grad();
        EXPECT_EQ(gradient.scalar_type(), item.value().scalar_type());
        EXPECT_TRUE(torch::allclose(torch::real(gradient).to(torch::kDouble),
                                    torch::full(gradient.sizes(), mean, torch::kDouble), 1e-2))
            << item.key() << " " << gradient;
      }
      EXPECT_TRUE(net->image.grad().is_contiguous(torch::MemoryFormat::ChannelsLast));
    }
    EXPECT_EQ(model.logging_data().dtypes, "c10::BFloat16, c10::complex<float>, double, float");
  }
}

RANK_TEST(DistributedDataParallelTest, EvaluatesOnOneRankAlone, 2) {
  const auto group = init_process_group();
  Net net;
  DistributedDataParallel model(net, group);
  model.forward(Batch(group->rank(), 0)).sum().backward();
  for (int rank = 0; rank < group->size(); ++rank) {
    if (group->rank() != rank) continue;
    const torch::NoGradGuard no_grad;
    for (const bool train : {false, true}) {
      net->train(train);
      for (int64_t more = 0; more <= rank; ++more) {
        EXPECT_EQ(model.forward(Batch(rank, 1)).size(1), 2);
      }
    }
  }
  net->zero_grad();
  model.forward(Batch(group->rank(), 2)).sum().backward();
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
}

// A forward with gradients is a collective in eval() too. On one rank alone, it differs from the
// collective of the other ranks, and all of them throw.
RANK_TEST(DistributedDataParallelTest, AnEvaluationWithGradientsOnOneRankAloneIsNamed,
          .world_size = 2,
          .not_on_device = "ranks in different collectives are named with shm and Gloo only") {
  const auto group = init_process_group();
  for (const int64_t batches : {1, 3}) {
    Net net;
    DistributedDataParallel model(net, group);
    model.forward(Batch(group->rank(), 0)).sum().backward();
    const std::string text = ErrorOf<CommunicationError>([&] {
      if (group->rank() == 1) {
        net->eval();
        for (int64_t batch = 0; batch < batches; ++batch) model.forward(Batch(1, batch));
        net->train();
      }
      for (int64_t step = 1; step < 5; ++step) {
        net->zero_grad();
        model.forward(Batch(group->rank(), step)).sum().backward();
      }
    });
    EXPECT_THAT(text,
                AllOf(HasSubstr("the ranks are in different collectives"), HasSubstr("rank 0 is"),
                      HasSubstr("rank 1 is"), HasSubstr("the broadcast of buffers"),
                      HasSubstr("the ranks ran different numbers of batches")));
  }
  // Without buffers an evaluation has no collective.
  PlainNet net;
  DistributedDataParallel model(net, group);
  for (int64_t step = 0; step < 3; ++step) {
    for (int64_t batch = 0; batch < 2 * group->rank(); ++batch) {
      net->eval();
      model.forward(Batch(group->rank(), batch));
      net->train();
    }
    net->zero_grad();
    model.forward(Batch(group->rank(), step)).pow(2).mean().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net))) << "step " << step;
  }
}

RANK_TEST(DistributedDataParallelTest, SecondBackwardIsRefused, 2) {
  const auto group = init_process_group();
  PlainNet net;
  DistributedDataParallel model(net, group);
  const torch::Tensor loss = model.forward(Batch(group->rank(), 0)).sum();
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THAT(ErrorOf<ReductionError>([&] { loss.backward(); }),
              AllOf(HasSubstr("second gradient for parameter last."), HasSubstr("no_sync()")));
}

// Rank 1 leaves out a layer. Its next forward finds the error, and the others get the failure
// report long before the timeout.
struct BranchingImpl : torch::nn::Module {
  BranchingImpl() {
    always = register_module("always", torch::nn::Linear(4, 4));
    sometimes = register_module("sometimes", torch::nn::Linear(4, 4));
  }
  torch::Tensor forward(const torch::Tensor& x, bool both) {
    const torch::Tensor y = always->forward(x);
    return both ? y + sometimes->forward(x) : y;
  }
  torch::nn::Linear always{nullptr}, sometimes{nullptr};
};
TORCH_MODULE(Branching);

RANK_TEST(DistributedDataParallelTest, UnusedParameterIsNamedOnEveryRank, {2, 3}) {
  const auto group = init_process_group();
  Branching net;
  const std::string names = "no gradient came for sometimes.weight, sometimes.bias";
  const std::string other_reason = "a member was assigned another tensor";
  if (group->rank() == 1) {
    DistributedDataParallel model(net, group);
    model.forward(torch::ones({1, 4}), false).sum().backward();
    EXPECT_THAT(ErrorOf<ReductionError>([&] {
                  model.forward(torch::ones({1, 4}), true);
                }),
                AllOf(HasSubstr("rank 1"), HasSubstr(names), HasSubstr(other_reason)));
  } else {
    DistributedDataParallel model(net, group);
    EXPECT_THAT(ErrorOf<PeerFailedError>([&] {
                  model.forward(torch::ones({1, 4}), true).sum().backward();
                }),
                AllOf(HasSubstr("rank 1 failed"), HasSubstr(names), HasSubstr(other_reason)));
    EXPECT_THAT(ErrorOf<CommunicationError>([&] { group->barrier(); }),
                HasSubstr("cannot be used any more"));
  }
}

RANK_TEST(DistributedDataParallelTest, DifferentModelsAreNamed, {2, 3}) {
  const auto group = init_process_group();
  const bool odd = group->rank() == group->size() - 1;
  const std::string last = std::to_string(group->size() - 1);
  torch::nn::Linear shape(4, odd ? 5 : 6);
  const std::string text = ErrorOf<ConfigurationError>(
      [&] { DistributedDataParallel<torch::nn::LinearImpl> model(shape, group); });
  EXPECT_THAT(text, HasSubstr("the ranks have different models: parameter 0 is weight Float [6, 4] "
                              "strides [4, 1] requires_grad on rank 0 and weight Float [5, 4] "
                              "strides [4, 1] requires_grad on rank " +
                              last));

  torch::nn::Linear dtype(4, 6);
  if (odd) dtype->to(torch::kDouble);
  EXPECT_THAT(ErrorOf<ConfigurationError>(
                  [&] { DistributedDataParallel<torch::nn::LinearImpl> model(dtype, group); }),
              HasSubstr("Double [6, 4]"));

  torch::nn::Linear same(4, 6);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                DistributedDataParallel model(same, group, {.gradient_as_bucket_view = odd});
              }),
              HasSubstr("option gradient_as_bucket_view is 0 on rank 0 and 1 on rank " + last));

  DistributedDataParallelOptions options;
  if (odd) options.mixed_precision = MixedPrecision{.param_dtype = torch::kBFloat16};
  EXPECT_THAT(
      ErrorOf<ConfigurationError>([&] { DistributedDataParallel model(same, group, options); }),
      HasSubstr("option mixed_precision is not set on rank 0 and set on rank " + last));

  // The failure leaves nothing behind: an equal model works on the same group.
  DistributedDataParallel model(same, group);
  model.forward(torch::ones({1, 4})).sum().backward();
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*same)));
}

// An option that differs on the last rank only is named, for each option.
RANK_TEST(DistributedDataParallelTest, DifferentOptionsAreNamed, 2) {
  const auto group = init_process_group();
  const bool odd = group->rank() == group->size() - 1;
  const auto refused = [&](const DistributedDataParallelOptions& options) {
    PlainNet net;
    return ErrorOf<ConfigurationError>([&] {
      DistributedDataParallel model(net, group, odd ? options : DistributedDataParallelOptions());
    });
  };
  EXPECT_THAT(refused({.batched_grad_copy = true}),
              HasSubstr("option batched_grad_copy is 0 on rank 0 and 1 on rank"));
  EXPECT_THAT(refused({.lazy_bucket_allocation = true}),
              HasSubstr("option lazy_bucket_allocation is 0 on rank 0 and 1 on rank"));
  PlainNet net;
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                DistributedDataParallel model(
                    net, group,
                    {.mixed_precision = MixedPrecision{.param_dtype = torch::kBFloat16,
                                                       .cast_forward_inputs = !odd}});
              }),
              HasSubstr("option mixed_precision.cast_forward_inputs is 1 on rank 0 and 0 on rank"));
}

// ---- Parameters that change after wrapping.

// Returns the average of all ranks' gradients, computed in the net's own type.
torch::Tensor ExpectedInItsType(const PlainNet& net, int ranks, int64_t step) {
  PlainNet copy;
  copy->to(net->first->weight.scalar_type());
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    copy->parameters()[i].copy_(net->parameters()[i]);
  }
  at::AutoGradMode grad(true);
  for (int rank = 0; rank < ranks; ++rank) {
    const torch::Tensor batch = Batch(rank, step).to(net->first->weight.scalar_type());
    (copy->forward(batch).pow(2).mean() / ranks).backward();
  }
  return Gradients(*copy);
}

RANK_TEST(DistributedDataParallelTest, GoesOnAfterTheModulesTo, 2) {
  const auto group = init_process_group();
  for (const DistributedDataParallelOptions& options : std::vector<DistributedDataParallelOptions>{
           {},
           {.bucket_cap_mb = 1e-4, .gradient_as_bucket_view = true},
           {.find_unused_parameters = true},
           {.bucket_layout = {{"first.weight", "last.bias"}, {"last.weight", "first.bias"}}},
           {.static_graph = true}}) {
    torch::manual_seed(group->rank());
    PlainNet net;
    DistributedDataParallel model(net, group, options);
    int64_t step = 0;
    const auto loss = [&](int64_t number) {
      const torch::Tensor batch = Batch(group->rank(), number).to(net->first->weight.scalar_type());
      return model.forward(batch).pow(2).mean();
    };
    const auto average = [&] {
      for (int i = 0; i < 2; ++i, ++step) {
        net->zero_grad();
        const torch::Tensor expected = ExpectedInItsType(net, group->size(), step);
        loss(step).backward();
        EXPECT_TRUE(torch::allclose(Gradients(*net), expected, 1e-5, 1e-7));
        EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
        EXPECT_EQ(net->first->weight.grad().scalar_type(), net->first->weight.scalar_type());
      }
    };
    net->to(torch::kDouble);  // before the first step
    average();
    net->to(torch::kFloat);  // between two steps
    average();
    net->last->weight.set_data(net->last->weight.detach().clone());
    average();
    // During an accumulation: the accumulated gradients follow the type.
    net->zero_grad();
    torch::Tensor expected = ExpectedInItsType(net, group->size(), 70);
    {
      const auto guard = model.no_sync();
      loss(70).backward();
    }
    net->to(torch::kDouble);
    expected = expected + ExpectedInItsType(net, group->size(), 71);
    loss(71).backward();
    EXPECT_TRUE(torch::allclose(Gradients(*net), expected, 1e-5, 1e-7));
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  }
}

RANK_TEST(DistributedDataParallelTest, ParametersThatChangeDifferentlyAreNamed, 2) {
  const auto group = init_process_group();
  PlainNet net;
  DistributedDataParallel model(net, group);
  model.forward(Batch(group->rank(), 0)).sum().backward();
  const bool odd = group->rank() == group->size() - 1;
  net->to(odd ? torch::kDouble : torch::kBFloat16);
  EXPECT_THAT(ErrorOf<ConfigurationError>(
                  [&] { model.forward(Batch(0, 1).to(net->first->weight.scalar_type())); }),
              AllOf(HasSubstr("parameter 0 is first.weight BFloat16"), HasSubstr("Double")));
}

// Returns when every rank is here, through the store. A rank that fails next then interrupts no
// collective that it has itself completed.
void MeetInStore(ProcessGroup& group) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < group.size(); ++rank) keys.push_back("here/" + std::to_string(rank));
  group.store()->set(keys[group.rank()], "1");
  group.store()->wait(keys, std::chrono::seconds(60));
}

// A parameter that is frozen after wrapping has no gradient accumulator after the module's to().
RANK_TEST(DistributedDataParallelTest, ParameterFrozenAfterWrappingFollowsTheModulesTo, 2) {
  const auto group = init_process_group();
  PlainNet net;
  DistributedDataParallel model(net, group, {.find_unused_parameters = true});
  const auto step = [&](int64_t number) {
    net->zero_grad();
    const torch::Tensor batch = Batch(group->rank(), number).to(net->first->weight.scalar_type());
    model.forward(batch).pow(2).mean().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  };
  net->first->weight.set_requires_grad(false);
  for (const torch::ScalarType type : {torch::kFloat, torch::kDouble, torch::kFloat}) {
    net->to(type);
    step(0);
    EXPECT_FALSE(net->first->weight.grad().defined());
    EXPECT_TRUE(net->last->weight.grad().defined());
  }
  net->first->weight.set_requires_grad(true);
  const torch::Tensor expected = ExpectedInItsType(net, group->size(), 1);
  step(1);
  EXPECT_TRUE(torch::allclose(Gradients(*net), expected, 1e-5, 1e-7));

  // Without find_unused_parameters, the parameter is missing in the reduction.
  PlainNet other;
  DistributedDataParallel strict(other, group);
  other->first->bias.set_requires_grad(false);
  other->to(torch::kDouble);
  strict.forward(Batch(group->rank(), 2).to(torch::kDouble)).sum().backward();
  MeetInStore(*group);
  EXPECT_THAT(ErrorOf<ReductionError>([&] { strict.check_finished(); }),
              HasSubstr("no gradient came for first.bias"));
}

RANK_TEST(DistributedDataParallelTest, ParameterUnfrozenAfterWrappingIsRefused, 2) {
  const auto group = init_process_group();
  PlainNet net;
  net->first->bias.set_requires_grad(false);
  net->last->bias.set_requires_grad(false);
  DistributedDataParallel model(net, group, {.params_and_buffers_to_ignore = {"last.bias"}});
  const auto step = [&](int64_t number) {
    net->zero_grad();
    model.forward(Batch(group->rank(), number)).pow(2).mean().backward();
  };
  step(0);
  net->last->bias.set_requires_grad(true);  // an ignored one
  step(1);
  EXPECT_TRUE(SameOnAllRanks(*group, net->last->weight.grad()));
  EXPECT_FALSE(SameOnAllRanks(*group, net->last->bias.grad()));
  MeetInStore(*group);
  net->first->bias.set_requires_grad(true);
  const std::string refusal =
      "first.bias requires a gradient now and did not when it was wrapped: construct a new "
      "DistributedDataParallel";
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { step(2); }), HasSubstr(refusal));
  {
    const auto guard = model.no_sync();
    EXPECT_THAT(ErrorOf<ConfigurationError>([&] { step(3); }), HasSubstr(refusal));
  }
  net->zero_grad();
  DistributedDataParallel again(net, group);
  const torch::Tensor expected = ExpectedGradients(net, group->size(), 4);
  again.forward(Batch(group->rank(), 4)).pow(2).mean().backward();
  EXPECT_TRUE(torch::allclose(Gradients(*net), expected, 1e-5, 1e-7));
}

RANK_TEST(DistributedDataParallelTest, ParameterRegisteredAfterWrappingIsRefused, 2) {
  const auto group = init_process_group();
  PlainNet net;
  DistributedDataParallel model(net, group);
  model.forward(Batch(group->rank(), 0)).sum().backward();
  MeetInStore(*group);
  net->register_module("extra", torch::nn::Linear(2, 2));
  EXPECT_THAT(ErrorOf<c10::Error>([&] { model.forward(Batch(group->rank(), 1)); }),
              HasSubstr("extra.weight requires a gradient and was not there when the model was "
                        "wrapped: construct a new DistributedDataParallel"));
}

// Its first backward already, also when one rank alone replaces it and the others have the average.
RANK_TEST(DistributedDataParallelTest, ParameterReplacedUnderFindUnusedIsRefused, {2, 3}) {
  const auto group = init_process_group();
  for (const bool on_all : {true, false}) {
    PlainNet net;
    DistributedDataParallel model(net, group, {.find_unused_parameters = true});
    const auto step = [&](int i) { model.forward(Batch(group->rank(), i)).sum().backward(); };
    for (int i = 0; i < 15; ++i) step(i);  // past the iterations that read all names
    MeetInStore(*group);
    if (on_all || group->rank() == 1) {
      net->first = net->replace_module("first", torch::nn::Linear(net->first->options));
    }
    // The others learn of it in their next iteration.
    EXPECT_THAT(ErrorOfPeer<c10::Error>(*group, [&] { step(15), step(16); }),
                HasSubstr("first.weight requires a gradient and was not there when the model was "
                          "wrapped: construct a new DistributedDataParallel"))
        << on_all;
  }
}

// A layout names all parameters that the model had when it was wrapped.
RANK_TEST(DistributedDataParallelTest, BucketLayoutCountsParametersFrozenAfterWrapping, 2) {
  const auto group = init_process_group();
  PlainNet net;
  DistributedDataParallel model(net, group, {.find_unused_parameters = true});
  net->first->weight.set_requires_grad(false);
  const std::vector<std::vector<std::string>> layout = {{"first.weight", "last.bias"},
                                                        {"last.weight", "first.bias"}};
  model.set_bucket_layout(layout);
  EXPECT_EQ(model.bucket_layout(), layout);
  for (int64_t step = 0; step < 2; ++step) {
    net->first->weight.set_requires_grad(step == 1);
    const torch::Tensor expected = ExpectedGradients(net, group->size(), step);
    net->zero_grad();
    model.forward(Batch(group->rank(), step)).pow(2).mean().backward();
    EXPECT_EQ(net->first->weight.grad().defined(), step == 1);
    const torch::Tensor gradients = Gradients(*net);
    const torch::Tensor wanted = expected.slice(0, expected.numel() - gradients.numel());
    EXPECT_TRUE(torch::allclose(gradients, wanted, 1e-5, 1e-7)) << "step " << step;
  }
}

RANK_TEST(DistributedDataParallelTest, WrapperDestroyedBeforeTheBackwardIsAnError, 2) {
  const auto group = init_process_group();
  PlainNet net;
  std::vector<torch::Tensor> outputs;
  {
    DistributedDataParallel model(net, group);
    {
      const auto guard = model.no_sync();
      outputs.push_back(model.forward(Batch(group->rank(), 0)));
    }
    for (int64_t step = 1; step < 3; ++step) {
      outputs.push_back(model.forward(Batch(group->rank(), step)));
    }
    outputs[1].sum().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  }
  net->zero_grad();
  EXPECT_THAT(ErrorOf<ReductionError>([&] { outputs[2].sum().backward(); }),
              HasSubstr("the DistributedDataParallel of this forward was destroyed before its "
                        "backward"));
  EXPECT_EQ(Gradients(*net).numel(), 0);
  outputs[0].sum().backward();  // of a forward under no_sync(): stays on this rank
  EXPECT_FALSE(SameOnAllRanks(*group, Gradients(*net)));

  // The group is unharmed.
  DistributedDataParallel next(net, group);
  net->zero_grad();
  next.forward(Batch(group->rank(), 3)).sum().backward();
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
}

RANK_TEST(DistributedDataParallelTest, MisuseIsOneClearLine, 2) {
  EXPECT_THAT(ErrorOf<ConfigurationError>([] { init_process_group({.expected_world_size = 64}); }),
              AllOf(HasSubstr("expects a world size of 64"), HasSubstr("WORLD_SIZE=")));
  EXPECT_THAT(ErrorOf<ConfigurationError>([] { init_process_group({.backend = "mpi"}); }),
              HasSubstr("backend \"mpi\" is unknown"));
  const auto group = init_process_group();
  torch::nn::Linear frozen(2, 2);
  for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  EXPECT_THAT(ErrorOf<ConfigurationError>(
                  [&] { DistributedDataParallel<torch::nn::LinearImpl> model(frozen, group); }),
              HasSubstr("no parameter that requires a gradient"));
  torch::nn::Linear fine(2, 2);
  EXPECT_THAT(ErrorOf<ConfigurationError>(
                  [&] { DistributedDataParallel model(fine, group, {.bucket_cap_mb = -1}); }),
              HasSubstr("bucket_cap_mb=-1 must be above 0"));
  EXPECT_THAT(ErrorOf<ConfigurationError>(
                  [&] { DistributedDataParallel model(fine, std::shared_ptr<ProcessGroup>()); }),
              HasSubstr("needs a module and a process group"));
  group->barrier();  // no rank ends while another one connects
}

// A collective that a peer does not join ends by the group's timeout. Destroying the group then
// does not wait for the collective, and its tensors stay valid.
RANK_TEST(DistributedDataParallelTest, AbsentPeerEndsInATimeout, 2) {
  const auto group = init_process_group({.timeout = std::chrono::seconds(4)});
  group->barrier();
  if (group->rank() == 0) {
    const std::string text =
        ErrorOfPeer<CommunicationError>(*group, [&] { group->all_reduce(torch::ones({4})); });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 0"), HasSubstr("an all-reduce")));
    EXPECT_THAT(ErrorOf<CommunicationError>([&] { group->barrier(); }),
                HasSubstr("cannot be used any more"));
    group->store()->set("timed_out", "1");
  } else {
    group->store()->wait({"timed_out"}, std::chrono::seconds(60));
  }
}

RANK_TEST(DistributedDataParallelTest, ReportedFailureReachesWaitingRanks, 2) {
  const auto group = init_process_group();
  group->barrier();
  if (group->rank() == 1) {
    group->report_failure("the disk is full");
    group->store()->wait({"seen"}, std::chrono::seconds(60));
    return;
  }
  const std::string text =
      ErrorOfPeer<PeerFailedError>(*group, [&] { group->all_reduce(torch::ones({4})); });
  EXPECT_THAT(text, AllOf(HasSubstr("because rank 1 failed: the disk is full"),
                          HasSubstr("an all-reduce")));
  if (group->rank() == 0) group->store()->set("seen", "1");
}

RANK_TEST(DistributedDataParallelTest, DyingPeerIsAnError, 2) {
  const auto group = init_process_group();
  group->barrier();
  if (group->rank() == 1) _exit(0);
  EXPECT_THAT(
      ErrorOfPeer<CommunicationError>(*group, [&] { group->all_reduce(torch::ones({1 << 20})); }),
      HasSubstr("stopped in an all-reduce, because rank 1 failed: the process of rank 1 has "
                "ended"));
}

// ---- Cases above, in a TCPStore.

TEST(DistributedDataParallelTest, AveragesGradientsByTcpStore) {
  ASSERT_TRUE(testing::RanksSucceed(
      {.world_size = 2, .body = "DistributedDataParallelTest.AveragesGradients"}));
}

TEST(DistributedDataParallelTest, UnusedParameterIsNamedOnEveryRankByTcpStore) {
  ASSERT_TRUE(testing::RanksSucceed(
      {.world_size = 2, .body = "DistributedDataParallelTest.UnusedParameterIsNamedOnEveryRank"}));
}

}  // namespace
}  // namespace ddp
