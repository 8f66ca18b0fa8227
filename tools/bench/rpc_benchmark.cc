// Compares a call of a registered function with LibTorch's own call of an operator, in one run.
//
//   bazel run -c opt //tools/bench:rpc_benchmark
//
// Two processes, client and server. Both have an agent of LibTorch as it is, whose call is
// aten::neg of a tensor of 4 bytes, and ddp::rpc, whose call is a function that does the same. The
// two take turns in every round. A figure is the median over the rounds; the ratio is the median of
// the rounds' own ratios.
#include <gflags/gflags.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/clock.h"
#include "ddp/rpc/rpc.h"

DEFINE_int32(rounds, 15, "rounds of each of the two");
DEFINE_int32(calls, 300, "calls of a round");
DEFINE_bool(check, false, "end with 1 when our call takes more than 1.2 times LibTorch's");

namespace ddp {
namespace {

namespace libtorch = torch::distributed::rpc;

constexpr double kLimit = 1.2;
constexpr int kThreads = 4;

std::shared_ptr<libtorch::TensorPipeAgent> StartLibTorch(
    const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  auto agent = std::make_shared<libtorch::TensorPipeAgent>(
      c10::make_intrusive<c10d::PrefixStore>("libtorch/", store), rank == 0 ? "client" : "server",
      static_cast<libtorch::worker_id_t>(rank), 2,
      libtorch::TensorPipeRpcBackendOptions(kThreads, std::nullopt, std::nullopt, 60, ""),
      std::unordered_map<std::string, libtorch::DeviceMap>{}, std::vector<c10::Device>{},
      std::make_unique<libtorch::RequestCallbackNoPython>());
  agent->start();
  return agent;
}

std::unique_ptr<rpc::Workers> StartOurs(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  rpc::Registry registry;
  registry.function("neg", [](const at::Tensor& x) { return at::neg(x); });
  return rpc::init(
      rank == 0 ? "client" : "server", c10::make_intrusive<c10d::PrefixStore>("ours/", store),
      {.rank = rank, .world_size = 2, .registry = std::move(registry), .threads = kThreads});
}

// Returns the microseconds of one call.
double Measure(const std::function<void()>& call) {
  const int64_t start = MonotonicNanoseconds();
  for (int i = 0; i < FLAGS_calls; ++i) call();
  return static_cast<double>(MonotonicNanoseconds() - start) / FLAGS_calls / 1000;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double Compare(libtorch::TensorPipeAgent& agent) {
  const at::Tensor x = at::ones({1});
  const std::shared_ptr<torch::jit::Operator> neg =
      torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString("aten::neg")).front();
  const libtorch::WorkerInfo& server = agent.getWorkerInfo("server");
  const auto theirs = [&] {
    auto message = libtorch::ScriptCall(neg, std::vector<c10::IValue>{x}).toMessage();
    const auto future = agent.send(server, std::move(message));
    future->waitAndThrow();
    const c10::IValue answer =
        libtorch::deserializeRespToIValue(*future->constValue().toCustomClass<libtorch::Message>());
    TORCH_CHECK(answer.toTensor().numel() == 1);
  };
  const auto ours = [&] { TORCH_CHECK(rpc::sync<at::Tensor>("server", "neg", x).numel() == 1); };
  Measure(theirs);  // both connections are open then
  Measure(ours);
  std::vector<double> their_times;
  std::vector<double> our_times;
  std::vector<double> ratios;
  for (int round = 0; round < FLAGS_rounds; ++round) {
    their_times.push_back(Measure(theirs));
    our_times.push_back(Measure(ours));
    ratios.push_back(our_times.back() / their_times.back());
  }
  const double ratio = Median(ratios);
  printf("4-byte call: LibTorch %.1f us, ddp::rpc %.1f us, ratio %.3f (target: at most %.1f)\n",
         Median(their_times), Median(our_times), ratio, kLimit);
  return ratio;
}

int Run(int rank, const std::string& path) {
  const auto store = c10::make_intrusive<c10d::FileStore>(path, 4);
  const std::unique_ptr<rpc::Workers> workers = StartOurs(store, rank);
  const std::shared_ptr<libtorch::TensorPipeAgent> agent = StartLibTorch(store, rank);
  double ratio = 0;
  if (rank == 0) ratio = Compare(*agent);
  workers->barrier();
  agent->join(/*shutdown=*/true);
  agent->shutdown();
  workers->shutdown();
  return FLAGS_check && ratio > kLimit ? 1 : 0;
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("rpc_benchmark." + std::to_string(getpid()));
  const pid_t server = fork();
  if (server == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    return ddp::Run(1, path);
  }
  const int result = ddp::Run(0, path);
  int status = 0;
  waitpid(server, &status, 0);
  std::filesystem::remove(path);
  return result;
}
