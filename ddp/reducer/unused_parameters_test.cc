#include "ddp/reducer/unused_parameters.h"

#include <algorithm>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "ddp/common/torch_versions.h"

namespace ddp::internal {
namespace {

using torch::autograd::Node;

// Three parameters with their accumulators.
class UnusedParametersTest : public ::testing::Test {
 protected:
  UnusedParametersTest() {
    for (int i = 0; i < 3; ++i) {
      parameters_.push_back(at::ones({2}).set_requires_grad(true));
      owned_.push_back(torch::autograd::impl::grad_accumulator(parameters_.back()));
      accumulators_.push_back(owned_.back().get());
    }
  }

  bool Reaches(const std::vector<at::Tensor>& outputs, std::vector<int> wanted) const {
    std::vector<const Node*> sorted;
    for (const int index : wanted) sorted.push_back(accumulators_[index]);
    std::sort(sorted.begin(), sorted.end());
    return ReachesAny(outputs, sorted);
  }

  // Returns the reach of a backward from `output`, which a hook on the output looks up.
  BackwardReach ReachFrom(const at::Tensor& output, const std::vector<at::Tensor>& inputs = {}) {
    BackwardReach reach;
    output.register_hook([&](const at::Tensor&) { reach = ReachOfBackward(accumulators_); });
    output.sum().backward({}, /*retain_graph=*/false, /*create_graph=*/false,
                          inputs.empty() ? std::optional<at::TensorList>() : inputs);
    return reach;
  }

  std::vector<at::Tensor> parameters_;
  std::vector<torch_versions::NodePtr> owned_;
  std::vector<const Node*> accumulators_;
};

TEST_F(UnusedParametersTest, TheGraphOfTheOutputsIsSearched) {
  const at::Tensor first = at::mul(parameters_[0], 2);
  const at::Tensor both = at::add(first, at::mul(parameters_[1], 3));
  EXPECT_TRUE(Reaches({first}, {0, 1, 2}));
  EXPECT_FALSE(Reaches({first}, {1, 2}));
  EXPECT_TRUE(Reaches({both}, {1}));
  EXPECT_FALSE(Reaches({both}, {2}));
  EXPECT_TRUE(Reaches({first, both}, {1}));  // by the second output
}

TEST_F(UnusedParametersTest, AConstantReachesNothing) {
  EXPECT_FALSE(Reaches({at::ones({2})}, {0, 1, 2}));
  EXPECT_FALSE(Reaches({at::mul(parameters_[0], 2).detach()}, {0, 1, 2}));
  EXPECT_FALSE(Reaches({}, {0, 1, 2}));
}

TEST_F(UnusedParametersTest, ABackwardKnowsWhatItReaches) {
  const BackwardReach reach = ReachFrom(at::mul(parameters_[1], 2));
  EXPECT_EQ(reach.unreached, (std::vector<int>{0, 2}));
  EXPECT_FALSE(reach.limited);
}

TEST_F(UnusedParametersTest, ABackwardWithInputsIsLimited) {
  const at::Tensor output = at::add(parameters_[0], parameters_[1]);
  EXPECT_TRUE(ReachFrom(output, {parameters_[0]}).limited);
}

TEST_F(UnusedParametersTest, WithoutABackwardAllAreUnreached) {
  EXPECT_EQ(ReachOfBackward(accumulators_).unreached, (std::vector<int>{0, 1, 2}));
}

}  // namespace
}  // namespace ddp::internal
