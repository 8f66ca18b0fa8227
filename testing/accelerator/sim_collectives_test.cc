// Tests the collectives of the simulated devices: what they compute, and that streams, futures,
// failures and ends are those of ProcessGroupNCCL.
#include "testing/accelerator/sim_collectives.h"

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/accelerator/accelerator.h"
#include "testing/backend/test_threads.h"

namespace ddp::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

struct Rank {
  int rank = 0;
  c10::Device device;
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Backend> backend;

  // Returns a tensor that another rank does not have.
  Tensor Own(int64_t size, c10::ScalarType type = at::kFloat) const {
    return (torch::arange(size) * 0.37 + rank * 1.7).to(type).to(device);
  }
};

const RuntimeOptions kLate{.seed = 1, .lateness = absl::Milliseconds(2)};

// Runs `body` in `size` threads, on devices 0 and 1 in turn, with a backend each. The backend is
// shut down unless `body` has taken it away.
void RunRanks(int size, const RuntimeOptions& options, const std::function<void(Rank&)>& body) {
  InstallAccelerator(options);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  RunThreads(size, [&](int number) {
    const c10::Device device = SimulatedDevice(number % 2);
    // Ranks that share a device must not wait for each other's collectives in one stream.
    const c10::StreamGuard guard(c10::impl::VirtualGuardImpl(device.type()).getNewStream(device));
    Rank rank{.rank = number,
              .device = device,
              .store = store,
              .backend = MakeSimBackend(store, {.rank = number, .size = size})};
    body(rank);
    if (rank.backend) rank.backend->shutdown();
  });
}

Tensor SumInTree(const Tensors& ranks) {
  return ranks.size() == 4 ? (ranks[0] + ranks[1]) + (ranks[2] + ranks[3])
                           : (ranks[0] + ranks[1]) + ranks[2];
}

c10d::ReduceOp PreMulSum(double factor) {
  c10d::ReduceOp op;
  op.op_ = c10d::ReduceOp::PREMUL_SUM;
  op.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(factor);
  return op;
}

TEST(SimCollectivesTest, SumsHaveTheBitsOfTheTree) {
  for (const int size : {3, 4}) {
    for (const c10::ScalarType type : {at::kFloat, at::kBFloat16, at::kLong}) {
      RunRanks(size, kLate, [&](Rank& self) {
        Tensors all;
        for (int i = 0; i < size; ++i) {
          all.push_back(Rank{.rank = i, .device = at::kCPU}.Own(100, type));
        }
        Tensors tensors = {self.Own(100, type)};
        self.backend->allreduce(tensors)->wait();
        EXPECT_TRUE(torch::equal(tensors[0].cpu(), SumInTree(all)));
        if (type == at::kLong) return;
        for (const bool average : {true, false}) {
          tensors = {self.Own(100, type)};
          c10d::AllreduceOptions options;
          options.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::AVG) : PreMulSum(1.0 / size);
          self.backend->allreduce(tensors, options)->wait();
          Tensors scaled;
          for (const Tensor& tensor : all) {
            scaled.push_back((tensor.to(at::kFloat) * (1.0 / size)).to(type));
          }
          EXPECT_TRUE(torch::equal(tensors[0].cpu(), SumInTree(scaled)));
        }
      });
    }
  }
}

Tensor Filled(const Rank& self, int64_t size, double value) {
  return torch::full({size}, value, at::TensorOptions(self.device));
}

std::vector<float> Values(const Tensor& tensor) {
  const Tensor cpu = tensor.cpu().contiguous();
  return {cpu.data_ptr<float>(), cpu.data_ptr<float>() + cpu.numel()};
}

TEST(SimCollectivesTest, EachCollectiveMovesItsTensors) {
  RunRanks(2, kLate, [](Rank& self) {
    const float own = self.rank;
    c10d::Backend& backend = *self.backend;
    using Floats = std::vector<float>;

    Tensors tensors = {Filled(self, 2, own)};
    backend.broadcast(tensors, {.rootRank = 1})->wait();
    EXPECT_EQ(Values(tensors[0]), Floats({1, 1}));

    Tensor gathered = Filled(self, 4, 9);
    Tensor input = Filled(self, 2, own);
    backend._allgather_base(gathered, input)->wait();
    EXPECT_EQ(Values(gathered), Floats({0, 0, 1, 1}));

    std::vector<Tensors> lists = {{Filled(self, 2, 9), Filled(self, 2, 9)}};
    Tensors inputs = {input};
    backend.allgather(lists, inputs)->wait();
    EXPECT_EQ(Values(torch::cat(lists[0])), Floats({0, 0, 1, 1}));

    Tensor output = Filled(self, 2, 9);
    backend._reduce_scatter_base(output, gathered)->wait();
    EXPECT_EQ(Values(output), self.rank == 0 ? Floats({0, 0}) : Floats({2, 2}));
    Tensors outputs = {output};
    backend.reduce_scatter(outputs, lists)->wait();
    EXPECT_EQ(Values(output), self.rank == 0 ? Floats({0, 0}) : Floats({2, 2}));

    // Rank 0 sends 1 row to each; rank 1 sends 1 row to rank 0 and 2 rows to itself.
    input = torch::arange(2 + self.rank).to(at::kFloat).to(self.device) + 10 * own;
    output = Filled(self, 2 + self.rank, 9);
    std::vector<int64_t> from_sizes = {1, 1 + self.rank};
    std::vector<int64_t> to_sizes = {1, 1 + self.rank};
    backend.alltoall_base(output, input, to_sizes, from_sizes)->wait();
    EXPECT_EQ(Values(output), self.rank == 0 ? Floats({0, 10}) : Floats({1, 11, 12}));

    lists = self.rank == 0 ? std::vector<Tensors>{{Filled(self, 1, 9), Filled(self, 1, 9)}}
                           : std::vector<Tensors>{};
    inputs = {Filled(self, 1, own + 5)};
    backend.gather(lists, inputs, {.rootRank = 0})->wait();
    for (const Tensors& list : lists) EXPECT_EQ(Values(torch::cat(list)), Floats({5, 6}));
    outputs = {Filled(self, 1, 9)};
    backend.scatter(outputs, lists, {.rootRank = 0})->wait();
    EXPECT_EQ(Values(outputs[0])[0], own + 5);

    tensors = {Filled(self, 1, own + 1)};
    backend.reduce(tensors, {.rootRank = 1})->wait();
    EXPECT_EQ(Values(tensors[0])[0], self.rank == 0 ? 1 : 3);
    tensors = {Filled(self, 1, 1), Filled(self, 2, 2)};
    backend.allreduce_coalesced(tensors)->wait();
    EXPECT_EQ(Values(torch::cat(tensors)), Floats({2, 4, 4}));
    backend.barrier()->wait();
  });
}

TEST(SimCollectivesTest, MessagesOfAPairHaveAStreamOfTheirOwn) {
  RunRanks(2, kLate, [](Rank& self) {
    self.backend->eagerConnectSingleDevice(self.device);
    // The collective of rank 0 ends when rank 1 has got the message that follows it.
    Tensors sum = {Filled(self, 1, 1)};
    Tensors message = {Filled(self, 1, self.rank)};
    c10::intrusive_ptr<c10d::Work> work;
    if (self.rank == 0) work = self.backend->allreduce(sum);
    const auto moved =
        self.rank == 0 ? self.backend->send(message, 1, 0) : self.backend->recv(message, 0, 0);
    moved->wait();
    EXPECT_EQ(message[0].item<float>(), 0);
    if (self.rank == 1) work = self.backend->allreduce(sum);
    work->wait();
    EXPECT_EQ(sum[0].item<float>(), 2);
  });
}

// ---- Streams.

constexpr int kSeeds = 50;

// Returns for how many seeds a rank has read a wrong sum, when `order` makes the current stream
// wait for the work. The sum is read on a stream that nothing else orders.
int WrongSeeds(const std::function<void(c10d::Work&)>& order) {
  std::atomic<int> wrong = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    RunRanks(2, {.seed = seed, .lateness = absl::Milliseconds(2)}, [&](Rank& self) {
      bool right = true;
      for (int round = 0; round < 20; ++round) {
        Tensors tensors = {Filled(self, 1000, round)};
        const auto work = self.backend->allreduce(tensors);
        order(*work);
        right = (tensors[0] == 2 * round).all().item<bool>() && right;
        work->wait();
      }
      wrong += self.rank == 0 && !right;
    });
  }
  return wrong;
}

TEST(SimCollectivesTest, ASumIsReadTooEarlyWithoutAWait) {
  EXPECT_EQ(WrongSeeds([](c10d::Work&) {}), kSeeds);
  EXPECT_EQ(WrongSeeds([](c10d::Work& work) { work.wait(); }), 0);
  EXPECT_EQ(WrongSeeds([](c10d::Work& work) { work.synchronize(); }), 0);
  EXPECT_EQ(WrongSeeds([](c10d::Work& work) { work.getFuture()->wait(); }), 0);
}

TEST(SimCollectivesTest, TheHostGoesOnAndTheFutureIsComplete) {
  RunRanks(2, {}, [](Rank& self) {
    Tensors tensors = {Filled(self, 1, 1)};
    self.backend->eagerConnectSingleDevice(self.device);
    if (self.rank == 0) {
      const auto work = self.backend->allreduce(tensors);
      EXPECT_FALSE(work->isCompleted());
      EXPECT_TRUE(work->getFuture()->completed());
      work->wait();
      const c10::impl::VirtualGuardImpl device(self.device.type());
      EXPECT_FALSE(device.queryStream(device.getStream(self.device)));
      self.store->set("rank 0 has not blocked", "");
    } else {
      self.store->wait({"rank 0 has not blocked"});
      self.backend->allreduce(tensors)->wait();
    }
    EXPECT_EQ(tensors[0].item<float>(), 2);
  });
}

TEST(SimCollectivesTest, WorksHaveNoFuturesByOption) {
  RunRanks(1, {.futures = false}, [](Rank& self) {
    Tensors tensors = {Filled(self, 1, 1)};
    const auto work = self.backend->allreduce(tensors);
    EXPECT_THROW(work->getFuture(), c10::Error);
    work->wait();
  });
}

TEST(SimCollectivesTest, RefusesWhatNcclRefuses) {
  RunRanks(1, {}, [](Rank& self) {
    const auto refusal = [&](const Tensor& tensor, const std::string& message) {
      Tensors tensors = {tensor};
      EXPECT_THAT([&] { self.backend->allreduce(tensors); },
                  ThrowsMessage<c10::Error>(HasSubstr(message)));
    };
    refusal(torch::ones(2), "Tensors must be on a simulated device and dense");
    refusal(torch::ones(2).to_sparse(), "Tensors must be on a simulated device and dense");
    refusal(Filled(self, 2, 1).to(at::kShort), "data type is not supported");
    refusal(Filled(self, 4, 1).slice(0, 0, 4, 2), "Tensors must be contiguous");
    Tensors tensors = {Filled(self, 2, 1)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::BOR;
    EXPECT_THROW(self.backend->allreduce(tensors, options), c10::Error);
  });
}

// ---- Ends and failures.

TEST(SimCollectivesTest, ShutdownFinishesAndTheDestructorAborts) {
  for (const bool shuts_down : {true, false}) {
    RunRanks(2, {}, [shuts_down](Rank& self) {
      self.backend->eagerConnectSingleDevice(self.device);
      Tensors tensors = {Filled(self, 1, 1)};
      // The collective cannot begin before the backend has ended, unless shutdown() waits for it.
      if (self.rank == 1 && !shuts_down) self.store->wait({"rank 0 has ended"});
      const auto work = self.backend->allreduce(tensors);
      if (shuts_down) self.backend->shutdown();
      self.backend.reset();
      self.store->set("rank 0 has ended", "");
      work->wait();
      EXPECT_EQ(tensors[0].item<float>(), shuts_down ? 2 : 1);
    });
  }
}

// Makes a rank wait for a collective that never completes, and abort it.
void ExpectBusyUntilAbort(Rank& self, const std::string& error) {
  Tensors tensors = {Filled(self, 1, 1)};
  const auto work = self.backend->allreduce(tensors);
  work->wait();
  while (!error.empty() && !work->isCompleted()) std::this_thread::yield();
  const c10::impl::VirtualGuardImpl device(self.device.type());
  EXPECT_FALSE(device.queryStream(device.getStream(self.device)));
  self.backend->abort();
  EXPECT_EQ(tensors[0].item<float>(), 1);
  EXPECT_TRUE(work->isCompleted());
  EXPECT_THAT([&] { std::rethrow_exception(work->exception()); },
              ThrowsMessage<c10::DistBackendError>(
                  HasSubstr(error.empty() ? "the communicator was aborted" : error)));
  EXPECT_THROW(self.backend->allreduce(tensors), c10::Error);
}

TEST(SimCollectivesTest, APeersEndKeepsTheStreamBusyUntilAbort) {
  RunRanks(2, kLate, [](Rank& self) {
    self.backend->eagerConnectSingleDevice(self.device);
    if (self.rank == 0) ExpectBusyUntilAbort(self, "rank 1 has closed the connection");
    self.backend.reset();
  });
}

TEST(SimCollectivesTest, AChosenCollectiveFailsOrHangs) {
  RunRanks(1, {.fail_collective = 2}, [](Rank& self) {
    self.backend->barrier()->wait();
    ExpectBusyUntilAbort(self, "it fails by DDP_SIM_FAIL_COLLECTIVE");
  });
  RunRanks(1, {.hang_collective = 2}, [](Rank& self) {
    self.backend->barrier()->wait();
    ExpectBusyUntilAbort(self, "");
  });
}

TEST(SimCollectivesDeathTest, TheWatchdogEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto hang = [] {
    RunRanks(1, {.hang_collective = 1, .watchdog = absl::Milliseconds(50)},
             [](Rank& self) { self.backend->barrier()->wait(); });
  };
  EXPECT_DEATH(hang(), "collective 1 .BARRIER. has lasted longer than DDP_SIM_WATCHDOG_MS allows");
}

TEST(SimCollectivesTest, ASplitGroupHasItsRanksOnly) {
  RunRanks(3, kLate, [](Rank& self) {
    ASSERT_TRUE(self.backend->supportsSplitting());
    const auto store = c10::make_intrusive<c10d::PrefixStore>("split", self.store);
    const auto pair = self.backend->split(store, {2, 0}, nullptr);
    EXPECT_EQ(pair == nullptr, self.rank == 1);
    if (!pair) return;
    EXPECT_EQ(pair->getRank(), self.rank == 2 ? 0 : 1);
    Tensors tensors = {Filled(self, 1, self.rank)};
    pair->allreduce(tensors)->wait();
    EXPECT_EQ(tensors[0].item<float>(), 2);
    pair->shutdown();
  });
}

}  // namespace
}  // namespace ddp::testing
