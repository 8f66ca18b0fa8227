#include "ddp/model/model_tensors.h"

#include <set>
#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/TensorImpl.h>

#include "ddp/common/error.h"
#include "ddp/model/model_metadata.h"
#include "ddp/model/wrapped_parameters.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"
#include "testing/fake_model_view.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeModelView;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

at::Tensor Trainable() { return at::zeros({2, 3}).requires_grad_(); }

std::vector<std::string> NamesOf(const std::vector<NamedTensor>& items) {
  std::vector<std::string> names;
  for (const NamedTensor& item : items) names.push_back(item.name);
  return names;
}

std::vector<std::string> NamesOf(const std::vector<TrainableParameter>& items) {
  std::vector<std::string> names;
  for (const TrainableParameter& item : items) {
    names.push_back(item.name + (item.sparse ? " (sparse)" : ""));
  }
  return names;
}

template <typename Action>
std::string ErrorOf(const Action& action) {
  try {
    action();
  } catch (const ConfigurationError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(ModelTensorsTest, HoldsWhatIsDefinedAndNotIgnored) {
  FakeModelView model;
  model.named_parameters = {{"a", Trainable()}, {"none", {}}, {"b", Trainable()}};
  model.named_buffers = {{"c", at::zeros({1})}, {"d", at::zeros({1})}};
  const ModelTensors tensors = ModelTensors::Of(model, {"b", "c", "none"});
  EXPECT_THAT(NamesOf(tensors.parameters), ElementsAre("a"));
  EXPECT_THAT(NamesOf(tensors.buffers), ElementsAre("d"));
  EXPECT_THAT(NamesOf(tensors.trainable), ElementsAre("a"));
  EXPECT_TRUE(tensors.parameters[0].tensor.is_same(model.named_parameters[0].tensor));
}

TEST(ModelTensorsTest, AnIgnoredNameThatTheModelLacksIsAnError) {
  FakeModelView model;
  model.named_parameters = {{"a", Trainable()}};
  EXPECT_THAT(ErrorOf([&] {
                ModelTensors::Of(model, {"a", "layer.b"});
              }),
              HasSubstr("params_and_buffers_to_ignore names layer.b"));
}

TEST(ModelTensorsTest, ASharedParameterIsTrainedOnceUnderItsFirstName) {
  FakeModelView model;
  const at::Tensor shared = Trainable();
  model.named_parameters = {
      {"first", shared}, {"frozen", at::zeros({2})}, {"second", shared}, {"words", Trainable()}};
  model.sparse = {model.named_parameters[3].tensor.unsafeGetTensorImpl()};
  const ModelTensors tensors = ModelTensors::Of(model, {});
  EXPECT_THAT(NamesOf(tensors.parameters), ElementsAre("first", "frozen", "second", "words"));
  EXPECT_THAT(NamesOf(tensors.trainable), ElementsAre("first", "words (sparse)"));
  // Its first name ignored, the second one counts.
  EXPECT_THAT(NamesOf(ModelTensors::Of(model, {"first"}).trainable),
              ElementsAre("second", "words (sparse)"));
}

TEST(ModelTensorsTest, DescribesAllThatDecidesTheBuckets) {
  const auto described = [](const FakeModelView& model) {
    ModelMetadata metadata;
    ModelTensors::Of(model, {}).Describe(metadata);
    return metadata.Serialize();
  };
  FakeModelView model;
  model.named_parameters = {{"a", Trainable()}, {"b", Trainable()}};
  model.named_buffers = {{"c", at::zeros({4})}};
  const std::string plain = described(model);
  EXPECT_THAT(plain, AllOf(HasSubstr("a"), HasSubstr("[2, 3]"), HasSubstr("c"), HasSubstr("[4]")));

  FakeModelView sparse = model;
  sparse.sparse = {model.named_parameters[0].tensor.unsafeGetTensorImpl()};
  EXPECT_THAT(ModelMetadata::FirstDifference(plain, 0, described(sparse), 1),
              HasSubstr("(sparse gradient)"));
  FakeModelView shared = model;
  shared.named_parameters[1].tensor = model.named_parameters[0].tensor;
  EXPECT_THAT(ModelMetadata::FirstDifference(plain, 0, described(shared), 1),
              HasSubstr("(shared)"));
  FakeModelView frozen = model;
  frozen.named_parameters[0].tensor = at::zeros({2, 3});
  EXPECT_THAT(ModelMetadata::FirstDifference(plain, 0, described(frozen), 1), HasSubstr("a "));
}

// A tensor on a GPU, without memory: the test needs no GPU.
at::Tensor On(int8_t gpu) {
  return at::Tensor(c10::make_intrusive<c10::TensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::CUDA), caffe2::TypeMeta::Make<float>(),
      at::Device(at::kCUDA, gpu)));
}

TEST(ModelTensorsTest, RefusesDevicesThatAreNotTheGroups) {
  const auto error_of = [](std::vector<NamedTensor> parameters, at::Device device) {
    ModelTensors tensors;
    tensors.parameters = std::move(parameters);
    return ErrorOf([&] { tensors.CheckDevices(device, "nccl"); });
  };
  // Each GPU of a module would have an autograd thread of its own.
  const at::Device gpu(at::kCUDA, 0);
  EXPECT_THAT(
      error_of({{"first.weight", On(0)}, {"last.weight", On(1)}}, gpu),
      AllOf(HasSubstr("on several devices: first.weight is on cuda:0, last.weight on cuda:1"),
            HasSubstr("one process for each GPU")));
  EXPECT_EQ(error_of({{"first.weight", On(0)}, {"last.weight", On(0)}}, gpu), "no error");
  EXPECT_EQ(error_of({{"first.weight", On(1)}}, at::kCUDA), "no error");  // any of them
  EXPECT_THAT(error_of({{"first.weight", On(1)}, {"last.weight", On(1)}}, gpu),
              HasSubstr("first.weight is on cuda:1, but the process group (nccl) works on cuda:0"));
  EXPECT_THAT(error_of({{"a", at::zeros({1})}, {"b", On(0)}}, at::kCPU),
              HasSubstr("on several types of devices: a is on cpu, b on cuda:0"));
  EXPECT_THAT(error_of({{"a", at::zeros({1})}}, gpu),
              HasSubstr("parameter a is on cpu, but the process group (nccl) works on cuda:0"));
}

TEST(ModelTensorsTest, RefusesTensorsThatAreNotDense) {
  ModelTensors tensors;
  tensors.buffers = {{"dense", at::zeros({1})}, {"table", at::zeros({2, 2}).to_sparse()}};
  EXPECT_THAT(ErrorOf([&] { tensors.CheckDevices(at::kCPU, "gloo"); }),
              HasSubstr("buffer table is Sparse"));
  tensors.buffers[1].tensor = at::quantize_per_tensor(at::zeros({2}), 1., 0, at::kQInt8);
  EXPECT_THAT(ErrorOf([&] { tensors.CheckDevices(at::kCPU, "gloo"); }),
              HasSubstr("buffer table is quantized"));
}

// ---- wrapped_parameters.h, beside the tensors that it compares.

// A model with a trainable and two frozen parameters, one of them ignored.
class WrappedParametersTest : public ::testing::Test {
 protected:
  WrappedParametersTest() {
    model_.named_parameters = {{"weight", weight_}, {"bias", bias_}, {"other", other_}};
  }

  WrappedParameters Wrap() const { return WrappedParameters(ModelTensors::Of(model_, ignored_)); }

  std::string Frozen(const WrappedParameters& wrapped) const {
    return ddp::testing::ErrorOf<ConfigurationError>([&] { wrapped.CheckFrozen(); });
  }
  std::string All(const WrappedParameters& wrapped) const {
    return ddp::testing::ErrorOf<ConfigurationError>([&] { wrapped.CheckAll(model_, ignored_); });
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
