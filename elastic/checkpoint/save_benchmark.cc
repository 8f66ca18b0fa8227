// Measures how long training stands still for a checkpoint, against a copy of the same bytes.
//
//   bazel run -c opt //elastic/checkpoint:save_benchmark -- --mib=1024 --folder=/some/disk
//
// Prints one line for each: the copy (memcpy between two warm buffers), save_async() until it
// returns, the same until it is durable, and save(). Each is the median over the rounds.

#include <gflags/gflags.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/types.h>

#include "absl/time/time.h"
#include "base/clock.h"
#include "ddp/common/logging.h"
#include "elastic/checkpoint/checkpointer.h"

DEFINE_int32(mib, 256, "of the model");
DEFINE_int32(rounds, 7, "of each measurement");
DEFINE_string(folder, "", "on the disk to use, new or empty; default: a temporary folder");

namespace ddp::elastic {
namespace {

constexpr int64_t kTensors = 32;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Timer {
 public:
  double Milliseconds() const { return absl::ToDoubleMilliseconds(clock_.Now() - begin_); }

 private:
  const MonotonicClock clock_{};
  const absl::Time begin_ = clock_.Now();
};

// Returns the median time of a copy of the tensors between warm buffers.
double CopyMilliseconds(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> copies;
  for (const torch::Tensor& tensor : tensors) copies.push_back(tensor.clone());
  std::vector<double> times;
  for (int round = 0; round < FLAGS_rounds; ++round) {
    const Timer timer;
    for (size_t i = 0; i < tensors.size(); ++i) {
      std::memcpy(copies[i].data_ptr(), tensors[i].const_data_ptr(), tensors[i].nbytes());
    }
    times.push_back(timer.Milliseconds());
  }
  return Median(times);
}

int Run() {
  std::string root = FLAGS_folder;
  if (root.empty()) {
    root = (std::filesystem::temp_directory_path() / "ddp-save.XXXXXX").string();
    CHECK(mkdtemp(root.data()) != nullptr) << root;
  }
  auto model = std::make_shared<torch::nn::Module>();
  std::vector<torch::Tensor> tensors;
  for (int64_t i = 0; i < kTensors; ++i) {
    tensors.push_back(model->register_parameter(
        "weight" + std::to_string(i), torch::rand({FLAGS_mib * (int64_t{1} << 18) / kTensors}),
        /*requires_grad=*/false));
  }
  Checkpointer::Options options;
  options.folder = root + "/checkpoints";
  options.on_error = Checkpointer::OnError::kThrow;
  options.retention.keep_last = 1;
  Checkpointer checkpointer(options);
  TrainingState state{.model = model.get()};
  std::vector<double> stall;
  std::vector<double> durable;
  std::vector<double> blocking;
  for (int round = 0; round < FLAGS_rounds + 1; ++round) {
    ++state.step;
    const Timer timer;
    const PendingSave save = checkpointer.save_async(state);
    const double staged = timer.Milliseconds();
    (void)save.durable();
    if (round == 0) continue;  // allocates the buffer
    stall.push_back(staged);
    durable.push_back(timer.Milliseconds());
  }
  for (int round = 0; round < FLAGS_rounds; ++round) {
    ++state.step;
    const Timer timer;
    (void)checkpointer.save(state);
    blocking.push_back(timer.Milliseconds());
  }
  const double copy = CopyMilliseconds(tensors);
  printf("%d MiB, median of %d rounds\n", FLAGS_mib, FLAGS_rounds);
  const auto line = [copy](const char* name, double milliseconds) {
    printf("  %-22s %9.1f ms  %6.2f of the copy\n", name, milliseconds, milliseconds / copy);
  };
  line("copy in memory", copy);
  line("save_async() returns", Median(stall));
  line("save_async() is durable", Median(durable));
  line("save()", Median(blocking));
  if (FLAGS_folder.empty()) std::filesystem::remove_all(root);
  return 0;
}

}  // namespace
}  // namespace ddp::elastic

int main(int argc, char** argv) {
  gflags::SetUsageMessage("measures how long training stands still for a checkpoint");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  FLAGS_minloglevel = google::GLOG_WARNING;
  google::InitGoogleLogging(argv[0]);
  return ddp::elastic::Run();
}
