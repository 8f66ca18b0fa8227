// A call of a registered function beside LibTorch's own call of an operator.
//
//   bazel run --config=opt //tools/bench:rpc_benchmark -- --benchmark_repetitions=41
//       --benchmark_enable_random_interleaving --benchmark_report_aggregates_only
//
// Two processes, client and server. Both have an agent of LibTorch as it is, whose call is
// aten::neg of a tensor of 4 bytes, and ddp::rpc, whose call is a function that does the same. The
// repetitions of the two take turns at random, so that a slower moment is slower for both. The
// target is at most 1.2 of LibTorch's median.
#include <benchmark/benchmark.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "ddp/rpc/rpc.h"

namespace ddp {
namespace {

namespace libtorch = torch::distributed::rpc;

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

void Compare(libtorch::TensorPipeAgent& agent) {
  const at::Tensor x = at::ones({1});
  const std::shared_ptr<torch::jit::Operator> neg =
      torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString("aten::neg")).front();
  const libtorch::WorkerInfo& server = agent.getWorkerInfo("server");
  const auto add = [](const char* name, const auto& call) {
    call();  // the connection is open then
    benchmark::RegisterBenchmark(name,
                                 [call](benchmark::State& state) {
                                   for (auto _ : state) call();
                                 })
        ->UseRealTime()
        ->Unit(benchmark::kMicrosecond);
  };
  add("LibTorch", [&] {
    auto message = libtorch::ScriptCall(neg, std::vector<c10::IValue>{x}).toMessage();
    const auto future = agent.send(server, std::move(message));
    future->waitAndThrow();
    const c10::IValue answer =
        libtorch::deserializeRespToIValue(*future->constValue().toCustomClass<libtorch::Message>());
    TORCH_CHECK(answer.toTensor().numel() == 1);
  });
  add("ddp::rpc", [&] { TORCH_CHECK(rpc::sync<at::Tensor>("server", "neg", x).numel() == 1); });
  benchmark::AddCustomContext("LibTorch", TORCH_VERSION);
  benchmark::RunSpecifiedBenchmarks();
}

void Run(int rank, const std::string& path) {
  const auto store = c10::make_intrusive<c10d::FileStore>(path, 4);
  const std::unique_ptr<rpc::Workers> workers = StartOurs(store, rank);
  const std::shared_ptr<libtorch::TensorPipeAgent> agent = StartLibTorch(store, rank);
  if (rank == 0) Compare(*agent);
  workers->barrier();
  agent->join(/*shutdown=*/true);
  agent->shutdown();
  workers->shutdown();
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("rpc_benchmark." + std::to_string(getpid()));
  const pid_t server = fork();
  if (server == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    ddp::Run(1, path);
    return 0;
  }
  ddp::Run(0, path);
  int status = 0;
  waitpid(server, &status, 0);
  std::filesystem::remove(path);
  return status == 0 ? 0 : 1;
}
