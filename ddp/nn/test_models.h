// Nets with layers that take statistics over all ranks, for the tests of this folder.
#ifndef DDP_NN_TEST_MODELS_H_
#define DDP_NN_TEST_MODELS_H_

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include <torch/autograd.h>
#include <torch/nn.h>

#include "ddp/activation_checkpoint.h"
#include "ddp/common/error.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/nn/convert_sync_batchnorm.h"
#include "ddp/nn/sync_batch_norm.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/random_numbers.h"
#include "testing/distributed_checks.h"
#include "testing/throw_in_backward.h"

namespace ddp::testing {

// How a net runs its forward; fixed by the test.
struct Way {
  bool reentrant = false;
  bool checkpoint = false;
  int branch = -1;                        // the head that the forward uses; -1: both
  bool explosive = false;                 // its backward throws
  std::function<void()> between = [] {};  // runs between the two batch norms
};

// A net with two batch norms, typed members, as a program writes it. The first layer's input needs
// a gradient, so that each batch norm has a collective in the backward.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("first", first);
    register_module("norm", norm);
    register_module("second", second);
    register_module("inner", inner);
    register_module("head", head);
    register_module("other", other);
  }
  torch::Tensor Body(const torch::Tensor& x) {
    const torch::Tensor h = torch::tanh(norm->forward(first->forward(x)));
    way.between();
    return torch::tanh(inner->forward(second->forward(h)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor h;
    if (way.checkpoint) {
      CheckpointOptions options;
      options.use_reentrant = way.reentrant;
      options.parameters = parameters();
      h = checkpoint(
          options, [this](const torch::Tensor& input) { return Body(input); }, x);
    } else {
      h = Body(x);
    }
    if (way.explosive) h = ThrowInBackward(h, "rank 1 has a bad day");
    if (way.branch == 0) return head->forward(h);
    if (way.branch == 1) return other->forward(h);
    return head->forward(h) + other->forward(h);
  }
  torch::nn::Linear first{3, 4}, second{4, 4}, head{4, 2}, other{4, 2};
  torch::nn::BatchNorm1d norm{4};
  torch::nn::BatchNorm1d inner{torch::nn::BatchNormOptions(4).momentum(std::nullopt)};
  Way way;
};
TORCH_MODULE(Net);

// Returns a net with the same numbers on all ranks; MakeConverted(): with converted batch norms.
inline Net MakeNet() {
  Net net;
  Randomize(*net, 7);
  return net;
}

inline Net MakeConverted(const std::shared_ptr<ProcessGroup>& group = nullptr) {
  Net net = MakeNet();
  convert_sync_batchnorm(*net, group);
  return net;
}

inline torch::Tensor Input(int rank, int step) {
  return RandomNumbers(100 * step + rank, {2 + rank % 2, 3});
}

inline torch::Tensor LossOf(const torch::Tensor& output) { return output.pow(2).sum(); }

// Subtracts the gradients, times 0.01, and discards them.
inline void Step(torch::nn::Module& net) {
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& parameter : net.parameters()) {
    if (!parameter.grad().defined()) continue;
    parameter.sub_(parameter.grad(), 0.01);
    parameter.mutable_grad().reset();
  }
}

// One step of one process on the inputs of `ranks`, with the loss divided as the wrapper divides.
inline void ReferenceStep(Net& net, const std::vector<int>& ranks, int step, int divisor) {
  std::vector<torch::Tensor> inputs;
  for (const int rank : ranks) inputs.push_back(Input(rank, step));
  (LossOf(net->forward(torch::cat(inputs))) / divisor).backward();
  Step(*net);
}

// Expects the parameters and buffers of `reference` on all ranks of `group`.
inline void ExpectSame(ProcessGroup& group, const Net& mine, const Net& reference,
                       double tolerance = 1e-5) {
  for (const auto& item : reference->named_parameters()) {
    const torch::Tensor parameter = mine->named_parameters()[item.key()];
    EXPECT_TRUE(parameter.allclose(item.value(), tolerance, tolerance)) << item.key();
  }
  for (const auto& item : reference->named_buffers()) {
    const torch::Tensor buffer = mine->named_buffers()[item.key()];
    EXPECT_TRUE(
        buffer.to(torch::kDouble).allclose(item.value().to(torch::kDouble), tolerance, tolerance))
        << item.key() << ": " << buffer << " is not " << item.value();
  }
  EXPECT_TRUE(SameOnAllRanks(group, Flatten(mine->parameters())));
  EXPECT_TRUE(SameOnAllRanks(group, Flatten(mine->buffers())));
}

inline std::vector<int> AllRanks(const ProcessGroup& group) {
  std::vector<int> ranks;
  for (int rank = 0; rank < group.size(); ++rank) ranks.push_back(rank);
  return ranks;
}

// A layer that runs as a checkpointed segment.
struct SyncNetImpl : torch::nn::Module {
  explicit SyncNetImpl(const std::shared_ptr<ProcessGroup>& group = nullptr)
      : norm(torch::nn::BatchNormOptions(4), group) {
    register_module("first", first);
    register_module("norm", norm);
  }
  torch::Tensor forward(const torch::Tensor& x) { return checkpoint(norm, first->forward(x)); }
  torch::nn::Linear first{3, 4};
  SyncBatchNorm1d norm;
};
TORCH_MODULE(SyncNet);

// Runs its layers in an order that depends on the rank.
struct CrossedImpl : torch::nn::Module {
  CrossedImpl() {
    register_module("wide", wide);
    register_module("narrow", narrow);
  }
  torch::Tensor forward(const torch::Tensor& x, bool first) {
    const torch::Tensor part = x.narrow(1, 0, 2);
    torch::Tensor sum = torch::zeros({});
    if (first) sum = sum + wide->forward(x).sum();
    sum = sum + narrow->forward(part).sum();
    return first ? sum : sum + wide->forward(x).sum();
  }
  SyncBatchNorm1d wide{3}, narrow{2};
};
TORCH_MODULE(Crossed);

// The place of an exception.
enum class Place { kForward, kNoSync, kNoGrad, kBackward, kBackwardNoSync };

// Runs one step in which rank 1 throws while the others wait in a batch norm.
inline void FailAt(DistributedDataParallel<Net>& model, Place place, int rank) {
  Net net(model.module());
  const bool in_backward = place == Place::kBackward || place == Place::kBackwardNoSync;
  net->way.explosive = rank == 1 && in_backward;
  if (rank == 1 && !in_backward) {
    net->way.between = [] { throw std::runtime_error("rank 1 has a bad day"); };
  }
  const auto guard = model.no_sync(place == Place::kNoSync || place == Place::kBackwardNoSync);
  const torch::AutoGradMode mode(place != Place::kNoGrad);
  const torch::Tensor output = model(Input(rank, 0));
  if (place != Place::kNoGrad) LossOf(output).backward();
}

// Runs `action`. Returns true when it throws, and expects the error of rank 1 then. A layer's group
// without rank 1 names it in the text alone.
inline bool Throws(int rank, const std::function<void()>& action) {
  try {
    action();
    return false;
  } catch (const PeerFailedError& error) {
    EXPECT_NE(rank, 1) << error.what();
    EXPECT_EQ(error.rank(), 1) << error.what();
  } catch (const CommunicationError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("rank 1, which is not in this process group"));
  } catch (const std::exception& error) {
    EXPECT_EQ(rank, 1) << error.what();
    EXPECT_THAT(error.what(), ::testing::HasSubstr("rank 1 has a bad day"));
  }
  return true;
}

}  // namespace ddp::testing

#endif  // DDP_NN_TEST_MODELS_H_
