// What the library promises on a device with streams, beyond equal bits: every wait on every
// stream, the end of a group, and that no step on gradients of an aborted reduction is kept.
#include <chrono>
#include <csignal>
#include <cstdint>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <pthread.h>
#include <unistd.h>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "ddp/common/error.h"
#include "ddp/default_hooks.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/accelerator/accelerator.h"
#include "testing/accelerator/sim_group.h"
#include "testing/error_of.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::testing::HasSubstr;
using Group = std::shared_ptr<ProcessGroup>;

void Install(uint64_t seed) {
  testing::InstallAccelerator({.seed = seed, .lateness = absl::Milliseconds(5)});
}

Group DeviceGroup() {
  return init_process_group({.make_backend = testing::ConnectSimulatedDevices});
}

c10::impl::VirtualGuardImpl Streams(const Group& group) {
  return c10::impl::VirtualGuardImpl(group->device().type());
}

void AwaitKey(const Group& group, const std::string& key) { group->store()->wait({key}); }
void SetKey(const Group& group, const std::string& key) {
  group->store()->set(key, std::vector<uint8_t>{1});
}

// Makes later work of `after` wait for the work that `before` has so far.
void Order(c10::Stream before, c10::Stream after) {
  c10::Event event(before.device_type());
  event.record(before);
  event.block(after);
}

torch::Tensor Ones(const Group& group, int64_t count = 1000) {
  return torch::ones({count}, torch::TensorOptions().device(group->device()));
}

// The host is far ahead of the device when the group ends.
RANK_TEST(DeviceStreamsTest, TheEndOfAGroupCompletesItsCollectives, 2) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    Install(seed);
    torch::Tensor sum;
    {
      const Group group = DeviceGroup();
      sum = Ones(group);
      group->all_reduce(sum);
      sum = sum * 2;
    }
    EXPECT_EQ(sum.cpu().sum().item<float>(), 4000) << "seed " << seed;
  }
}

RANK_TEST(DeviceStreamsTest, EachWaitOrdersItsStream, 2) {
  Install(1);
  const Group group = DeviceGroup();
  for (int round = 0; round < 10; ++round) {
    const torch::Tensor sum = Ones(group);
    Work work = group->all_reduce_async(sum);
    work.wait();
    const c10::StreamGuard side(Streams(group).getStreamFromGlobalPool(group->device()));
    work.wait();
    EXPECT_EQ((sum * 2).cpu().sum().item<float>(), 4000) << "round " << round;
  }
}

RANK_TEST(DeviceStreamsTest, AWorkIsCompleteWhenTheDeviceHasEndedIt, 2) {
  Install(1);
  const Group group = DeviceGroup();
  group->barrier();
  const torch::Tensor sum = Ones(group);
  if (group->rank() == 0) {
    Work work = group->all_reduce_async(sum);
    work.wait();
    EXPECT_FALSE(work.completed());
    SetKey(group, "looked");
    EXPECT_EQ(sum.cpu().sum().item<float>(), 2000);
    EXPECT_TRUE(work.completed());
  } else {
    AwaitKey(group, "looked");
    group->all_reduce(sum);
  }
  EXPECT_EQ(sum.cpu().sum().item<float>(), 2000);
}

RANK_TEST(DeviceStreamsTest, ABarrierBlocksTheHost, 2) {
  Install(1);
  const Group group = DeviceGroup();
  group->barrier();
  if (group->rank() == 0) {
    group->barrier();
    SetKey(group, "returned");
  } else {
    const auto store = group->store();
    EXPECT_ANY_THROW(store->wait({"returned"}, std::chrono::milliseconds(300)))
        << "rank 0 has not waited for this rank";
    group->barrier();
    AwaitKey(group, "returned");
  }
}

// A store that answers a question of the thread "ddp-device" late, and tells of the question first.
class LateStore final : public c10d::PrefixStore {
 public:
  explicit LateStore(c10::intrusive_ptr<c10d::Store> store) : PrefixStore("late", store) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<LateStore>(store_->clone());
  }
  using PrefixStore::compareSet;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    char thread[16] = {};
    pthread_getname_np(pthread_self(), thread, sizeof(thread));
    if (std::string(thread) == "ddp-device") {
      store_->set("asked", std::vector<uint8_t>{1});
      EXPECT_ANY_THROW(store_->wait({"nothing"}, std::chrono::seconds(1)));
    }
    return PrefixStore::compareSet(key, expected, desired);
  }
};

// Rank 0 looks for the reason why a sum takes long when rank 1 reports a failure, and finds none
// before the ranks have renewed the group.
RANK_TEST(DeviceStreamsTest, ALateSumIsNoFailureOfTheNextIncarnation, 2) {
  Install(1);
  const Group world = DeviceGroup();
  const auto group = std::make_shared<ProcessGroup>(
      c10::make_intrusive<LateStore>(world->store()),
      ProcessGroup::Place{.rank = world->rank(), .size = 2, .local_rank = world->rank()},
      ProcessGroupOptions{.make_backend = testing::ConnectSimulatedDevices,
                          .timeout = std::chrono::seconds(5)});
  if (group->rank() == 0) {
    group->all_reduce(Ones(group));
    AwaitKey(world, "reported");
  } else {
    AwaitKey(world, "asked");
    group->report_failure("no more data");
    SetKey(world, "reported");
  }
  group->renew();
  const torch::Tensor sum = Ones(group);
  for (int round = 0; round < 3; ++round) {
    group->all_reduce(sum);
    group->barrier();
  }
  EXPECT_EQ(group->to_host(sum).sum().item<float>(), 8000);
}

// A model in which every operation is linear, with one parameter tensor.
struct Net : torch::nn::Module {
  explicit Net(const Group& group) {
    first = register_module("first", torch::nn::Linear(4, 4));
    second = register_module("second", torch::nn::Linear(4, 4));
    to(group->device());
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : parameters()) parameter.fill_(0.25);
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(first(x)); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

struct Trainer {
  explicit Trainer(const Group& on)
      : group(on),
        net(std::make_shared<Net>(on)),
        model(net, on),
        optimizer(net->parameters(), torch::optim::SGDOptions(0.01)) {}

  torch::Tensor Input() const {
    return torch::full({2, 4}, 1.0 + group->rank(), torch::TensorOptions().device(group->device()));
  }
  void Step() {
    optimizer.zero_grad();
    model.forward(Input()).sum().backward();
    optimizer.step();
  }
  torch::Tensor Values() const {
    std::vector<torch::Tensor> all;
    for (const auto& parameter : net->parameters())
      all.push_back(parameter.detach().cpu().flatten());
    return torch::cat(all);
  }

  const Group group;
  const std::shared_ptr<Net> net;
  DistributedDataParallel<Net> model;
  torch::optim::SGD optimizer;
};

// Rank 1 fails before the step that rank 0 has already enqueued. Rank 0's step comes too late to be
// prevented; no rank goes on from it unless the parameters are those of all ranks.
RANK_TEST(DeviceStreamsTest, AStepAfterAnAbortedReductionIsNotKept, 2) {
  Install(2);
  const Group group = DeviceGroup();
  Trainer trainer(group);
  for (int step = 0; step < 3; ++step) trainer.Step();
  const torch::Tensor before = trainer.Values();
  if (group->rank() == 0) {
    trainer.Step();
    SetKey(group, "stepped");
    EXPECT_THROW(for (;;) trainer.Step(), PeerFailedError);
  } else {
    AwaitKey(group, "stepped");
    group->report_failure("a test");
  }
  EXPECT_THAT(ErrorOf<ReductionError>([&] { trainer.Step(); }),
              HasSubstr("load model and optimizer from a "
                        "checkpoint on every rank"));
  // Only rank 0 has stepped.
  EXPECT_THAT(ErrorOf<ReductionError>([&] { trainer.Step(); }), HasSubstr("parameter"));
  const torch::NoGradGuard no_grad;
  int64_t offset = 0;
  for (torch::Tensor& parameter : trainer.net->parameters()) {
    parameter.copy_(before.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
    offset += parameter.numel();
  }
  const torch::AutoGradMode gradients(true);
  for (int step = 0; step < 3; ++step)
    EXPECT_EQ(ErrorOf<ReductionError>([&] { trainer.Step(); }), "no error");
}

// A peer is killed while the host waits for the device.
RANK_TEST(DeviceStreamsTest, AKilledPeerEndsAWaitForTheDevice, .world_size = 2, .killed_rank = 1) {
  Install(3);
  const Group group = DeviceGroup();
  Trainer trainer(group);
  trainer.Step();
  if (group->rank() == 1) ::kill(::getpid(), SIGKILL);
  const MonotonicClock clock;
  const absl::Time start = clock.Now();
  EXPECT_THROW(
      for (;;) {
        trainer.Step();
        (void)trainer.Values();
      },
      PeerFailedError);
  EXPECT_LT(clock.Now() - start, absl::Seconds(20));  // and not for ever
}

RANK_TEST(DeviceStreamsTest, TheHostReadsNoAbortedSum, 2) {
  Install(6);
  const Group group = DeviceGroup();
  const torch::Tensor sum = Ones(group);
  if (group->rank() == 0) {
    group->all_reduce(sum);
    SetKey(group, "started");
    EXPECT_THROW(group->to_host(sum), PeerFailedError);
  } else {
    AwaitKey(group, "started");
    group->report_failure("a test");
  }
}

// Two branches of the model run on two streams, and so do their backwards. That of the left one is
// late.
struct Branches : torch::nn::Module {
  explicit Branches(const Group& on) : group(on) {
    left = register_module("left", torch::nn::Linear(64, 64));
    right = register_module("right", torch::nn::Linear(64, 64));
    to(group->device());
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : parameters()) parameter.fill_(0.25);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto streams = Streams(group);
    const c10::Stream main = streams.getStream(group->device());
    const c10::Stream side = streams.getStreamFromGlobalPool(group->device());
    Order(main, side);
    torch::Tensor other;
    {
      const c10::StreamGuard guard(side);
      other = right(x);
    }
    const torch::Tensor mine = left(x);
    mine.register_hook([device = group->device()](const torch::Tensor&) {
      for (int i = 0; i < 40; ++i) testing::LaunchOn(device, "late", [] {});
    });
    Order(side, main);
    return mine + other;
  }
  const Group group;
  torch::nn::Linear left{nullptr}, right{nullptr};
};

// The accumulators of the gradients belong to the streams on which a first forward has made them.
// The bucket of all four is reduced on the stream of the last one, which is the right branch's.
RANK_TEST(DeviceStreamsTest, GradientsOfTwoStreamsAreInTheSum, 2) {
  Install(1);
  const Group group = DeviceGroup();
  const auto net = std::make_shared<Branches>(group);
  const auto input =
      torch::full({2, 64}, 1.0 + group->rank(), torch::TensorOptions().device(group->device()));
  const torch::Tensor keeps_accumulators = net->forward(input);
  DistributedDataParallel<Branches> model(net, group);
  std::vector<torch::Tensor> gradients;
  for (int step = 0; step < 4; ++step) {
    for (torch::Tensor& parameter : net->parameters()) parameter.mutable_grad().reset();
    model.forward(input * (step + 1)).sum().backward();
    for (const auto& parameter : net->parameters()) gradients.push_back(parameter.grad());
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto step = static_cast<int64_t>(i / 4);
    // The mean of 2 * 1 and 2 * 2 times the step's factor; of a bias 2.
    const auto expected = static_cast<float>(gradients[i].dim() == 2 ? 3 * (step + 1) : 2);
    EXPECT_TRUE(gradients[i].cpu().eq(expected).all().item<bool>())
        << "step " << step << ", gradient " << i % 4 << ": "
        << gradients[i].cpu().flatten()[0].item<float>();
  }
}

// Autograd runs the backward of the first output on the device's thread, and that of the second on
// the calling thread.
struct TwoOutputs : Net {
  using Net::Net;
  std::vector<torch::Tensor> forward(const torch::Tensor& x) {
    return {Net::forward(x), torch::ones({1}).requires_grad_() * 2};
  }
};

// A bucket's reduction starts on the device's thread. The backward of the calling thread comes to
// its output meanwhile, and waits.
RANK_TEST(DeviceStreamsTest, HooksOnTwoThreadsTakeTurns, 2) {
  Install(4);
  const Group group = DeviceGroup();
  DistributedDataParallel<TwoOutputs> model(std::make_shared<TwoOutputs>(group), group);
  std::promise<void> reducing;
  std::promise<void> passed;
  model.register_comm_hook(0, [&](int, GradBucket& bucket) {
    reducing.set_value();
    EXPECT_EQ(passed.get_future().wait_for(std::chrono::milliseconds(200)),
              std::future_status::timeout);
    return allreduce_hook(group, bucket);
  });
  const auto input = torch::ones({2, 4}, torch::TensorOptions().device(group->device()));
  const std::vector<torch::Tensor> outputs = model.forward(input);
  outputs[1].register_hook([&](const torch::Tensor&) { passed.set_value(); });
  const torch::Tensor on_cpu = outputs[1] * 1;
  on_cpu.register_hook([&](const torch::Tensor&) { reducing.get_future().wait(); });
  torch::autograd::backward({outputs[0].sum(), on_cpu.sum()}, {});
}

// backward() throws on the calling thread, while the device's thread still runs an operation of the
// same backward.
RANK_TEST(DeviceStreamsTest, AModelEndsAfterTheBackwardThatHasThrown, 2) {
  Install(5);
  const Group group = DeviceGroup();
  const auto input = torch::ones({2, 4}, torch::TensorOptions().device(group->device()));
  std::promise<void> running;
  std::promise<void> ended;  // the model
  {
    DistributedDataParallel<TwoOutputs> model(std::make_shared<TwoOutputs>(group), group);
    const std::vector<torch::Tensor> outputs = model.forward(input);
    if (group->rank() == 1) {
      outputs[0].register_hook([&](const torch::Tensor&) {
        running.set_value();
        EXPECT_EQ(ended.get_future().wait_for(std::chrono::milliseconds(200)),
                  std::future_status::timeout);
      });
      outputs[1].register_hook([&](const torch::Tensor&) {
        running.get_future().wait();
        throw std::runtime_error("boom");
      });
    }
    const auto backward = [&] {
      torch::autograd::backward({outputs[0].sum(), outputs[1].sum()}, {});
      (void)model.module()->parameters()[0].grad().cpu();
      for (;;) model.forward(input)[0].sum().backward();
    };
    EXPECT_THROW(backward(), std::exception);
  }
  ended.set_value();
  EXPECT_TRUE(group->failed());  // rank 1 has told its peer
}

}  // namespace
}  // namespace ddp
