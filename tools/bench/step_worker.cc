// A rank of tools/bench/report on our side: does training steps of one model on request.
// step_worker_torch.py is the same on PyTorch's side, line by line.
//
// The ranks find each other by the environment, as under torchrun. Requests come on stdin, one a
// line:
//
//   steps MODE COUNT     answered by {"starts_ns": [...], "ends_ns": [...], "minor_faults": n,
//                        "gradient_sum": x}; the first request of a mode also makes its model
//
//   checkpoint FOLDER    answered by {"save_ns": a, "restore_ns": b}: a checkpoint of the plain
//                        model by all ranks, in a folder that does not exist
//
// MODE is plain (no DDP), default, or some of view, static, find_unused, check, noop, joined by
// "+". With check, every forward compares the parameters of all ranks. PyTorch's side has not: the
// word adam adds the step of an Adam, or of one over shards with zero, zero_whole, zero_scatter or
// zero_overlap. "gradient_sum" is then the sum of the parameters.

#include <gflags/gflags.h>
#include <sys/resource.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adam.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/version.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "ddp/common/logging.h"
#include "ddp/ddp.h"
#include "ddp/default_hooks.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "elastic/checkpoint/checkpointer.h"
#include "nlohmann/json.hpp"
#include "tools/bench/file_barrier.h"

DEFINE_string(model, "chain", "chain, conv or transformer");
DEFINE_int32(layers, 2, "of the model; of a conv net: blocks in each of three stages");
DEFINE_int32(width, 16, "of a layer; of a conv net: channels of the first stage");
DEFINE_int32(batch, 32, "rows of an input; of a transformer: tokens");
DEFINE_string(backend, "", "of the group; empty: the default one");
DEFINE_string(barrier, "", "a file of 64 zero bytes per rank, for this run alone");

namespace ddp {
namespace {

using Json = nlohmann::json;

// The models. step_worker_torch.py has the same ones, layer by layer. Their parameters are
// a fixed function of their place, so that both sides compute the same gradients.
struct Model : torch::nn::Module {
  virtual torch::Tensor forward(torch::Tensor x) = 0;
};

// Linear layers one after the other. Their weights are the identity, so that no number becomes too
// large or denormal at any depth.
struct Chain : Model {
  Chain(int layers, int width) {
    for (int i = 0; i < layers; ++i) {
      torch::nn::Linear layer(width, width);
      torch::nn::init::eye_(layer->weight);
      torch::nn::init::zeros_(layer->bias);
      layers_.push_back(register_module(absl::StrCat("layer", i), layer));
    }
  }
  torch::Tensor forward(torch::Tensor x) override {
    for (torch::nn::Linear& layer : layers_) x = layer->forward(x);
    return x;
  }
  std::vector<torch::nn::Linear> layers_;
};

constexpr int kImageSize = 16;  // rows and columns
constexpr int kClasses = 10;
constexpr int kVocabulary = 1024;
constexpr int kHeads = 4;
constexpr int kSequence = 32;  // tokens; the batch counts tokens of all sequences

// Gives every matrix values that are neither equal nor large, and zeroes every bias. The weights of
// a normalization keep their ones.
void Fill(Model& model) {
  const torch::NoGradGuard no_grad;
  int index = 0;
  for (auto& item : model.named_parameters()) {
    ++index;
    torch::Tensor& parameter = item.value();
    if (item.key().ends_with("bias")) parameter.zero_();
    if (parameter.dim() < 2) continue;
    const int64_t count = parameter.numel();
    const double scale = 1.0 / std::sqrt(static_cast<double>(count) / parameter.size(0));
    const torch::Tensor values = (torch::arange(count, torch::kDouble) * 0.7 + index).sin() * scale;
    parameter.copy_(values.view(parameter.sizes()));
  }
}

torch::nn::Conv2d Convolution(int from, int to, int stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(from, to, 3).stride(stride).padding(1).bias(false));
}

// A residual network: a first convolution, then three stages of `layers` blocks of two
// convolutions with batch normalization, of `width`, 2 `width` and 4 `width` channels.
struct ConvNet : Model {
  ConvNet(int layers, int width) {
    Add(3, width, 1);
    for (int stage = 0; stage < 3; ++stage) {
      const int channels = width << stage;
      if (stage > 0) Add(channels / 2, channels, 2);
      for (int i = 0; i < 2 * layers; ++i) Add(channels, channels, 1);
    }
    head_ = register_module("head", torch::nn::Linear(width << 2, kClasses));
    blocks_ = layers;
    Fill(*this);
  }
  torch::Tensor forward(torch::Tensor x) override {
    size_t at = 0;
    const auto next = [&](const torch::Tensor& from) {
      auto& [convolution, norm] = layers_[at++];
      return norm->forward(convolution->forward(from));
    };
    x = next(x).relu();
    for (int stage = 0; stage < 3; ++stage) {
      if (stage > 0) x = next(x).relu();
      for (int i = 0; i < blocks_; ++i) {
        const torch::Tensor inner = next(x).relu();
        x = (x + next(inner)).relu();
      }
    }
    return head_->forward(x.mean({2, 3}));
  }

 private:
  void Add(int from, int to, int stride) {
    const size_t at = layers_.size();
    const auto convolution = Convolution(from, to, stride);
    const torch::nn::BatchNorm2d norm(to);
    register_module(absl::StrCat("convolution", at), convolution);
    register_module(absl::StrCat("norm", at), norm);
    layers_.emplace_back(convolution, norm);
  }
  std::vector<std::pair<torch::nn::Conv2d, torch::nn::BatchNorm2d>> layers_;
  torch::nn::Linear head_{nullptr};
  int blocks_ = 0;
};

// A layer of a transformer: normalization before attention and before the two linear layers.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int width)
      : norm1(register_module("norm1", torch::nn::LayerNorm(std::vector<int64_t>{width}))),
        qkv(register_module("qkv", torch::nn::Linear(width, 3 * width))),
        out(register_module("out", torch::nn::Linear(width, width))),
        norm2(register_module("norm2", torch::nn::LayerNorm(std::vector<int64_t>{width}))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const int64_t rows = x.size(0), width = x.size(2);
    const torch::Tensor parts = qkv->forward(norm1->forward(x))
                                    .view({rows, kSequence, 3, kHeads, width / kHeads})
                                    .permute({2, 0, 3, 1, 4});
    const double scale = 1.0 / std::sqrt(static_cast<double>(width) / kHeads);
    const torch::Tensor weights = (parts[0].matmul(parts[1].transpose(2, 3)) * scale).softmax(3);
    const torch::Tensor mixed =
        weights.matmul(parts[2]).transpose(1, 2).reshape({rows, kSequence, width});
    const torch::Tensor y = x + out->forward(mixed);
    return y + down->forward(torch::gelu(up->forward(norm2->forward(y))));
  }
  torch::nn::LayerNorm norm1;
  torch::nn::Linear qkv, out;
  torch::nn::LayerNorm norm2;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

// Takes tokens, and gives a score for each word of the vocabulary.
struct Transformer : Model {
  Transformer(int layers, int width) {
    embedding_ = register_module("embedding", torch::nn::Embedding(kVocabulary, width));
    for (int i = 0; i < layers; ++i) {
      blocks_.push_back(register_module(absl::StrCat("block", i), Block(width)));
    }
    norm_ = register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{width}));
    head_ = register_module("head", torch::nn::Linear(width, kVocabulary));
    Fill(*this);
  }
  torch::Tensor forward(torch::Tensor x) override {
    x = embedding_->forward(x);
    for (Block& block : blocks_) x = block->forward(x);
    return head_->forward(norm_->forward(x));
  }
  torch::nn::Embedding embedding_{nullptr};
  std::vector<Block> blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};

std::shared_ptr<Model> MakeModel() {
  if (FLAGS_model == "chain") return std::make_shared<Chain>(FLAGS_layers, FLAGS_width);
  if (FLAGS_model == "conv") return std::make_shared<ConvNet>(FLAGS_layers, FLAGS_width);
  CHECK(FLAGS_model == "transformer") << "no model " << FLAGS_model;
  return std::make_shared<Transformer>(FLAGS_layers, FLAGS_width);
}

torch::Tensor MakeInput(int rank) {
  const auto wave = [rank](int64_t count) {
    return (torch::arange(count, torch::kFloat) * 0.1 + rank).sin();
  };
  if (FLAGS_model == "chain") return wave(FLAGS_batch * FLAGS_width).view({FLAGS_batch, -1});
  if (FLAGS_model == "conv") {
    return wave(FLAGS_batch * 3 * kImageSize * kImageSize)
        .view({FLAGS_batch, 3, kImageSize, kImageSize});
  }
  const torch::Tensor tokens = torch::arange(FLAGS_batch, torch::kLong) * 37 + 101 * rank;
  return tokens.remainder(kVocabulary).view({-1, kSequence});
}

struct Subject {
  std::shared_ptr<Model> model;
  std::unique_ptr<DistributedDataParallel<Model>> wrapped;
  std::function<torch::Tensor(const torch::Tensor&)> forward;
  std::unique_ptr<torch::optim::Optimizer> optimizer;  // null: none

  // Blocks until the parameters have the values of the last step.
  void Finish() const {
    if (auto* zero = dynamic_cast<ZeroRedundancyOptimizerBase*>(optimizer.get())) zero->wait();
  }
};

// Returns null when `word` names no optimizer.
std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(
    const std::string& word, const DistributedDataParallel<Model>& model) {
  using Shard = ZeroRedundancyOptions::Shard;
  const torch::optim::AdamOptions options(1e-4);
  if (word == "adam") return std::make_unique<torch::optim::Adam>(model.parameters(), options);
  if (!word.starts_with("zero")) return nullptr;
  ZeroRedundancyOptions zero;
  if (word == "zero_scatter") zero.scatter_gradients = true;
  if (word == "zero_overlap") zero.overlap_with_forward = true;
  if (word == "zero_whole") zero.shard = Shard::kWhole;
  return std::make_unique<ZeroRedundancyOptimizer<torch::optim::Adam>>(model, options, zero);
}

const std::set<std::string> kModes = {"default", "view", "static", "find_unused",
                                      "check",   "noop", "adam"};

Subject MakeSubject(const std::string& mode, const std::shared_ptr<ProcessGroup>& group) {
  Subject subject;
  subject.model = MakeModel();
  if (mode == "plain") {
    subject.forward = [model = subject.model](const torch::Tensor& x) { return model->forward(x); };
    return subject;
  }
  DistributedDataParallelOptions options;
  const std::vector<std::string> words = absl::StrSplit(mode, '+');
  for (const std::string& word : words) {
    if (word == "view") options.gradient_as_bucket_view = true;
    if (word == "static") options.static_graph = true;
    if (word == "find_unused") options.find_unused_parameters = true;
    if (word == "check") options.check_parameters_every = 1;
    CHECK(kModes.contains(word) || word.starts_with("zero")) << "no mode " << mode;
  }
  subject.wrapped = std::make_unique<DistributedDataParallel<Model>>(subject.model, group, options);
  if (absl::c_linear_search(words, "noop")) {
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
  for (const torch::Tensor& parameter : subject.model->parameters()) {
    const torch::Tensor& summed = subject.optimizer ? parameter : parameter.grad();
    sum += summed.to(torch::kDouble).sum().item<double>();
  }
  return sum;
}

// Removes the gradients before the clock starts. Every rank measures from the barrier to its own
// end; the slowest rank's time is the step's.
Json Steps(Subject& subject, const torch::Tensor& input, int count, FileBarrier& barrier) {
  std::vector<int64_t> starts, ends;
  int64_t faults = 0;
  for (int i = 0; i < count; ++i) {
    for (torch::Tensor& parameter : subject.model->parameters()) parameter.mutable_grad().reset();
    barrier.Wait();
    const int64_t faults_before = MinorFaults();
    starts.push_back(MonotonicNanoseconds());
    subject.forward(input).pow(2).mean().backward();
    if (subject.optimizer) subject.optimizer->step();
    ends.push_back(MonotonicNanoseconds());
    faults += MinorFaults() - faults_before;
  }
  return {{"starts_ns", starts},
          {"ends_ns", ends},
          {"minor_faults", faults},
          {"gradient_sum", SumOf(subject)}};
}

// Saves and restores the model, as one collective of all ranks each. save() is durable when it
// returns. The restore finds the bytes in the page cache.
Json Checkpoint(const std::shared_ptr<Model>& model, const std::string& folder, ProcessGroup& group,
                FileBarrier& barrier) {
  elastic::Checkpointer checkpointer({.folder = folder,
                                      .rank = group.rank(),
                                      .world_size = group.size(),
                                      .store = group.store(),
                                      .on_error = elastic::Checkpointer::OnError::kThrow});
  elastic::TrainingState state{.model = model.get(), .step = 1};
  barrier.Wait();
  const int64_t start = MonotonicNanoseconds();
  checkpointer.save(state);
  const int64_t saved = MonotonicNanoseconds();
  barrier.Wait();
  const int64_t again = MonotonicNanoseconds();
  CHECK(checkpointer.restore(state).has_value()) << "nothing was restored from " << folder;
  return {{"save_ns", saved - start}, {"restore_ns", MonotonicNanoseconds() - again}};
}

int Serve() {
  torch::set_num_threads(1);
  const auto group = init_process_group({.backend = FLAGS_backend});
  FileBarrier barrier(FLAGS_barrier, group->rank(), group->size());
  const torch::Tensor input = MakeInput(group->rank());
  std::map<std::string, Subject> subjects;
  std::cout << Json{{"version", "LibTorch " TORCH_VERSION}} << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command, mode;
    int count = 0;
    words >> command >> mode >> count;
    if (command == "checkpoint") {
      if (!subjects.contains("plain")) subjects.emplace("plain", MakeSubject("plain", group));
      std::cout << Checkpoint(subjects.at("plain").model, mode, *group, barrier) << std::endl;
      continue;
    }
    CHECK(command == "steps" && count > 0) << "no such request: " << line;
    if (!subjects.contains(mode)) subjects.emplace(mode, MakeSubject(mode, group));
    std::cout << Steps(subjects.at(mode), input, count, barrier) << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  gflags::SetUsageMessage("one rank of tools/bench/report");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  return ddp::Serve();
}
