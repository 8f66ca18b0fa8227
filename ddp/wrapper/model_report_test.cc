#include "ddp/wrapper/model_report.h"

#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Logging.h>

#include "ddp/reducer/reducer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/groups.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::GroupOfOne;
using ::ddp::testing::ModelGroupOf;

// A reducer over one rank, with four parameters in buckets of at most 1,024 bytes.
class ModelReportTest : public ::testing::Test {
 protected:
  static Reducer::Parameter Parameter(const std::string& name, int64_t count, at::ScalarType type,
                                      bool sparse = false) {
    return {.name = name, .tensor = at::ones({count}, type).requires_grad_(), .sparse = sparse};
  }

  const std::vector<Reducer::Parameter> parameters_ = {
      Parameter("first.weight", 128, at::kFloat), Parameter("first.bias", 64, at::kFloat),
      Parameter("embedding", 8, at::kFloat, /*sparse=*/true),
      Parameter("last.weight", 32, at::kDouble)};
  Reducer reducer_{parameters_,
                   ModelGroupOf(GroupOfOne()),
                   {.initial_limits_bytes = {1024}, .rebuild_limits_bytes = {1024}}};
};

TEST_F(ModelReportTest, TheTableHasALineForEachBucket) {
  EXPECT_EQ(BucketTable(reducer_),
            "4 parameters, 1.0 KiB of gradients in 3 buckets (as first dealt)\n"
            "reduction: flat buckets\n"
            "bucket  parameters        KiB  type           names\n"
            "     0           1        0.2  Double         last.weight\n"
            "     1           1        0.0  Float (sparse) embedding\n"
            "     2           2        0.8  Float          first.weight, first.bias\n");
  EXPECT_EQ(BucketSizes(reducer_), "256, 32, 768");
}

TEST_F(ModelReportTest, LoggingDataOfAReducerWithoutAPass) {
  DDPLoggingData data;
  DescribeParameters(reducer_, data);
  EXPECT_EQ(data.dtypes, "double, float");
  EXPECT_EQ(data.num_parameter_tensors, 4);
  EXPECT_EQ(data.total_parameter_size_bytes, 256 + 32 + 768);
  EXPECT_FALSE(data.is_multi_device_module || data.has_rebuilt_buckets);
  EXPECT_EQ(data.comm_hook, std::nullopt);
  EXPECT_EQ(data.can_set_static_graph, std::nullopt);
  EXPECT_EQ(data.rebuilt_bucket_sizes, "");
  reducer_.RegisterHook("mine", {.first = [](GradBucket&) { return TensorFuture(); }});
  DescribeParameters(reducer_, data);
  EXPECT_EQ(data.comm_hook, "mine");
}

TEST_F(ModelReportTest, LoggingDataOfRebuiltBuckets) {
  Reducer dense({parameters_[0], parameters_[1], parameters_[3]}, ModelGroupOf(GroupOfOne()),
                {.initial_limits_bytes = {1024}, .rebuild_limits_bytes = {64}});
  dense.BeginForward();
  at::Tensor loss = parameters_[0].tensor.sum();
  loss = loss + parameters_[1].tensor.sum();
  loss = loss + parameters_[3].tensor.sum();
  dense.EndForward({loss}, {});
  loss.backward();
  DDPLoggingData data;
  DescribeParameters(dense, data);
  EXPECT_TRUE(data.has_rebuilt_buckets);
  EXPECT_EQ(data.num_buckets_reduced, 2);
  EXPECT_EQ(data.unused_parameter_size, 0);
  // Each parameter exceeds the limit. The gradients come in the reverse order of the use.
  EXPECT_EQ(data.prev_iteration_grad_ready_order_indices, "2, 1, 0");
  EXPECT_EQ(data.rebuilt_per_bucket_param_indices, "2, 1, 0");
  EXPECT_EQ(data.rebuilt_bucket_sizes, "256, 256, 512");
}

TEST(ReportUsageTest, TextsAndWholeNumbersGoToTheProgramsLogger) {
  std::vector<c10::DDPLoggingData> reported;
  c10::SetPyTorchDDPUsageLogger(
      [&reported](const c10::DDPLoggingData& usage) { reported.push_back(usage); });
  DDPLoggingData data;
  data.module_name = "Net";
  data.world_size = 4;
  data.static_graph = true;
  data.overlap_ratio = 0.5;
  ReportUsage(data);
  c10::SetPyTorchDDPUsageLogger([](const c10::DDPLoggingData&) {});
  ASSERT_EQ(reported.size(), 1u);
  EXPECT_EQ(reported[0].strs_map.at("module_name"), "Net");
  EXPECT_EQ(reported[0].ints_map.at("world_size"), 4);
  EXPECT_EQ(reported[0].ints_map.at("static_graph"), 1);
  EXPECT_EQ(reported[0].ints_map.count("overlap_ratio"), 0u);
  EXPECT_EQ(reported[0].strs_map.count("overlap_ratio"), 0u);
}

}  // namespace
}  // namespace ddp::internal
