#include "ddp/model/wrapped_parameters.h"

#include <set>
#include <string>

#include <ATen/Functions.h>

#include "ddp/common/error.h"
#include "ddp/model/model_tensors.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"
#include "testing/fake_model_view.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::FakeModelView;

// A model with a trainable and two frozen parameters, one of them ignored.
class WrappedParametersTest : public ::testing::Test {
 protected:
  WrappedParametersTest() {
    model_.named_parameters = {{"weight", weight_}, {"bias", bias_}, {"other", other_}};
  }

  WrappedParameters Wrap() const { return WrappedParameters(ModelTensors::Of(model_, ignored_)); }

  std::string Frozen(const WrappedParameters& wrapped) const {
    return ErrorOf<ConfigurationError>([&] { wrapped.CheckFrozen(); });
  }
  std::string All(const WrappedParameters& wrapped) const {
    return ErrorOf<ConfigurationError>([&] { wrapped.CheckAll(model_, ignored_); });
  }

  const at::Tensor weight_ = at::ones({2}).requires_grad_();
  const at::Tensor bias_ = at::ones({2});
  const at::Tensor other_ = at::ones({2});
  const std::set<std::string> ignored_ = {"other"};
  FakeModelView model_;
};

TEST_F(WrappedParametersTest, AnUnchangedModelPasses) {
  const WrappedParameters wrapped = Wrap();
  EXPECT_EQ(Frozen(wrapped), "no error");
  EXPECT_EQ(All(wrapped), "no error");
}

TEST_F(WrappedParametersTest, AnUnfrozenParameterIsNamed) {
  const WrappedParameters wrapped = Wrap();
  bias_.set_requires_grad(true);
  EXPECT_EQ(Frozen(wrapped),
            "bias requires a gradient now and did not when it was wrapped: construct a new "
            "DistributedDataParallel");
  bias_.set_requires_grad(false);
  EXPECT_EQ(Frozen(wrapped), "no error");
}

TEST_F(WrappedParametersTest, AnIgnoredParameterMayChange) {
  const WrappedParameters wrapped = Wrap();
  other_.set_requires_grad(true);
  EXPECT_EQ(Frozen(wrapped), "no error");
  EXPECT_EQ(All(wrapped), "no error");
}

TEST_F(WrappedParametersTest, ATrainableParameterMayBeFrozenAndUnfrozen) {
  const WrappedParameters wrapped = Wrap();
  for (const bool trainable : {false, true}) {
    weight_.set_requires_grad(trainable);
    EXPECT_EQ(Frozen(wrapped), "no error");
    EXPECT_EQ(All(wrapped), "no error");
  }
}

TEST_F(WrappedParametersTest, ANewParameterIsNamed) {
  const WrappedParameters wrapped = Wrap();
  model_.named_parameters.push_back({"again", weight_});  // another name of a known tensor
  model_.named_parameters.push_back({"frozen", at::ones({2})});
  model_.named_parameters.push_back({"undefined", at::Tensor()});
  EXPECT_EQ(All(wrapped), "no error");
  model_.named_parameters.push_back({"extra", at::ones({2}).requires_grad_()});
  EXPECT_EQ(Frozen(wrapped), "no error");
  EXPECT_EQ(All(wrapped),
            "extra requires a gradient and was not there when the model was wrapped: construct a "
            "new DistributedDataParallel");
}

}  // namespace
}  // namespace ddp::internal
