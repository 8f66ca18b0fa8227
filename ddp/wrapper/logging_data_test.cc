#include "ddp/logging_data.h"

#include <optional>
#include <string>

#include "ddp/wrapper/logging_data_sources.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace ddp {
namespace {

// The keys that PyTorch 2.11 reports for one rank on Gloo without any option.
const char* const kPyTorchKeys[] = {
    "avg_backward_comm_time",
    "avg_backward_compute_comm_overlap_time",
    "avg_backward_compute_time",
    "avg_forward_compute_time",
    "backend_name",
    "backward_comm_time",
    "backward_comm_time_end",
    "backward_comm_time_start",
    "backward_compute_comm_overlap_time",
    "backward_compute_time",
    "backward_compute_time_end",
    "backward_compute_time_start",
    "broadcast_buffers",
    "bucket_cap_bytes",
    "bucket_sizes",
    "cuda_visible_devices",
    "device_ids",
    "dtypes",
    "find_unused_parameters",
    "forward_compute_time",
    "forward_compute_time_start",
    "gloo_device_transport",
    "gloo_num_threads",
    "gloo_socket_ifname",
    "gradient_as_bucket_view",
    "has_rebuilt_buckets",
    "has_sync_bn",
    "is_multi_device_module",
    "iteration",
    "master_addr",
    "master_port",
    "module_name",
    "num_buckets_reduced",
    "num_parameter_tensors",
    "output_device",
    "prev_iteration_grad_ready_order_indices",
    "rank",
    "rebuilt_bucket_sizes",
    "rebuilt_per_bucket_param_indices",
    "torch_distributed_debug",
    "total_parameter_size_bytes",
    "unused_parameter_size",
    "world_size",
};

TEST(DDPLoggingDataTest, HasEveryFieldOfPyTorch) {
  DDPLoggingData data;
  data.backend_name = "gloo";
  data.gloo_num_threads = 2;
  internal::FillEnvironment(data, [](const std::string&) { return std::nullopt; });
  const nlohmann::json json = nlohmann::json::parse(data.to_json());
  for (const char* key : kPyTorchKeys) EXPECT_TRUE(json.contains(key)) << key;
  for (const char* key : {"static_graph", "join_uneven_inputs", "overlap_ratio"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  for (const char* key : {"error", "has_error", "comm_hook", "nccl_debug"}) {
    EXPECT_FALSE(json.contains(key)) << key;
  }
}

TEST(DDPLoggingDataTest, WritesFlagsAsNumbersAndKeysInOrder) {
  DDPLoggingData data;
  data.broadcast_buffers = true;
  data.can_set_static_graph = false;
  data.comm_hook = "fp16_compress_hook";
  data.error = "rank 1: bad \xff byte\nsecond line";
  const std::string text = data.to_json();
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_LT(text.find("avg_backward_comm_time"), text.find("world_size"));
  const nlohmann::json json = nlohmann::json::parse(text);
  EXPECT_EQ(json["broadcast_buffers"], 1);
  EXPECT_EQ(json["has_rebuilt_buckets"], 0);
  EXPECT_EQ(json["can_set_static_graph"], 0);
  EXPECT_EQ(json["has_error"], 1);
  EXPECT_EQ(json["comm_hook"], "fp16_compress_hook");
  EXPECT_EQ(json["error"].get<std::string>().substr(0, 11), "rank 1: bad");
}

}  // namespace
}  // namespace ddp
