// Compares a call of a registered function with LibTorch's own call of an operator, in one run.
//
//   bazel run -c opt //tools/bench:rpc_benchmark
//
// Two processes, client and server. Both have an agent of LibTorch as it is, whose call is
// aten::neg of a tensor of 4 bytes, and ddp::rpc, whose call is a function that does the same. The
// two take turns call by call, so that a slower moment is slower for both. The median call of each
// in a block of calls gives the block's ratio. A figure is the median over the blocks, with its
// spread: the first and the third quartile, the least and the greatest value.
#include <gflags/gflags.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
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

#include "base/clock.h"
#include "ddp/rpc/rpc.h"

DEFINE_int32(blocks, 41, "how many blocks count; one more is not measured");
DEFINE_int32(calls, 200, "calls of each of the two in a block");

namespace ddp {
namespace {

namespace libtorch = torch::distributed::rpc;

constexpr double kTarget = 1.2;
#ifdef NDEBUG
constexpr char kBuild[] = "optimized";
#else
constexpr char kBuild[] = "not optimized: build with -c opt";
#endif
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

// The microseconds of the calls of one block.
struct Block {
  std::vector<double> theirs;
  std::vector<double> ours;
};

double Microseconds(const std::function<void()>& call) {
  const int64_t start = MonotonicNanoseconds();
  call();
  return static_cast<double>(MonotonicNanoseconds() - start) / 1000;
}

// The two take turns, and each is the first of every other pair.
Block MeasureBlock(const std::function<void()>& theirs, const std::function<void()>& ours) {
  Block block;
  for (int i = 0; i < FLAGS_calls; ++i) {
    if (i % 2 == 0) block.theirs.push_back(Microseconds(theirs));
    block.ours.push_back(Microseconds(ours));
    if (i % 2 != 0) block.theirs.push_back(Microseconds(theirs));
  }
  return block;
}

double Quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1) + 0.5)];
}
double Median(std::vector<double> values) { return Quantile(std::move(values), 0.5); }

void Print(const char* what, const char* unit, const std::vector<double>& values) {
  printf("%-10s %8.3f %-3s [%.3f, %.3f], from %.3f to %.3f\n", what, Median(values), unit,
         Quantile(values, 0.25), Quantile(values, 0.75), Quantile(values, 0), Quantile(values, 1));
}

void Compare(libtorch::TensorPipeAgent& agent) {
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
  MeasureBlock(theirs, ours);  // both connections are open then
  std::vector<double> their_times;
  std::vector<double> our_times;
  std::vector<double> ratios;
  for (int i = 0; i < FLAGS_blocks; ++i) {
    const Block block = MeasureBlock(theirs, ours);
    their_times.push_back(Median(block.theirs));
    our_times.push_back(Median(block.ours));
    ratios.push_back(our_times.back() / their_times.back());
  }
  double load = 0;
  getloadavg(&load, 1);
  printf("LibTorch %s, %s; %u CPUs, load average %.1f\n", TORCH_VERSION, kBuild,
         std::thread::hardware_concurrency(), load);
  printf("a call of 4 bytes: median of %d blocks of %d calls [quartiles], and range\n",
         FLAGS_blocks, FLAGS_calls);
  Print("LibTorch", "us", their_times);
  Print("ddp::rpc", "us", our_times);
  Print("ratio", "", ratios);
  printf("target: a ratio of at most %.1f\n", kTarget);
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
  gflags::ParseCommandLineFlags(&argc, &argv, true);
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
