// A training on a device that runs ahead of the host: what is saved is what the device has
// computed from complete sums, and its random numbers go on where they were.
#include <cstdint>
#include <optional>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/time/time.h"
#include "ddp/common/error.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "elastic/checkpoint/checkpointer.h"
#include "elastic/checkpoint/checkpointer_fixture.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/accelerator/accelerator.h"
#include "testing/accelerator/sim_group.h"
#include "testing/ranks/rank_test.h"
#include "testing/temporary_folder.h"

namespace ddp::elastic {
namespace {

class CheckpointerDeviceTest : public CheckpointerFixture,
                               public ::testing::WithParamInterface<int> {
 protected:
  CheckpointerDeviceTest() {
    ddp::testing::InstallAccelerator(
        {.seed = static_cast<uint64_t>(GetParam()), .lateness = absl::Milliseconds(1)});
  }
};

TEST_P(CheckpointerDeviceTest, ResumesExactly) {
  ExpectResumesExactly(AdamW(), ddp::testing::SimulatedDevice());
}

INSTANTIATE_TEST_SUITE_P(Seeds, CheckpointerDeviceTest, ::testing::Range(0, 5));

// ---- Ranks ----

struct LineImpl : torch::nn::Module {
  LineImpl() { line = register_module("line", torch::nn::Linear(4, 4)); }
  torch::Tensor forward(const torch::Tensor& x) { return line(x); }
  torch::nn::Linear line{nullptr};
};
TORCH_MODULE(Line);

// Rank 1 fails before the step that rank 0 has already enqueued, and both ranks save.
RANK_TEST(CheckpointerTornStepTest, AStepOnAnAbortedReductionIsNotSaved, 2) {
  ddp::testing::InstallAccelerator({.seed = 3, .lateness = absl::Milliseconds(5)});
  const auto group = init_process_group({.make_backend = ddp::testing::ConnectSimulatedDevices});
  const int rank = group->rank();
  const auto store = group->store();
  std::optional<ddp::testing::TemporaryFolder> own;  // of rank 0, for both
  if (rank == 0) store->set("folder", own.emplace().path());
  Checkpointer checkpointer({.folder = store->get_to_str("folder"),
                             .rank = rank,
                             .world_size = 2,
                             .generation_nonce = "1",
                             .store = store});
  Line net;
  net->to(group->device());
  DistributedDataParallel model(net, group);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  TrainingState state{.model = net.get(), .optimizer = &optimizer};
  const auto step = [&] {
    optimizer.zero_grad();
    const auto on_device = torch::TensorOptions().device(group->device());
    model.forward(torch::full({2, 4}, 1.0 + rank, on_device)).sum().backward();
    optimizer.step();
    ++state.step;
  };
  for (int i = 0; i < 3; ++i) step();
  EXPECT_NE(checkpointer.save(state), "");
  const torch::Tensor saved = net->line->weight.detach().cpu();
  if (rank == 0) {
    step();
    store->set("stepped", std::vector<uint8_t>{1});
  } else {
    store->wait({"stepped"});
    group->report_failure("a test");
    ++state.step;
  }
  EXPECT_EQ(checkpointer.save(state), "");
  EXPECT_THAT(checkpointer.stats().last_error, ::testing::HasSubstr("has aborted a reduction"));
  if (rank == 0) EXPECT_THROW(step(), PeerFailedError);
  EXPECT_THROW(step(), ReductionError);
  EXPECT_EQ(checkpointer.restore(state)->step, 3);
  EXPECT_TRUE(torch::equal(net->line->weight.detach().cpu(), saved));
  step();
  EXPECT_NE(checkpointer.save(state, Checkpointer::Urgency::kLast), "");
  group->barrier();
}

}  // namespace
}  // namespace ddp::elastic
