#include "ddp/wrapper/model_setup.h"

#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>

#include "ddp/common/error.h"
#include "ddp/device_mesh.h"
#include "ddp/mixed_precision.h"
#include "ddp/model/model_metadata.h"
#include "ddp/model/model_tensors.h"
#include "ddp/options.h"
#include "ddp/process_group.h"
#include "ddp/reducer/reducer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/groups.h"
#include "testing/error_of.h"
#include "testing/fake_model_view.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::FakeModelView;
using ::ddp::testing::GroupOfOne;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Options = DistributedDataParallelOptions;

at::Tensor Trainable(int64_t count, at::ScalarType type = at::kFloat) {
  return at::ones({count}, type).requires_grad_();
}

// Two trainable parameters of one type, one of another type, and a frozen one.
class ModelSetupTest : public ::testing::Test {
 protected:
  ModelSetupTest() {
    view_.named_parameters = {{.name = "first", .tensor = Trainable(4)},
                              {.name = "second", .tensor = Trainable(2)},
                              {.name = "wide", .tensor = Trainable(2, at::kDouble)},
                              {.name = "frozen", .tensor = at::ones({3})}};
  }

  ModelTensors Tensors() const { return ModelTensors::Of(view_, {}); }

  std::vector<std::string> ReducedNames(const Options& options) const {
    std::vector<std::string> names;
    for (const auto& item : ReducedParameters(options, Tensors())) names.push_back(item.name);
    return names;
  }

  FakeModelView view_;
};

TEST_F(ModelSetupTest, TheGroupIsTheOptionsOrTheMeshs) {
  const auto group = GroupOfOne();
  const auto other = GroupOfOne();
  EXPECT_EQ(WithGroup({}, group).process_group, group);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { WithGroup({.process_group = other}, group); }),
              HasSubstr("two different ones"));
  EXPECT_EQ(GroupOf({}), nullptr);
  EXPECT_EQ(GroupOf({.process_group = group}), group);
  const DeviceMesh line = init_device_mesh(group, "cpu", {1});
  EXPECT_EQ(GroupOf({.device_mesh = line}), line.get_group(0));
  EXPECT_THAT(
      ErrorOf<ConfigurationError>([&] { GroupOf({.process_group = group, .device_mesh = line}); }),
      HasSubstr("both set"));
  const DeviceMesh square = init_device_mesh(group, "cpu", {1, 1}, {"replicate", "shard"});
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { GroupOf({.device_mesh = square}); }),
              HasSubstr("device_mesh has 2 dimensions"));
}

TEST_F(ModelSetupTest, OptionsThatContradictEachOtherAreRefused) {
  const auto refusal = [](const Options& options) {
    return ErrorOf<ConfigurationError>([&] { CheckOptions(options); });
  };
  EXPECT_EQ(refusal({}), "no error");
  EXPECT_EQ(refusal({.find_unused_parameters = true, .static_graph = true}), "no error");
  EXPECT_THAT(refusal({.first_bucket_cap_mb = 1, .bucket_cap_mb_list = {1}}),
              HasSubstr("set it alone"));
  EXPECT_EQ(refusal({.arena_bytes = 1}), "no error");
  EXPECT_THAT(refusal({.arena_bytes = 0}), HasSubstr("set it to 1 or more"));
  EXPECT_THAT(refusal({.delay_all_reduce_named_params = {{"first", Trainable(1)}}}),
              HasSubstr("set both"));
  EXPECT_THAT(refusal({.mixed_precision = MixedPrecision{.param_dtype = at::kInt}}),
              HasSubstr("param_dtype=Int must be a floating-point type"));
}

TEST_F(ModelSetupTest, AModelWithoutTrainableParametersIsRefused) {
  const auto group = GroupOfOne();
  CheckPlacement({}, Tensors(), *group);
  EXPECT_THAT(
      ErrorOf<ConfigurationError>([&] { CheckPlacement({.device_ids = {0}}, Tensors(), *group); }),
      HasSubstr("device_ids={0}, but parameter first is on cpu"));
  view_.named_parameters = {{.name = "frozen", .tensor = at::ones({3})}};
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { CheckPlacement({}, Tensors(), *group); }),
              HasSubstr("nothing to average"));
}

TEST_F(ModelSetupTest, TheReducerGetsAllButDelayedAndFrozenParameters) {
  EXPECT_THAT(ReducedNames({}), ElementsAre("first", "second", "wide"));
  const at::Tensor& second = view_.named_parameters[1].tensor;
  EXPECT_THAT(ReducedNames({.delay_all_reduce_named_params = {{"second", second}}}),
              ElementsAre("first", "wide"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                ReducedNames({.delay_all_reduce_named_params = {{"a", second}, {"b", second}}});
              }),
              HasSubstr("b is no parameter of the model that requires a gradient, or is there"));
}

TEST_F(ModelSetupTest, AGivenLayoutHasToFitTheParameters) {
  const std::vector<Reducer::Parameter> reduced = ReducedParameters({}, Tensors());
  EXPECT_FALSE(GivenPlan({}, reduced).has_value());
  const std::vector<std::vector<std::string>> layout = {{"wide"}, {"second", "first"}};
  EXPECT_EQ(GivenPlan(layout, reduced)->Names({"first", "second", "wide"}), layout);
  EXPECT_EQ(
      ReducerOptionsOf({.bucket_layout = layout}, reduced).plan->Names({"first", "second", "wide"}),
      layout);
  for (const std::vector<std::vector<std::string>>& wrong :
       {std::vector<std::vector<std::string>>{{"wide", "first"}, {"second"}},  // two types
        std::vector<std::vector<std::string>>{{"wide"}, {"first"}},            // one is missing
        std::vector<std::vector<std::string>>{{"wide"}, {"first"}, {"third"}}}) {
    EXPECT_THAT(ErrorOf<ConfigurationError>([&] { GivenPlan(wrong, reduced); }),
                HasSubstr("bucket_layout does not fit the model: "));
  }
}

TEST_F(ModelSetupTest, TheMetadataDifferWithAnOptionATensorOrAHook) {
  const auto difference = [](const ModelMetadata& a, const ModelMetadata& b) {
    return ModelMetadata::FirstDifference(a.Serialize(), 0, b.Serialize(), 1);
  };
  const ModelMetadata usual = MetadataOf({}, Tensors());
  EXPECT_EQ(difference(usual, MetadataOf({}, Tensors())), "");
  EXPECT_THAT(difference(usual, MetadataOf({.static_graph = true}, Tensors())),
              HasSubstr("option static_graph is 0 on rank 0 and 1 on rank 1"));
  view_.named_parameters[1].tensor = Trainable(7);
  EXPECT_THAT(difference(usual, MetadataOf({}, Tensors())), HasSubstr("second"));

  const ModelMetadata none = HookMetadataOf("", 1, "none");
  EXPECT_EQ(difference(none, HookMetadataOf("", 1, "none")), "");
  EXPECT_THAT(difference(none, HookMetadataOf("powerSGD", 2, "none")),
              HasSubstr("\"powerSGD\" of 2 rounds on rank 1"));
  EXPECT_THAT(difference(none, HookMetadataOf("", 1, "after the forward")),
              HasSubstr("buffer_comm_hook"));
}

}  // namespace
}  // namespace ddp::internal
