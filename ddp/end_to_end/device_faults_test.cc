// Trains on the simulated device until one rank fails at a random collective: by a SIGKILL, an
// exception, its end, a collective that hangs or fails, or a report. Every other rank must throw a
// CommunicationError within two seconds, or more where the machine is busy, and no step on wrong
// gradients may be kept.
//
// DDP_TEST_SEEDS is the number of runs. A run has a world, a fault and options by its seed;
// DDP_TEST_SEED makes the one with that seed again.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "ddp/common/error.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "gtest/gtest.h"
#include "testing/accelerator/accelerator.h"
#include "testing/accelerator/sim_group.h"
#include "testing/ranks/rank_harness.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using Group = std::shared_ptr<ProcessGroup>;

constexpr double kLongestSeconds = 10;  // from the fault to the exception
constexpr double kMedianSeconds = 2;    // the same for one kind of fault
constexpr int kSteps = 40;              // a fault comes earlier
constexpr int kLayers = 4;

enum class Kind { kKill, kThrowInForward, kThrowInBackward, kLeave, kHang, kFail, kReport, kNone };
constexpr int kKinds = 7;

struct Plan {
  // `first` is the number of a rank's first collective after the model is wrapped.
  Plan(uint64_t seed, int64_t first) : seed(seed) {
    std::mt19937_64 random(seed);
    const auto draw = [&random](uint64_t count) { return static_cast<int>(random() % count); };
    kind = static_cast<Kind>(seed % kKinds);
    size = 2 + draw(2);
    rank = draw(size);
    collective = 1 + draw(first + 30);
    const bool throws = kind == Kind::kThrowInForward || kind == Kind::kThrowInBackward;
    if (collective == first) ++collective;  // not a collective: see Train()
    goes_on = throws || (kind != Kind::kKill && kind != Kind::kLeave && collective > first + 1);
    layer = draw(kLayers);
    delay = absl::Microseconds(draw(500));
    reads_each_step = draw(2) == 0;
    options.bucket_cap_mb = 0.02;
    options.gradient_as_bucket_view = draw(2) == 0;
    options.static_graph = draw(3) == 0;
    options.find_unused_parameters = draw(3) == 0;
  }

  uint64_t seed;
  Kind kind;
  int size;
  int rank;            // which has the fault
  int64_t collective;  // of this rank, at which it has it
  bool goes_on;        // all ranks do, after a renewal
  int layer;           // in whose backward an exception is thrown
  absl::Duration delay;
  bool reads_each_step;  // false: the host runs ahead of the device
  DistributedDataParallelOptions options;
};

// Prints a line for the test. One call of the system, for several threads print.
void Say(const std::string& word, const std::string& value) {
  const std::string line = absl::StrCat("\n@", word, " ", value, "\n");
  EXPECT_EQ(::write(STDOUT_FILENO, line.data(), line.size()), static_cast<ssize_t>(line.size()));
}
void SayTime(const std::string& word) { Say(word, absl::StrCat(MonotonicNanoseconds())); }

struct Boom : std::runtime_error {
  Boom() : std::runtime_error("boom") {}
};

// Makes the fault of this rank.
class Saboteur {
 public:
  explicit Saboteur(const Plan& plan) : plan_(plan) {}

  // Null: there is no group to report to any more. Returns when no report is being made.
  void set_group(ProcessGroup* group) {
    const MutexLock lock(mutex_);
    group_ = group;
  }

  // Called on a stream's thread.
  void OnCollective(int64_t number) {
    if (number != plan_.collective) return;
    switch (plan_.kind) {
      case Kind::kKill:  // perhaps in the middle of the exchange
        SayTime("FAULT");
        std::thread([this] {
          (void)std::promise<void>().get_future().wait_for(absl::ToChronoMicroseconds(plan_.delay));
          ::kill(::getpid(), SIGKILL);
        }).detach();
        return;
      case Kind::kHang:
      case Kind::kFail:
        return SayTime("FAULT");
      case Kind::kReport: {
        SayTime("FAULT");
        const MutexLock lock(mutex_);
        if (group_ != nullptr) group_->report_failure_and_throw_later("a test");
        return;
      }
      default:
        due_ = true;
    }
  }

  bool IsDue(Kind kind) {
    if (plan_.kind != kind || !due_.exchange(false)) return false;
    SayTime("FAULT");
    return true;
  }
  void ThrowIfDue(Kind kind) {
    if (IsDue(kind)) throw Boom();
  }

 private:
  const Plan plan_;
  Mutex mutex_;
  ProcessGroup* group_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::atomic<bool> due_ = false;
};

// The gradient of each layer depends on the input only. All sums are exact.
struct Net : torch::nn::Module {
  Net(const Group& group, Saboteur* saboteur, int layer) : saboteur(saboteur), layer(layer) {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(register_module(absl::StrCat(i), torch::nn::Linear(64, 64)));
    }
    to(group->device());
    Restore();
  }
  void Restore() {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : parameters()) parameter.fill_(1);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    if (saboteur) saboteur->ThrowIfDue(Kind::kThrowInForward);
    torch::Tensor sum = torch::zeros_like(x);
    for (int i = 0; i < kLayers; ++i) {
      const torch::Tensor output = layers[i](x);
      if (saboteur && i == layer) {
        output.register_hook([saboteur = saboteur](const torch::Tensor&) {
          saboteur->ThrowIfDue(Kind::kThrowInBackward);
        });
      }
      sum = sum + output;
    }
    return sum;
  }
  Saboteur* const saboteur;  // null: this rank has no fault
  const int layer;
  std::vector<torch::nn::Linear> layers;
};

class Training {
 public:
  Training(const Plan& plan, const Group& group, Saboteur* saboteur)
      : group_(group),
        net_(std::make_shared<Net>(group, saboteur, plan.layer)),
        model_(net_, group, plan.options),
        optimizer_(net_->parameters(), torch::optim::SGDOptions(1. / 1024)) {}

  void Step() {
    const double factor = (1 + group_->rank()) * (1 + steps_ % 5);
    const auto x = torch::full({2, 64}, factor, torch::TensorOptions().device(group_->device()));
    optimizer_.zero_grad();
    model_.forward(x).sum().backward();
    optimizer_.step();
    ++steps_;
  }

  // Prints the parameters when they are proven to be good.
  void Keep(const std::string& word) {
    uint64_t hash = 0xcbf29ce484222325;  // FNV
    for (const auto& parameter : net_->parameters()) {
      const torch::Tensor values = parameter.detach().cpu().view(at::kInt);
      for (int64_t i = 0; i < values.numel(); ++i) {
        hash = (hash ^ static_cast<uint64_t>(values.const_data_ptr<int>()[i])) * 0x100000001b3;
      }
    }
    group_->barrier();
    Say(word, absl::StrCat(steps_, ":", hash));
  }

  // After an error on all ranks.
  void GoOn() {
    group_->renew();
    try {
      Step();
      Keep("WENT_ON");
    } catch (const ReductionError& error) {
      Say("TOLD", error.what_without_backtrace());
      net_->Restore();
      steps_ = 0;
      Step();
    }
    Step();
    Keep("KEPT");
  }

 private:
  const Group group_;
  const std::shared_ptr<Net> net_;
  DistributedDataParallel<Net> model_;
  torch::optim::SGD optimizer_;
  int steps_ = 0;
};

void Train(const Plan& plan, const Group& group, Saboteur* saboteur) {
  Training training(plan, group, saboteur);
  Say("WRAPPED", absl::StrCat(testing::Accelerator().NextCollective()));  // takes the number
  try {
    for (int step = 0; step < kSteps; ++step) {
      training.Step();
      if (plan.reads_each_step) training.Keep("KEPT");
      if (!plan.reads_each_step && step % 4 == 3) group->barrier();
      if (saboteur && saboteur->IsDue(Kind::kLeave)) return;
    }
    return;
  } catch (const CommunicationError&) {
    SayTime("THROWN");
    if (!plan.goes_on) throw;
  } catch (const ReductionError&) {  // of a rank that has reported a failure itself
    if (saboteur == nullptr || plan.kind != Kind::kReport || !plan.goes_on) throw;
  } catch (const Boom&) {
  }
  training.GoOn();
}

int64_t Variable(const char* name, int64_t otherwise) {
  int64_t value = otherwise;
  const char* const text = std::getenv(name);
  const bool is_good = text == nullptr || absl::SimpleAtoi(text, &value);
  EXPECT_TRUE(is_good) << name << "=" << text;
  return value;
}

RANK_BODY(TrainUntilAFault) {
  Plan plan(Variable("DDP_TEST_SEED", 0), Variable("DDP_TEST_FIRST", 0));
  const auto rank = static_cast<int>(Variable("RANK", 0));
  plan.size = static_cast<int>(Variable("WORLD_SIZE", 0));
  if (Variable("DDP_TEST_FIRST", 0) == 0) plan.kind = Kind::kNone;
  if (plan.kind == Kind::kNone) plan.reads_each_step = true;
  auto& saboteur = *new Saboteur(plan);  // streams call it until the process ends
  testing::RuntimeOptions options{.seed = plan.seed, .lateness = absl::Milliseconds(2)};
  if (rank == plan.rank) {
    options.on_collective = [&saboteur](int64_t number) { saboteur.OnCollective(number); };
    if (plan.kind == Kind::kFail) options.fail_collective = plan.collective;
    if (plan.kind == Kind::kHang) options.hang_collective = plan.collective;
  }
  testing::InstallAccelerator(options);
  try {
    ProcessGroupOptions group_options{.make_backend = [](BackendRequest request) {
      request.timeout = std::chrono::minutes(1);  // the ranks may start at different times
      return testing::ConnectSimulatedDevices(request);
    }};
    // A hang is known by the timeout alone.
    if (plan.kind == Kind::kHang) group_options.timeout = std::chrono::seconds(1);
    const Group group = init_process_group(group_options);
    saboteur.set_group(group.get());
    const absl::Cleanup forget = [&saboteur] { saboteur.set_group(nullptr); };
    Train(plan, group, rank == plan.rank ? &saboteur : nullptr);
  } catch (const CommunicationError& error) {
    SayTime("THROWN");
    Say("ENDED", error.what_without_backtrace());
  } catch (const ReductionError& error) {
    EXPECT_TRUE(plan.kind == Kind::kReport && rank == plan.rank) << error.what_without_backtrace();
  }
}

// What the ranks of a run have printed, by word: the values of all lines.
using Lines = std::map<std::string, std::vector<std::string>>;

Lines LinesOf(const std::string& output) {
  Lines lines;
  for (const absl::string_view line : absl::StrSplit(output, '\n')) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(' ', 1));
    if (parts.size() == 2 && parts[0].rfind('@', 0) == 0) {
      lines[parts[0].substr(1)].push_back(parts[1]);
    }
  }
  return lines;
}

testing::RankRun RunWorld(int size, uint64_t seed, int64_t first) {
  return testing::RunRanks({.world_size = size,
                            .body = "TrainUntilAFault",
                            .store_url = testing::NewStoreUrl(),
                            .environment = {{"DDP_TEST_SEED", absl::StrCat(seed)},
                                            {"DDP_TEST_FIRST", absl::StrCat(first)}}});
}

const char* NameOf(Kind kind) {
  static constexpr std::array kNames = {"killed", "forward", "backward", "left",
                                        "hangs",  "fails",   "reports"};
  return kNames.at(static_cast<size_t>(kind));
}

int Failures() {
  const auto* const result = ::testing::UnitTest::GetInstance()->current_test_info()->result();
  return result->total_part_count();
}

// What the runs have shown.
struct Tally {
  std::map<std::string, std::vector<double>> seconds;  // from the fault to the exception, by kind
  int kept = 0;
  int told = 0;
  int went_on = 0;
};

// `good` has the parameters after each number of steps.
void Check(const Plan& plan, const testing::RankRun& run, const std::set<std::string>& good,
           Tally& tally) {
  SCOPED_TRACE(absl::StrCat("seed ", plan.seed, ": ", NameOf(plan.kind), ", rank ", plan.rank,
                            ", collective ", plan.collective));
  const std::vector<std::string> faults = LinesOf(run.ranks[plan.rank].output)["FAULT"];
  ASSERT_EQ(faults.size(), 1);
  int told = 0;
  std::set<std::string> after;
  for (const testing::RankResult& rank : run.ranks) {
    Lines lines = LinesOf(rank.output);
    const bool faulty = rank.rank == plan.rank;
    EXPECT_TRUE(faulty && plan.kind == Kind::kKill ? rank.signal == SIGKILL : rank.succeeded());
    if (!faulty || plan.kind == Kind::kHang || plan.kind == Kind::kFail) {
      ASSERT_FALSE(lines["THROWN"].empty()) << "rank " << rank.rank;
      const double seconds =
          1e-9 * static_cast<double>(std::stoll(lines["THROWN"][0]) - std::stoll(faults[0]));
      EXPECT_LT(seconds, kLongestSeconds) << "rank " << rank.rank;
      tally.seconds[NameOf(plan.kind)].push_back(seconds);
    }
    EXPECT_TRUE(!plan.goes_on || lines["ENDED"].empty()) << "rank " << rank.rank;
    for (const char* word : {"KEPT", "WENT_ON"}) {
      for (const std::string& parameters : lines[word]) {
        EXPECT_EQ(good.count(parameters), 1) << "torn: " << parameters;
        ++tally.kept;
      }
    }
    told += static_cast<int>(lines["TOLD"].size());
    if (plan.goes_on && !lines["KEPT"].empty()) after.insert(lines["KEPT"].back());
  }
  EXPECT_EQ(after.size(), plan.goes_on) << "the ranks differ";
  EXPECT_TRUE(told == 0 || told == plan.size) << told << " ranks know of the step";
  tally.told += told > 0;
  tally.went_on += plan.goes_on && told == 0;
}

TEST(DeviceFaultsTest, EachRankThrowsAndKeepsNoTornStep) {
  std::map<int, std::set<std::string>> good;  // by the number of ranks
  std::map<int, int64_t> first;
  for (const int size : {2, 3}) {
    const testing::RankRun run = RunWorld(size, 0, 0);
    ASSERT_TRUE(run.succeeded()) << run.Describe();
    Lines lines = LinesOf(run.ranks[0].output);
    ASSERT_EQ(lines["KEPT"].size(), kSteps);
    good[size] = {lines["KEPT"].begin(), lines["KEPT"].end()};
    first[size] = std::stoll(lines["WRAPPED"].at(0));
  }
  Tally tally;
  const int64_t only = Variable("DDP_TEST_SEED", -1);
  const int64_t seeds = only < 0 ? Variable("DDP_TEST_SEEDS", 2 * kKinds) : only + 1;
  for (int64_t seed = std::max<int64_t>(only, 0); seed < seeds; ++seed) {
    const int size = Plan(seed, 1).size;
    const testing::RankRun run = RunWorld(size, seed, first[size]);
    const int failures = Failures();
    Check(Plan(seed, first[size]), run, good[size], tally);
    EXPECT_EQ(Failures(), failures) << "seed " << seed << "\n" << run.Describe();
  }
  for (auto& [kind, seconds] : tally.seconds) {
    std::sort(seconds.begin(), seconds.end());
    EXPECT_LT(seconds[seconds.size() / 2], kMedianSeconds) << kind;
    std::cout << kind << ": " << seconds.size() << " exceptions, median "
              << seconds[seconds.size() / 2] << " s, 99% " << seconds[seconds.size() * 99 / 100]
              << " s, longest " << seconds.back() << " s\n";
  }
  std::cout << tally.kept << " steps kept, none torn unless a line above says so; after "
            << tally.went_on << " failures training went on, after " << tally.told
            << " the ranks were told to load a checkpoint\n";
}

}  // namespace
}  // namespace ddp
