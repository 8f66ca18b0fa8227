// Tests the reduction of gradients when operations end in an unusual order, late or with an error.
// The ranks are threads; the fake backend holds and fails the operations of buckets.
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "ddp/comm_hook.h"
#include "ddp/common/error.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/fake_backend.h"
#include "testing/backend/random_numbers.h"
#include "testing/backend/thread_ranks.h"

namespace ddp {
namespace {

using ::ddp::testing::FakeCall;
using ::ddp::testing::FakeFate;
using ::ddp::testing::FakeNetwork;
using ::ddp::testing::Randomize;
using ::ddp::testing::RandomNumbers;
using ::ddp::testing::RunThreadRanks;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Hold = FakeFate::Hold;

constexpr int kRanks = 3;
constexpr int kBuckets = 4;

// One layer for each bucket. A bucket has 5 to 8 numbers.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int64_t i = 0; i < kBuckets; ++i) {
      weights.push_back(register_parameter("weight" + std::to_string(i), at::zeros({5 + i})));
    }
    Randomize(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (const at::Tensor& weight : weights) y = at::tanh(y * weight.sum() + weight.pow(2).sum());
    return y;
  }
  std::vector<at::Tensor> weights;
};
TORCH_MODULE(Net);

using Model = DistributedDataParallel<NetImpl>;

// True while the script decides about this rank's operations. The ranks are threads.
thread_local bool scripted = false;

void Backward(Model& model, int rank, int step) {
  model->zero_grad();
  model.forward(RandomNumbers(100 * step + rank, {4})).sum().backward();
}

std::vector<at::Tensor> Gradients(Model& model) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : model->parameters()) {
    gradients.push_back(parameter.grad().clone());
  }
  return gradients;
}

struct Story {
  FakeNetwork::Script script = nullptr;  // of the second step
  std::function<void(FakeNetwork&)> conduct = nullptr;
  std::function<void(Model&, const std::shared_ptr<ProcessGroup>&)> prepare = nullptr;
  // Runs the second step.
  std::function<void(Model&, int rank)> step = [](Model& model, int rank) {
    Backward(model, rank, 1);
  };
};

// Runs three steps, the second one under the script. Returns the gradients of the second and of the
// third step, by rank.
std::vector<std::vector<at::Tensor>> RunStory(const Story& story) {
  std::vector<std::vector<at::Tensor>> results(kRanks);
  const auto script = [&](const FakeCall& call) {
    return scripted && story.script ? story.script(call) : FakeFate();
  };
  RunThreadRanks({.world_size = kRanks, .network = {.script = script}, .conduct = story.conduct},
                 [&](const std::shared_ptr<ProcessGroup>& group) {
                   const int rank = group->rank();
                   Net net;
                   Model model(net, group, {.bucket_cap_mb = 1e-6});
                   if (story.prepare) story.prepare(model, group);
                   Backward(model, rank, 0);  // rebuilds the buckets
                   EXPECT_EQ(model.bucket_layout().size(), kBuckets);
                   scripted = true;
                   story.step(model, rank);
                   scripted = false;
                   results[rank] = Gradients(model);
                   Backward(model, rank, 2);
                   for (at::Tensor& gradient : Gradients(model)) results[rank].push_back(gradient);
                 });
  return results;
}

void ExpectSameBits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << a[i] << b[i];
}

// Expects on every rank the bits of an undisturbed run.
void ExpectUndisturbed(const std::vector<std::vector<at::Tensor>>& results) {
  const std::vector<std::vector<at::Tensor>> expected = RunStory({});
  ASSERT_EQ(expected[0].size(), 2u * kBuckets);
  for (int rank = 0; rank < kRanks; ++rank) {
    ExpectSameBits(expected[rank], expected[0]);
    ExpectSameBits(results[rank], expected[0]);
  }
}

FakeFate HoldResult(const FakeCall&) { return {.hold = Hold::kCompletion}; }

TEST(ReducerOrderTest, BucketsThatCompleteInReverse) {
  std::vector<int64_t> bytes;
  const auto conduct = [&](FakeNetwork& network) {
    std::vector<FakeCall> held = network.AwaitHeld(kRanks * kBuckets);
    // Every rank has launched all buckets, in the same order.
    for (size_t i = 0; i < held.size(); ++i) {
      if (held[i].rank == 0) bytes.push_back(held[i].bytes);
      EXPECT_EQ(held[i].bytes, bytes.back());
    }
    std::reverse(held.begin(), held.end());
    for (const FakeCall& call : held) network.Release(call);
  };
  ExpectUndisturbed(RunStory({.script = HoldResult, .conduct = conduct}));
  EXPECT_THAT(bytes, ElementsAre(32, 28, 24, 20));  // the last layer first
}

TEST(ReducerOrderTest, ARankThatIsLateAtEveryBucket) {
  const auto script = [](const FakeCall& call) {
    return FakeFate{.hold = call.rank == 1 ? Hold::kArrival : Hold::kNothing};
  };
  const auto conduct = [](FakeNetwork& network) {
    for (const FakeCall& call : network.AwaitHeld(kBuckets)) network.Release(call);
  };
  ExpectUndisturbed(RunStory({.script = script, .conduct = conduct}));
}

// Rank 2 gets its results last, and then in no order.
TEST(ReducerOrderTest, ARankThatGetsItsResultsLate) {
  const auto script = [](const FakeCall& call) {
    return FakeFate{.hold = call.rank == 2 ? Hold::kCompletion : Hold::kNothing};
  };
  const auto conduct = [](FakeNetwork& network) {
    const std::vector<FakeCall> held = network.AwaitHeld(kBuckets);
    for (const int bucket : {1, 3, 0, 2}) network.Release(held[bucket]);
  };
  ExpectUndisturbed(RunStory({.script = script, .conduct = conduct}));
}

// Rank 1's connection breaks at the second bucket. The group is renewed, and the buckets stay.
TEST(ReducerOrderTest, TheSecondBucketFailsOnOneRank) {
  const auto script = [](const FakeCall& call) {
    // 28 bytes: the second bucket. The later ones of this rank never arrive.
    if (call.rank != 1 || call.bytes > 28) return FakeFate();
    return call.bytes == 28 ? FakeFate{.error = "a flipped bit"} : FakeFate{.lost = true};
  };
  const auto step = [](Model& model, int rank) {
    const auto layout = model.bucket_layout();
    try {
      Backward(model, rank, 1);
      ADD_FAILURE() << "no error";
    } catch (const PeerFailedError& error) {
      EXPECT_NE(rank, 1);
      EXPECT_EQ(error.rank(), 1);
      EXPECT_THAT(error.what(), HasSubstr("a flipped bit"));
    } catch (const CommunicationError& error) {
      EXPECT_EQ(rank, 1);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("gradient bucket 1"), HasSubstr("a flipped bit")));
    }
    scripted = false;
    Backward(model, rank, 1);
    EXPECT_EQ(model.bucket_layout(), layout);
  };
  ExpectUndisturbed(RunStory({.script = script, .step = step}));
}

// The futures of a comm hook complete in an order of their own on each rank.
TEST(ReducerOrderTest, HooksThatCompleteInNoOrder) {
  std::vector<std::vector<int>> completed(kRanks);  // buckets by rank, in the order of completion
  std::atomic<int> to_chain = kRanks * kBuckets;
  std::promise<void> all_chained;
  const auto hook = [&](const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket) {
    const at::Tensor buffer = bucket.buffer().div_(group->size());
    const bool observed = scripted;
    TensorFuture averaged = group->all_reduce_async(buffer).then(
        [&completed, buffer, observed, rank = group->rank(),
         index = bucket.index()](c10::ivalue::Future& done) -> c10::IValue {
          (void)done.value();  // throws its error
          if (observed) completed[rank].push_back(index);
          return buffer;
        },
        c10::TensorType::get());
    // A future that is complete already would run its continuation on this thread, at once.
    if (observed && --to_chain == 0) all_chained.set_value();
    return averaged;
  };
  const auto prepare = [&](Model& model, const std::shared_ptr<ProcessGroup>& group) {
    model.register_comm_hook(group, hook, "average");
  };
  const auto conduct = [&](FakeNetwork& network) {
    const std::vector<FakeCall> held = network.AwaitHeld(kRanks * kBuckets);
    ASSERT_EQ(all_chained.get_future().wait_for(std::chrono::seconds(60)),
              std::future_status::ready);
    for (const int bucket : {2, 0, 3, 1}) {
      for (int rank = 0; rank < kRanks; ++rank) {
        const int turned = rank == 1 ? kBuckets - 1 - bucket : bucket;
        network.Release(held[turned * kRanks + rank]);
      }
    }
  };
  const auto results = RunStory({.script = HoldResult, .conduct = conduct, .prepare = prepare});
  EXPECT_THAT(completed[0], ElementsAre(2, 0, 3, 1));
  EXPECT_THAT(completed[1], ElementsAre(1, 3, 0, 2));
  const auto undisturbed = RunStory({.prepare = prepare});
  for (int rank = 0; rank < kRanks; ++rank) ExpectSameBits(results[rank], undisturbed[0]);
}

}  // namespace
}  // namespace ddp
