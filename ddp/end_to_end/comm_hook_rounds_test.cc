// Tests comm hooks of several rounds, on real processes.
#include <torch/torch.h>

#include <cmath>
#include <map>

#include "ddp/comm_hook.h"
#include "ddp/common/error.h"
#include "ddp/default_hooks.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/join.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::ErrorOfPeer;
using ::ddp::testing::Flatten;
using ::ddp::testing::Gradients;
using ::ddp::testing::SameOnAllRanks;
using ::ddp::testing::StepAfterFailure;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kCulprit = 1;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(3);
    first = register_module("first", torch::nn::Linear(6, 8));
    last = register_module("last", torch::nn::Linear(8, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last->forward(torch::tanh(first->forward(x)));
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(Net);

const DistributedDataParallelOptions kSmallBuckets = {.bucket_cap_mb = 1e-4};

torch::Tensor Input(int rank, int step) {
  return torch::sin(torch::arange(24).view({4, 6}) * (1.5 + step) + rank);
}

void Step(DistributedDataParallel<Net>& model, const ProcessGroup& group, int step) {
  model->zero_grad();
  model->forward(Input(group.rank(), step)).pow(2).mean().backward();
}

// ---- Compression to rank 1, as in PowerSGD: buffer M becomes p * (M^T p)^T with p = M q / |M q|.

torch::Tensor AsMatrix(const torch::Tensor& buffer) {
  const auto rows = static_cast<int64_t>(std::ceil(std::sqrt(buffer.numel())));
  return torch::constant_pad_nd(buffer, {0, rows * rows - buffer.numel()}).view({rows, rows});
}

torch::Tensor Start(const torch::Tensor& matrix) {
  return torch::cos(torch::arange(matrix.size(1), torch::kFloat)).unsqueeze(1);
}

struct RankOne {
  std::shared_ptr<ProcessGroup> group;
  std::map<int, torch::Tensor> left;     // by bucket, between the rounds
  std::map<int, torch::Tensor> buffers;  // by bucket, as they were
};

CommHookRounds RankOneHook(const std::shared_ptr<RankOne>& state) {
  return {.first = [state](GradBucket& bucket) -> TensorFuture {
            state->buffers[bucket.index()] = bucket.buffer().clone();
            const torch::Tensor matrix = AsMatrix(bucket.buffer());
            return state->group->all_reduce_async(matrix.matmul(Start(matrix)));
          },
          .further = {[state](GradBucket& bucket, const c10::IValue& sum) -> TensorFuture {
            const torch::Tensor left = sum.toTensorVector().front();
            const torch::Tensor unit = left / left.norm();
            state->left[bucket.index()] = unit;
            const torch::Tensor right = AsMatrix(bucket.buffer()).t().matmul(unit);
            return state->group->all_reduce_async(right.div_(state->group->size()))
                .then([unit, buffer = bucket.buffer()](c10::ivalue::Future& done) -> c10::IValue {
                  const torch::NoGradGuard no_grad;
                  const torch::Tensor total = done.value().toTensorVector().front();
                  return unit.matmul(total.t()).flatten().narrow(0, 0, buffer.numel()).clone();
                });
          }}};
}

RANK_TEST(CommHookRoundsTest, RankOneCompressionEqualsItsReference, .world_size = {2, 3}) {
  const auto group = init_process_group();
  Net net;
  DistributedDataParallel model(net, group, kSmallBuckets);
  const auto state = std::make_shared<RankOne>(RankOne{.group = group});
  model.register_comm_hook(RankOneHook(state), "rank_one");
  for (int step = 0; step < 3; ++step) {
    const auto layout = model.bucket_layout();
    Step(model, *group, step);
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
    ASSERT_GT(layout.size(), 1u);
    for (size_t b = 0; b < layout.size(); ++b) {
      const torch::Tensor mine = state->buffers.at(static_cast<int>(b));
      std::vector<torch::Tensor> all(group->size());
      for (torch::Tensor& buffer : all) buffer = torch::empty_like(mine);
      group->all_gather(all, mine);
      torch::Tensor left;
      for (const torch::Tensor& buffer : all) {
        const torch::Tensor matrix = AsMatrix(buffer);
        const torch::Tensor part = matrix.matmul(Start(matrix));
        left = left.defined() ? left + part : part;
      }
      const torch::Tensor unit = left / left.norm();
      const torch::Tensor mean = torch::stack(all).mean(0);
      const torch::Tensor expected =
          unit.matmul(AsMatrix(mean).t().matmul(unit).t()).flatten().narrow(0, 0, mean.numel());
      std::vector<torch::Tensor> gradients;
      for (const std::string& name : layout[b]) {
        gradients.push_back(net->named_parameters()[name].grad());
      }
      EXPECT_TRUE(torch::allclose(Flatten(gradients), expected.to(torch::kDouble), 1e-4, 1e-6));
    }
  }
}

// ---- The example in ddp/common/grad_bucket.h.

RANK_TEST(CommHookRoundsTest, TheExampleAverages, 2) {
  const auto group = init_process_group();
  Net net, plain_net;
  DistributedDataParallel model(net, group, kSmallBuckets);
  DistributedDataParallel plain(plain_net, group, kSmallBuckets);
  ddp::CommHookRounds hook = {
      .first = [=](ddp::GradBucket& bucket) -> ddp::TensorFuture {
        const at::Tensor largest = bucket.buffer().abs().max().view({1}).clamp_min(1e-30);
        return group->all_reduce_async(largest, ddp::ReduceOp::kMax);
      },
      .further = {[=](ddp::GradBucket& bucket, const c10::IValue& former) -> ddp::TensorFuture {
        const at::Tensor scale = former.toTensorVector().front().mul_(group->size());
        const at::Tensor half = bucket.buffer().div(scale).to(at::kHalf);
        return group->all_reduce_async(half).then([=](c10::ivalue::Future&) -> c10::IValue {
          return half.to(at::kFloat).mul_(scale / group->size());
        });
      }}};
  model.register_comm_hook(hook, "scaled_half");
  const auto large = [](const torch::Tensor& output) { return output.pow(2).mean() * 1e7; };
  large(model.forward(Input(group->rank(), 0))).backward();
  large(plain.forward(Input(group->rank(), 0))).backward();
  const torch::Tensor expected = Gradients(*plain_net);
  EXPECT_GT(expected.abs().max().item<double>(), 65504);  // the largest of half precision
  EXPECT_TRUE(torch::allclose(Gradients(*net), expected, 1e-2, 1e4));
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
}

// ---- The average, in as many rounds as wanted: every round but the last sums a number.

enum class Fault { kNone, kThrow, kNoFuture, kFailLater, kWrongShape };

// A hook of three rounds; `fault` happens in the second one.
CommHookRounds AverageHook(const std::shared_ptr<ProcessGroup>& group, const Fault* fault) {
  const auto count = [group](GradBucket& bucket) {
    return group->all_reduce_async(torch::full({1}, bucket.index()));
  };
  return {.first = count,
          .further = {[=](GradBucket& bucket, const c10::IValue& sum) -> TensorFuture {
                        EXPECT_EQ(sum.toTensorVector().front().item<int64_t>(),
                                  bucket.index() * group->size());
                        if (*fault == Fault::kThrow) throw std::runtime_error("no memory");
                        if (*fault == Fault::kNoFuture) return {};
                        if (*fault != Fault::kFailLater) return count(bucket);
                        return count(bucket).then([](c10::ivalue::Future&) -> c10::IValue {
                          throw std::runtime_error("decompression failed");
                        });
                      },
                      [=](GradBucket& bucket, const c10::IValue&) -> TensorFuture {
                        const TensorFuture average = allreduce_hook(group, bucket);
                        if (*fault != Fault::kWrongShape) return average;
                        return average->then(
                            [](c10::ivalue::Future&) -> c10::IValue { return torch::zeros({1}); },
                            c10::TensorType::get());
                      }}};
}

RANK_TEST(CommHookRoundsTest, RoundsAverageAsOneRoundDoes, .world_size = {1, 2}) {
  const auto group = init_process_group();
  const Fault fault = Fault::kNone;
  for (const DistributedDataParallelOptions& options : std::vector<DistributedDataParallelOptions>{
           kSmallBuckets,
           {.bucket_cap_mb = 1e-4, .gradient_as_bucket_view = true},
           {.bucket_cap_mb = 1e-4, .find_unused_parameters = true},
           {.bucket_cap_mb = 1e-4, .static_graph = true},
           {.bucket_cap_mb = 1e-4, .lazy_bucket_allocation = true}}) {
    Net net, plain_net;
    DistributedDataParallel model(net, group, options);
    DistributedDataParallel plain(plain_net, group, options);
    model.register_comm_hook(AverageHook(group, &fault));
    for (int step = 0; step < 3; ++step) {
      Step(model, *group, step);
      Step(plain, *group, step);
      EXPECT_TRUE(torch::equal(Gradients(*net), Gradients(*plain_net)));
    }
  }
}

RANK_TEST(CommHookRoundsTest, AJoinedRankTakesPartInEveryRound, .world_size = {2, 3}) {
  const auto group = init_process_group();
  const Fault fault = Fault::kNone;
  Net net;
  DistributedDataParallel model(net, group, kSmallBuckets);
  model.register_comm_hook(AverageHook(group, &fault), "average");
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Join join({&model});
  for (int step = 0; step < 2 + 2 * group->rank(); ++step) {
    Step(model, *group, step);
    optimizer.step();
  }
  join.finish();
  EXPECT_TRUE(SameOnAllRanks(*group, Flatten(net->parameters())));
}

RANK_TEST(CommHookRoundsTest, ErrorsNameTheRoundTheHookAndTheBucket, .world_size = 2) {
  const auto group = init_process_group();
  Net net;
  DistributedDataParallel model(net, group, kSmallBuckets);
  Fault fault = Fault::kNone;
  model.register_comm_hook(AverageHook(group, &fault), "average");
  for (const auto& [next, news] : std::vector<std::pair<Fault, std::string>>{
           {Fault::kThrow, "no memory"},
           {Fault::kNoFuture, "it returned no future"},
           {Fault::kFailLater, "decompression failed"},
           {Fault::kWrongShape, "is a tensor of shape [1]"}}) {
    fault = Fault::kNone;
    StepAfterFailure(*group, [&] { Step(model, *group, 0); });
    Step(model, *group, 0);
    const bool culprit = group->rank() == kCulprit;
    if (culprit) fault = next;
    const auto step = [&] { Step(model, *group, 1); };
    std::string text =
        culprit ? ErrorOf<std::exception>(step) : ErrorOfPeer<std::exception>(*group, step);
    // The other rank may have all it needs; it learns of the failure in its next step.
    if (text == "no error") text = ErrorOf<std::exception>([&] { Step(model, *group, 2); });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1"), HasSubstr(news), HasSubstr("gradient bucket 0")));
    EXPECT_THAT(text, Not(HasSubstr("no error")));
    if (next != Fault::kWrongShape) {
      EXPECT_THAT(text,
                  HasSubstr("round 2 of the comm hook \"average\", called for gradient bucket "
                            "0 (last."));
    }
  }
  fault = Fault::kNone;
  StepAfterFailure(*group, [&] { Step(model, *group, 3); });
  Step(model, *group, 3);
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
}

RANK_TEST(CommHookRoundsTest, AnEmptyRoundIsRefused, 1) {
  const auto group = init_process_group();
  const Fault fault = Fault::kNone;
  Net net;
  DistributedDataParallel model(net, group);
  CommHookRounds hook = AverageHook(group, &fault);
  hook.further[1] = nullptr;
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { model.register_comm_hook(hook, "average"); }),
              HasSubstr("a round of the comm hook \"average\" is an empty function"));
}

RANK_TEST(CommHookRoundsTest, HooksOfDifferentRoundsAreNamed, 2) {
  const auto group = init_process_group();
  const Fault fault = Fault::kNone;
  Net net;
  DistributedDataParallel model(net, group);
  if (group->rank() == 0) {
    model.register_comm_hook(AverageHook(group, &fault), "average");
  } else {
    model.register_comm_hook(group, allreduce_hook, "average");
  }
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { Step(model, *group, 0); }),
              AllOf(HasSubstr("\"average\" of 3 rounds"), HasSubstr("comm hooks")));
}

}  // namespace
}  // namespace ddp
