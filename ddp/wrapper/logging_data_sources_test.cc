#include "ddp/wrapper/logging_data_sources.h"

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "ddp/logging_data.h"
#include "ddp/reducer/iteration_timer.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

VariableGetter From(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

TEST(LoggingDataSourcesTest, ReadsTheEnvironmentOfTheBackend) {
  DDPLoggingData gloo;
  gloo.backend_name = "gloo";
  FillEnvironment(gloo, From({{"MASTER_ADDR", "host"},
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
  FillEnvironment(nccl, From({{"NCCL_DEBUG", "INFO"},
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

TEST(LoggingDataSourcesTest, TakesTheTimesOfTheTimer) {
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
  FillTimes(data, timer);
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
}  // namespace ddp::internal
