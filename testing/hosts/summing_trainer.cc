// A trainer for tests that kill ranks on several hosts. Each step is one all-reduce; the trainer
// checks every sum. It continues from the last step that the job has done, and ends when a file
// appears.
#include <ATen/ops/full.h>

#include <gflags/gflags.h>
#include <poll.h>
#include <signal.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "ddp/ddp.h"
#include "elastic/worker/run_worker.h"
#include "elastic/worker/worker_session.h"

DEFINE_string(state, "", "file that holds the number of the last step; the job's checkpoint");
DEFINE_string(until, "", "the job ends when this file is there");
DEFINE_int32(step_ms, 20, "how long the last rank computes in each step");
DEFINE_int32(dies, -1, "the rank that kills its own process in the fifth step, unless restarted");
DEFINE_int32(numbers, 50000, "summed in each step");

namespace {

namespace fs = std::filesystem;

int64_t ReadState() {
  int64_t step = 0;
  std::ifstream(FLAGS_state) >> step;
  return step;
}

void WriteState(int64_t step) {
  const std::string fresh = FLAGS_state + ".new";
  std::ofstream(fresh) << step << '\n';
  fs::rename(fresh, FLAGS_state);
}

int Train() {
  if (FLAGS_state.empty() || FLAGS_until.empty()) {
    throw std::invalid_argument("--state and --until are needed");
  }
  // Gives the survivors time to name the rank that is gone.
  if (FLAGS_dies >= 0) ::signal(SIGTERM, SIG_IGN);
  ddp::elastic::WorkerSession session = ddp::elastic::WorkerSession::from_environment();
  const auto group = ddp::init_process_group();
  at::Tensor state = at::full({1}, ReadState(), at::kLong);
  group->broadcast(state);
  int64_t step = state.item<int64_t>();

  // The tensor has one number more than is summed: the number of ranks that have seen the file.
  const int64_t ranks = group->size();
  const double expected = static_cast<double>(ranks * (ranks + 1)) / 2;
  for (bool ends = false; !ends && !session.should_stop();) {
    if (group->rank() == FLAGS_dies && step == 4 && !session.is_restart()) ::raise(SIGKILL);
    // While the last rank computes, the others are in the middle of the all-reduce.
    if (group->rank() == ranks - 1) ::poll(nullptr, 0, FLAGS_step_ms);
    at::Tensor sum = at::full({FLAGS_numbers + 1}, group->rank() + 1, at::kDouble);
    sum[FLAGS_numbers] = fs::exists(FLAGS_until) ? 1 : 0;
    group->all_reduce(sum);
    if (!sum.slice(0, 0, FLAGS_numbers).eq(expected).all().item<bool>()) {
      throw std::runtime_error("a wrong sum in step " + std::to_string(step + 1));
    }
    ends = sum[FLAGS_numbers].item<double>() > 0;
    ++step;
    if (group->rank() == 0) WriteState(step);
    session.commit(step);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  return ddp::elastic::run_worker(Train);
}
