#include "ddp/logging_data.h"

#include <map>
#include <string>

#include "ddp/logging_data_sources.h"
#include "ddp/reducer/iteration_timer.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace ddp {
namespace {

using internal::IterationTimer;

internal::VariableGetter From(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

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
  internal::FillEnvironment(data, From({}));
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

TEST(DDPLoggingDataTest, ReadsTheEnvironmentOfTheBackend) {
  DDPLoggingData gloo;
  gloo.backend_name = "gloo";
  internal::FillEnvironment(gloo, From({{"MASTER_ADDR", "host"},
                                        {"MASTER_PORT", "29500"},
                                        {"GLOO_SOCKET_IFNAME", "eth0"},
                                        {"NCCL_DEBUG", "INFO"}}));
  EXPECT_EQ(gloo.master_addr, "host");
  EXPECT_EQ(gloo.master_port, "29500");
  EXPECT_EQ(gloo.torch_distributed_debug, "N/A");
  EXPECT_EQ(gloo.cuda_visible_devices, "N/A");
  EXPECT_EQ(gloo.gloo_socket_ifname, "eth0");
  EXPECT_EQ(gloo.gloo_device_transport, "N/A");
  EXPECT_EQ(gloo.nccl_debug, std::nullopt);

  DDPLoggingData nccl;
  nccl.backend_name = "nccl";
  internal::FillEnvironment(nccl, From({{"NCCL_DEBUG", "INFO"},
                                        {"NCCL_SOCKET_IFNAME", "ib0"},
                                        {"NCCL_BLOCKING_WAIT", "0"},
                                        {"TORCH_NCCL_BLOCKING_WAIT", "1"},
                                        {"NCCL_ASYNC_ERROR_HANDLING", "3"},
                                        {"CUDA_VISIBLE_DEVICES", "2"},
                                        {"TORCH_DISTRIBUTED_DEBUG", "DETAIL"}}));
  EXPECT_EQ(nccl.nccl_debug, "INFO");
  EXPECT_EQ(nccl.nccl_socket_ifname, "ib0");
  EXPECT_EQ(nccl.nccl_blocking_wait, "1");
  EXPECT_EQ(nccl.nccl_async_error_handling, "3");
  EXPECT_EQ(nccl.nccl_nthreads, "N/A");
  EXPECT_EQ(nccl.nccl_ib_timeout, "N/A");
  EXPECT_EQ(nccl.cuda_visible_devices, "2");
  EXPECT_EQ(nccl.torch_distributed_debug, "DETAIL");
  EXPECT_EQ(nccl.gloo_socket_ifname, std::nullopt);
}

TEST(DDPLoggingDataTest, TakesTheTimesOfTheTimer) {
  IterationTimer timer;
  for (int64_t iteration : {1, 2}) {
    const int64_t start = 1000 * iteration;
    timer.StartIteration(iteration, start);
    timer.StartBackward(start + 10 * iteration);
    timer.StartCommunication(start + 50);
    timer.EndCompute(start + 80);
    timer.EndCommunication(start + 90);
  }
  DDPLoggingData data;
  internal::FillTimes(data, timer);
  EXPECT_EQ(data.forward_compute_time, 20);
  EXPECT_EQ(data.avg_forward_compute_time, 15);
  EXPECT_EQ(data.backward_compute_time, 60);
  EXPECT_EQ(data.avg_backward_compute_time, 65);
  EXPECT_EQ(data.backward_comm_time, 40);
  EXPECT_EQ(data.avg_backward_comm_time, 40);
  EXPECT_EQ(data.backward_compute_comm_overlap_time, 30);
  EXPECT_EQ(data.avg_backward_compute_comm_overlap_time, 30);
  EXPECT_EQ(data.forward_compute_time_start, 2000);
  EXPECT_EQ(data.backward_compute_time_start, 2020);
  EXPECT_EQ(data.backward_comm_time_start, 2050);
  EXPECT_EQ(data.backward_compute_time_end, 2080);
  EXPECT_EQ(data.backward_comm_time_end, 2090);
  EXPECT_DOUBLE_EQ(data.overlap_ratio, 0.75);
}

}  // namespace
}  // namespace ddp
