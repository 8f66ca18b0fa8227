// The time of a training step over a simulated wire: the eager model in C++, its script as one
// graph, and the script cut at bucket boundaries. One rank: a comm hook lets each bucket occupy a
// wire of
// --wire_gb_per_s, and completes the bucket then. The reduction itself is left out.
//
//   bazel run --config=opt //tools/bench:graph_benchmark -- --check
#include <gflags/gflags.h>
#include <torch/script.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "ddp/ddp.h"
#include "ddp/graph/optimize_graph.h"
#include "testing/backend/groups.h"

DEFINE_int32(layers, 8, "of the model");
DEFINE_int32(width, 724, "of a layer; 724 makes layers of 2 MiB");
DEFINE_int32(batch, 128, "rows of an input");
DEFINE_double(wire_gb_per_s, 0.5, "bytes of gradients that the wire carries in a second");
DEFINE_int32(rounds, 15, "interleaved steps of each model that count");
DEFINE_bool(check, false,
            "end with 1 when the cut model takes more than 1.05 of the eager model's time or "
            "launches after 20 % of the gradients, or the uncut model takes less than 1.2");

namespace ddp {
namespace {

constexpr double kMostOfCut = 1.05;    // of the eager model's time
constexpr double kLeastOfUncut = 1.2;  // otherwise the wire is too fast to show anything
constexpr double kMostBeforeLaunch = 0.2;

// A wire that carries one bucket after the other. Owns a thread, which ends with the wire.
class Wire {
 public:
  Wire() : thread_([this] { Run(); }) {}
  ~Wire() {
    {
      const MutexLock lock(mutex_);
      closed_ = true;
      changed_.NotifyAll();
    }
    thread_.join();
  }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  // Returns a future of `buffer` that completes when the wire has carried its bytes.
  TensorFuture Send(const at::Tensor& buffer) {
    const absl::Duration duration =
        absl::Seconds(static_cast<double>(buffer.nbytes()) / (FLAGS_wire_gb_per_s * 1e9));
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    const MutexLock lock(mutex_);
    free_at_ = std::max(free_at_, clock_.Now()) + duration;
    waiting_.push_back({free_at_, buffer, future});
    changed_.NotifyAll();
    return future;
  }

 private:
  struct Bucket {
    absl::Time arrives;
    at::Tensor buffer;
    TensorFuture future;
  };

  void Run() {
    while (true) {
      Bucket bucket;
      {
        const MutexLock lock(mutex_);
        while (!closed_ && (waiting_.empty() || waiting_.front().arrives > clock_.Now())) {
          changed_.WaitFor(mutex_, waiting_.empty() ? absl::Seconds(1)
                                                    : waiting_.front().arrives - clock_.Now());
        }
        if (closed_) return;
        bucket = std::move(waiting_.front());
        waiting_.pop_front();
      }
      bucket.future->markCompleted(bucket.buffer);
    }
  }

  MonotonicClock clock_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Bucket> waiting_ ABSL_GUARDED_BY(mutex_);
  absl::Time free_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // the last field: it reads the others
};

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    for (int i = 0; i < FLAGS_layers; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i),
                                       torch::nn::Linear(FLAGS_width, FLAGS_width)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (torch::nn::Linear& layer : layers) x = torch::relu(layer->forward(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Mlp);

// Returns the same model as a script.
torch::jit::Module MlpScript() {
  torch::jit::Module script("Mlp");
  std::string code = "def forward(self, x):\n";
  const Mlp mlp;
  for (const auto& item : mlp->named_children()) {
    const std::string& layer = item.key();
    for (const auto& parameter : item.value()->named_parameters()) {
      script.register_parameter(layer + "_" + parameter.key(), parameter.value(), false);
    }
    code +=
        "    x = torch.relu(torch.linear(x, self." + layer + "_weight, self." + layer + "_bias))\n";
  }
  script.define(code + "    return x\n");
  return script;
}

torch::Tensor TensorOf(const torch::Tensor& output) { return output; }
torch::Tensor TensorOf(const c10::IValue& output) { return output.toTensor(); }

// The progress of a model's backward when its first bucket was sent.
struct Timeline {
  int gradients = 0;
  int at_first_launch = -1;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Contestant {
  std::string name;
  std::function<void()> step;
  std::shared_ptr<Timeline> timeline;
  std::vector<double> milliseconds;  // one for each round

  // Returns the median over the rounds of this model's time divided by that of `other`.
  double RatioTo(const Contestant& other) const {
    std::vector<double> ratios;
    for (size_t i = 0; i < milliseconds.size(); ++i) {
      ratios.push_back(milliseconds[i] / other.milliseconds[i]);
    }
    return Median(ratios);
  }

  // Returns the share of the gradients that exist when the first bucket is sent.
  double BeforeLaunch() const {
    return static_cast<double>(timeline->at_first_launch) / timeline->gradients;
  }
};

template <typename Module>
Contestant MakeContestant(const std::string& name, Module module, const torch::Tensor& input,
                          const std::shared_ptr<Wire>& wire,
                          const std::vector<std::vector<std::string>>& layout) {
  DistributedDataParallelOptions options{.bucket_cap_mb = 2, .gradient_as_bucket_view = true};
  options.bucket_layout = layout;
  DistributedDataParallel model(module, testing::GroupOfOne(), options);
  auto timeline = std::make_shared<Timeline>();
  for (const torch::Tensor& parameter : model->parameters()) {
    parameter.register_hook([timeline](const torch::Tensor& gradient) {
      ++timeline->gradients;
      return gradient;
    });
  }
  model.register_comm_hook(wire, [timeline](std::shared_ptr<Wire>& to, GradBucket& bucket) {
    if (timeline->at_first_launch < 0) timeline->at_first_launch = timeline->gradients;
    return to->Send(bucket.buffer());
  });
  auto step = [model, input, timeline]() mutable {
    *timeline = {};
    model.zero_grad();
    TensorOf(model.forward(input)).sum().backward();
  };
  return {name, step, timeline, {}};
}

void Measure(std::vector<Contestant>& contestants) {
  const MonotonicClock clock;
  for (int round = -5; round < FLAGS_rounds; ++round) {
    for (Contestant& contestant : contestants) {
      const absl::Time start = clock.Now();
      contestant.step();
      const double taken = absl::ToDoubleMilliseconds(clock.Now() - start);
      if (round >= 0) contestant.milliseconds.push_back(taken);
    }
  }
}

void Report(const std::vector<Contestant>& contestants) {
  std::printf("LibTorch %s, %d threads; %d layers of %d, batch %d, wire %.2f GB/s\n", TORCH_VERSION,
              at::get_num_threads(), FLAGS_layers, FLAGS_width, FLAGS_batch, FLAGS_wire_gb_per_s);
  std::printf("%-16s %10s %10s %10s %12s %s\n", "model", "median ms", "best", "worst", "of eager",
              "gradients before the first launch");
  for (const Contestant& contestant : contestants) {
    const auto [best, worst] =
        std::minmax_element(contestant.milliseconds.begin(), contestant.milliseconds.end());
    std::printf("%-16s %10.2f %10.2f %10.2f %12.3f %.0f %%\n", contestant.name.c_str(),
                Median(contestant.milliseconds), *best, *worst, contestant.RatioTo(contestants[0]),
                100 * contestant.BeforeLaunch());
  }
}

// Returns true when `value` is within its limit, and prints a line otherwise.
bool Holds(const std::string& what, bool holds, double value, double limit) {
  if (!holds) std::printf("missed: %s is %.3f, the limit %.2f\n", what.c_str(), value, limit);
  return holds;
}

bool Check(const Contestant& eager, const Contestant& uncut, const Contestant& cut) {
  const double of_uncut = uncut.RatioTo(eager);
  const double of_cut = cut.RatioTo(eager);
  bool holds = Holds("uncut / eager", of_uncut >= kLeastOfUncut, of_uncut, kLeastOfUncut);
  holds = Holds("cut / eager", of_cut <= kMostOfCut, of_cut, kMostOfCut) && holds;
  holds = Holds("uncut, gradients before the first launch", uncut.BeforeLaunch() == 1,
                uncut.BeforeLaunch(), 1) &&
          holds;
  return Holds("cut, gradients before the first launch", cut.BeforeLaunch() <= kMostBeforeLaunch,
               cut.BeforeLaunch(), kMostBeforeLaunch) &&
         holds;
}

// Returns the exit code.
int Run() {
  torch::manual_seed(1);
  const auto wire = std::make_shared<Wire>();
  const torch::Tensor input = torch::randn({FLAGS_batch, FLAGS_width});
  const auto uncut = optimize_graph(MlpScript(), {.cuts = std::vector<int>{}});
  const auto cut = optimize_graph(MlpScript(), {.bucket_cap_mb = 2});
  const auto interpreted =
      optimize_graph(MlpScript(), {.bucket_cap_mb = 2, .backend = interpreter_backend()});
  std::printf("%s", cut->describe().c_str());
  std::vector<Contestant> contestants;
  contestants.push_back(MakeContestant("eager", Mlp(), input, wire, {}));
  contestants.push_back(MakeContestant("uncut", uncut, input, wire, uncut->bucket_layout()));
  contestants.push_back(MakeContestant("cut", cut, input, wire, cut->bucket_layout()));
  contestants.push_back(
      MakeContestant("cut, interpreter", interpreted, input, wire, interpreted->bucket_layout()));
  Measure(contestants);
  Report(contestants);
  const bool holds = Check(contestants[0], contestants[1], contestants[2]);
  return FLAGS_check && !holds ? 1 : 0;
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  return ddp::Run();
}
