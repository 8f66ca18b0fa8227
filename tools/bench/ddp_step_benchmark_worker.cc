// A rank of ddp_step_benchmark.py on our side: does training steps of one model on request.
// ddp_step_benchmark_torch.py is the same on PyTorch's side, line by line.
//
// The ranks find each other by the environment, as under torchrun. Requests come on stdin, one a
// line:
//
//   steps MODE COUNT     answered by {"starts_ns": [...], "ends_ns": [...], "minor_faults": n,
//                        "gradient_sum": x}; the first request of a mode also makes its model
//
// MODE is plain (no DDP), default, or some of view, static, find_unused, noop, joined by "+".
//
// For zero_step_benchmark.py, which PyTorch's side has not: the word adamw adds the step of an
// AdamW, or of one over shards with zero_even, zero_whole, zero_scatter or zero_overlap.
// "gradient_sum" is then the sum of the parameters.

#include <fcntl.h>
#include <gflags/gflags.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/version.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "ddp/common/logging.h"
#include "ddp/ddp.h"
#include "ddp/default_hooks.h"
#include "ddp/optim/zero_redundancy_optimizer.h"

DEFINE_int32(layers, 2, "of the model");
DEFINE_int32(width, 16, "of a layer");
DEFINE_int32(batch, 32, "rows of an input");
DEFINE_string(barrier, "", "a file of 64 zero bytes per rank, for this run alone");

namespace ddp {
namespace {

// A barrier of all ranks in a file, without a library that may be measured. Yields the core while
// it waits, since threads of a backend share the core.
class Barrier {
 public:
  Barrier(const std::string& path, int rank, int size) : rank_(rank), size_(size) {
    const UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
    CHECK(fd.valid()) << "--barrier=" << path << " cannot be opened";
    void* const memory = mmap(nullptr, size * kStride * sizeof(uint64_t), PROT_READ | PROT_WRITE,
                              MAP_SHARED, fd.get(), 0);
    CHECK(memory != MAP_FAILED) << "--barrier=" << path << " cannot be mapped";
    counts_ = static_cast<uint64_t*>(memory);
  }
  void Wait() {
    ++round_;
    Count(rank_).store(round_);
    for (int rank = 0; rank < size_; ++rank) {
      while (Count(rank).load() < round_) sched_yield();
    }
  }

 private:
  static constexpr int kStride = 8;
  std::atomic_ref<uint64_t> Count(int rank) {
    return std::atomic_ref<uint64_t>(counts_[rank * kStride]);
  }
  const int rank_;
  const int size_;
  uint64_t* counts_ = nullptr;
  uint64_t round_ = 0;
};

// Linear layers one after the other. Their weights are the identity, so that no number becomes too
// large or denormal at any depth.
struct ChainImpl : torch::nn::Module {
  ChainImpl(int layers, int width) {
    for (int i = 0; i < layers; ++i) {
      torch::nn::Linear layer(width, width);
      torch::nn::init::eye_(layer->weight);
      torch::nn::init::zeros_(layer->bias);
      layers_.push_back(register_module(absl::StrCat("layer", i), layer));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (torch::nn::Linear& layer : layers_) x = layer->forward(x);
    return x;
  }
  std::vector<torch::nn::Linear> layers_;
};
TORCH_MODULE(Chain);

struct Subject {
  Chain chain{nullptr};
  std::unique_ptr<DistributedDataParallel<ChainImpl>> wrapped;
  std::function<torch::Tensor(const torch::Tensor&)> forward;
  std::unique_ptr<torch::optim::Optimizer> optimizer;  // null: none

  // Blocks until the parameters have the values of the last step.
  void Finish() const {
    if (auto* zero = dynamic_cast<ZeroRedundancyOptimizerBase*>(optimizer.get())) zero->wait();
  }
};

// Returns null when `word` names no optimizer.
std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(
    const std::string& word, const DistributedDataParallel<ChainImpl>& model) {
  using Shard = ZeroRedundancyOptions::Shard;
  const torch::optim::AdamWOptions options(1e-4);
  if (word == "adamw") return std::make_unique<torch::optim::AdamW>(model.parameters(), options);
  ZeroRedundancyOptions zero{.scatter_gradients = word == "zero_scatter",
                             .overlap_with_forward = word == "zero_overlap"};
  if (word == "zero_whole") zero.shard = Shard::kWhole;
  if (!word.starts_with("zero_")) return nullptr;
  return std::make_unique<ZeroRedundancyOptimizer<torch::optim::AdamW>>(model, options, zero);
}

Subject MakeSubject(const std::string& mode, const std::shared_ptr<ProcessGroup>& group) {
  Subject subject;
  subject.chain = Chain(FLAGS_layers, FLAGS_width);
  if (mode == "plain") {
    subject.forward = [chain = subject.chain](const torch::Tensor& x) mutable {
      return chain->forward(x);
    };
    return subject;
  }
  DistributedDataParallelOptions options;
  bool noop = false;
  const std::vector<std::string> words = absl::StrSplit(mode, '+');
  for (const std::string& word : words) {
    if (word == "view") {
      options.gradient_as_bucket_view = true;
    } else if (word == "static") {
      options.static_graph = true;
    } else if (word == "find_unused") {
      options.find_unused_parameters = true;
    } else if (word == "noop") {
      noop = true;
    } else {
      CHECK(word == "default" || word == "adamw" || word.starts_with("zero_"))
          << "no mode " << mode;
    }
  }
  subject.wrapped =
      std::make_unique<DistributedDataParallel<ChainImpl>>(subject.chain.ptr(), group, options);
  if (noop) {
    subject.wrapped->register_comm_hook(
        0, [](int, GradBucket& bucket) { return noop_hook(bucket); }, "noop");
  }
  subject.optimizer = MakeOptimizer(words.back(), *subject.wrapped);
  subject.forward = [model = subject.wrapped.get()](const torch::Tensor& x) {
    return model->forward(x);
  };
  return subject;
}

int64_t MinorFaults() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

double SumOf(const Subject& subject) {
  subject.Finish();
  double sum = 0;
  for (const torch::Tensor& parameter : subject.chain->parameters()) {
    const torch::Tensor& summed = subject.optimizer ? parameter : parameter.grad();
    sum += summed.to(torch::kDouble).sum().item<double>();
  }
  return sum;
}

// Removes the gradients before the clock starts. Every rank measures from the barrier to its own
// end; the slowest rank's time is the step's.
std::string Steps(Subject& subject, const torch::Tensor& input, int count, Barrier& barrier) {
  std::vector<int64_t> starts, ends;
  int64_t faults = 0;
  for (int i = 0; i < count; ++i) {
    for (torch::Tensor& parameter : subject.chain->parameters()) parameter.mutable_grad().reset();
    barrier.Wait();
    const int64_t faults_before = MinorFaults();
    starts.push_back(MonotonicNanoseconds());
    subject.forward(input).pow(2).mean().backward();
    if (subject.optimizer) subject.optimizer->step();
    ends.push_back(MonotonicNanoseconds());
    faults += MinorFaults() - faults_before;
  }
  char gradient_sum[40];
  snprintf(gradient_sum, sizeof(gradient_sum), "%.17g", SumOf(subject));
  return absl::StrCat("{\"starts_ns\": [", absl::StrJoin(starts, ","), "], \"ends_ns\": [",
                      absl::StrJoin(ends, ","), "], \"minor_faults\": ", faults,
                      ", \"gradient_sum\": ", gradient_sum, "}");
}

int Serve() {
  torch::set_num_threads(1);
  const auto group = init_process_group();
  Barrier barrier(FLAGS_barrier, group->rank(), group->size());
  const torch::Tensor input =
      (torch::arange(FLAGS_batch * FLAGS_width, torch::kFloat) * 0.1 + group->rank())
          .sin()
          .view({FLAGS_batch, FLAGS_width});
  std::map<std::string, Subject> subjects;
  std::cout << "{\"version\": \"LibTorch " << TORCH_VERSION << "\"}" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command, mode;
    int count = 0;
    words >> command >> mode >> count;
    CHECK(command == "steps" && count > 0) << "no such request: " << line;
    if (!subjects.contains(mode)) subjects.emplace(mode, MakeSubject(mode, group));
    std::cout << Steps(subjects.at(mode), input, count, barrier) << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  gflags::SetUsageMessage("one rank of tools/bench/ddp_step_benchmark");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  return ddp::Serve();
}
