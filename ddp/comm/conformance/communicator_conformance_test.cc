// The conformance tests of Communicator. They run on every backend of test_backends.h: on the
// fake too, so the fake must behave as a real backend. The ranks are threads of this process.
//
// Length: one case for each promise of Communicator, all on the same backends.
#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ddp/comm/backend/backend_traits.h"
#include "ddp/comm/check/collective_check.h"
#include "ddp/comm/collective.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/conformance/test_backends.h"
#include "ddp/comm/meeting/c10d_group_store.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/common/error.h"
#include "ddp/common/membership.h"
#include "ddp/common/reduce_op.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/fake_backend.h"
#include "testing/backend/test_threads.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeCall;
using ::ddp::testing::FakeFate;
using ::ddp::testing::FakeNetwork;
using ::ddp::testing::RunThreads;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Kind = Collective::Kind;
using Pending = Communicator::Pending;

constexpr ReduceOp kAllOps[] = {ReduceOp::kSum,   ReduceOp::kAverage, ReduceOp::kProduct,
                                ReduceOp::kMin,   ReduceOp::kMax,     ReduceOp::kBitAnd,
                                ReduceOp::kBitOr, ReduceOp::kBitXor};

// One rank, as a ProcessGroup holds it. The communicator ends before the monitor.
struct Rank {
  int rank = 0;
  int size = 1;
  std::shared_ptr<FailureMonitor> monitor;
  std::unique_ptr<Communicator> communicator;

  void Leave() {
    monitor->Leave();
    communicator.reset();
  }
};

struct Settings {
  absl::Duration timeout = absl::Minutes(5);  // of one operation
  FakeNetwork::Script script = nullptr;       // of a fake network
};

// Runs `body` in each rank. No rank leaves before all bodies have returned.
void RunRanks(const TestedBackend& kind, int size, const std::function<void(Rank&)>& body,
              const Settings& settings = {}) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto part = [&](const std::string& name) {
    return c10::make_intrusive<c10d::PrefixStore>(name, store);
  };
  const RankMaker make = kind.new_group(settings.script);
  std::latch done(size);
  RunThreads(size, [&](int rank) {
    c10::intrusive_ptr<c10d::Backend> backend;
    BackendTraits traits;
    if (size > 1 || kind.serves_one_rank) {
      backend = make({.store = part("backend"), .rank = rank, .size = size});
      if (kind.claims.timeouts) {
        backend->setTimeout(absl::ToChronoMilliseconds(settings.timeout));
      }
      if (kind.add_traits != nullptr) kind.add_traits(traits);
    }
    Rank self{.rank = rank, .size = size};
    const Membership membership{.rank = rank, .size = size, .local_end = size};
    self.monitor = std::make_shared<FailureMonitor>(MakeGroupStore(part("control")), membership);
    self.communicator = std::make_unique<Communicator>(
        std::move(backend), self.monitor,
        Communicator::Options{
            .membership = membership, .timeout = settings.timeout, .traits = traits});
    try {
      body(self);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
    }
    done.arrive_and_wait();
    if (self.communicator) self.Leave();
  });
}

// Small whole numbers, so that every type holds them and their sums exactly.
at::Tensor InputOf(int rank, int64_t count, at::ScalarType type) {
  const at::Tensor numbers = (at::arange(count, at::kLong) * 7 + rank * 3).remainder(5);
  return (type == at::kBool ? numbers.gt(2) : numbers).to(type);
}

// The definition of each reduction, in one process.
at::Tensor Reduced(int size, int64_t count, at::ScalarType type, ReduceOp op) {
  at::Tensor result = InputOf(0, count, type);
  const bool bools = type == at::kBool;
  for (int rank = 1; rank < size; ++rank) {
    const at::Tensor next = InputOf(rank, count, type);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAverage:  // the caller of a communicator divides
        result = bools ? result.logical_or(next) : result + next;
        break;
      case ReduceOp::kProduct:
        result = bools ? result.logical_and(next) : result * next;
        break;
      case ReduceOp::kMin:
        result = bools ? result.logical_and(next) : at::minimum(result, next);
        break;
      case ReduceOp::kMax:
        result = bools ? result.logical_or(next) : at::maximum(result, next);
        break;
      case ReduceOp::kBitAnd:
        result = result.bitwise_and(next);
        break;
      case ReduceOp::kBitOr:
        result = result.bitwise_or(next);
        break;
      case ReduceOp::kBitXor:
        result = result.bitwise_xor(next);
        break;
    }
  }
  return result;
}

bool Has(at::ScalarType type, ReduceOp op) {
  if (op >= ReduceOp::kBitAnd) return c10::isIntegralType(type, true);
  return !c10::isComplexType(type) || op == ReduceOp::kSum;
}

void ExpectEqual(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  // Compares bytes, because not every type has operators.
  const at::Tensor a = actual.contiguous().view({-1}).view(at::kByte);
  const at::Tensor b = expected.contiguous().view({-1}).view(at::kByte);
  EXPECT_TRUE(at::equal(a, b)) << what << ":\n" << actual << "\nexpected\n" << expected;
}

void Complete(Communicator& communicator, const Collective& collective) {
  Pending pending = communicator.Start(collective, "a collective", {});
  communicator.Wait(pending);
}

template <typename Error>
std::string ErrorOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return absl::StrCat("another error: ", error.what());
  }
  return "no error";
}

std::string SumError(Rank& self, int64_t count = 4) {
  return ErrorOf<CommunicationError>([&] {
    Pending pending = self.communicator->AllReduce(at::ones({count}), "a sum");
    self.communicator->Wait(pending);
  });
}

class CommunicatorConformanceTest
    : public ::testing::TestWithParam<std::tuple<TestedBackend, int>> {
 protected:
  void RunOnRanks(const std::function<void(Rank&)>& body, const Settings& settings = {}) {
    RunRanks(std::get<0>(GetParam()), std::get<1>(GetParam()), body, settings);
  }
};

TEST_P(CommunicatorConformanceTest, Reduces) {
  RunOnRanks([](Rank& self) {
    for (const at::ScalarType type :
         {at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat,
          at::kDouble, at::kComplexFloat, at::kBool}) {
      for (const ReduceOp op : kAllOps) {
        if (!Has(type, op)) continue;
        const std::string what =
            absl::StrCat(c10::toString(type), ", operation ", static_cast<int>(op));
        const at::Tensor all = InputOf(self.rank, 12, type);
        Complete(*self.communicator, {.op = op, .output = all});
        ExpectEqual(all, Reduced(self.size, 12, type, op), what);

        const at::Tensor part = at::empty({4}, all.options());
        Complete(*self.communicator, {.kind = Kind::kReduceScatter,
                                      .op = op,
                                      .output = part,
                                      .input = InputOf(self.rank, 4 * self.size, type)});
        ExpectEqual(part, Reduced(self.size, 4 * self.size, type, op).narrow(0, 4 * self.rank, 4),
                    what + ", scattered");
      }
    }
  });
}

TEST_P(CommunicatorConformanceTest, MovesEveryType) {
  RunOnRanks([](Rank& self) {
    for (const at::ScalarType type :
         {at::kByte, at::kShort, at::kLong, at::kHalf, at::kBFloat16, at::kDouble, at::kBool,
          at::kFloat8_e5m2, at::kUInt16, at::kComplexDouble}) {
      const std::string what = c10::toString(type);
      const at::Tensor mine = InputOf(self.rank, 2 * self.size, type);
      for (int root = 0; root < self.size; ++root) {
        const at::Tensor received = mine.clone();
        Pending pending = self.communicator->Broadcast(received, root, "a broadcast");
        self.communicator->Wait(pending);
        ExpectEqual(received, InputOf(root, 2 * self.size, type), what + ", broadcast");
      }
      std::vector<at::Tensor> inputs;
      std::vector<at::Tensor> parts;
      for (int rank = 0; rank < self.size; ++rank) {
        inputs.push_back(InputOf(rank, 2 * self.size, type));
        parts.push_back(inputs[rank].narrow(0, 2 * self.rank, 2));
      }
      const at::Tensor gathered = at::empty({2 * self.size * self.size}, mine.options());
      Complete(*self.communicator, {.kind = Kind::kAllGather, .output = gathered, .input = mine});
      ExpectEqual(gathered.view({-1}), at::cat(inputs), what + ", gathered");
      const at::Tensor exchanged = at::empty_like(mine);
      Complete(*self.communicator, {.kind = Kind::kAllToAll, .output = exchanged, .input = mine});
      ExpectEqual(exchanged, at::cat(parts), what + ", exchanged");
    }
  });
}

// Rank a sends (a + b) % 3 elements to rank b: none to two.
TEST_P(CommunicatorConformanceTest, ExchangesPartsOfDifferentSizes) {
  RunOnRanks([](Rank& self) {
    std::vector<int64_t> sizes;
    std::vector<at::Tensor> expected;
    int64_t count = 0;
    for (int other = 0; other < self.size; ++other) {
      sizes.push_back((self.rank + other) % 3);
      count += sizes.back();
      expected.push_back(at::full({sizes.back()}, other, at::kInt));
    }
    const at::Tensor output = at::empty({count}, at::kInt);
    Complete(*self.communicator, {.kind = Kind::kAllToAllSized,
                                  .output = output,
                                  .input = at::full({count}, self.rank, at::kInt),
                                  .output_sizes = sizes,
                                  .input_sizes = sizes});
    ExpectEqual(output, at::cat(expected), "exchanged");
  });
}

TEST_P(CommunicatorConformanceTest, AddsSparseTensors) {
  RunOnRanks([](Rank& self) {
    // Each rank has one entry more than the rank before it. Rank 0 has none.
    std::vector<int64_t> entries(static_cast<size_t>(self.rank));
    std::iota(entries.begin(), entries.end(), 0);
    const at::Tensor mine = at::sparse_coo_tensor(at::tensor(entries, at::kLong).view({1, -1}),
                                                  at::ones({self.rank}), {8});
    Complete(*self.communicator, {.output = mine});
    at::Tensor expected = at::zeros({8});
    for (int64_t entry = 0; entry < self.size; ++entry) expected[entry] = self.size - 1 - entry;
    ExpectEqual(mine.to_dense(), expected, "sparse");
  });
}

at::Tensor SparseOnes() {
  return at::sparse_coo_tensor(at::arange(3, at::kLong).view({1, -1}), at::ones({3}), {8});
}

TEST_P(CommunicatorConformanceTest, AddsSparseAndDenseTensorsInOneGo) {
  RunOnRanks([](Rank& self) {
    for (int round = 0; round < 10; ++round) {
      std::vector<Pending> pending;
      for (int i = 0; i < 8; ++i) {
        pending.push_back(self.communicator->AllReduce(
            i % 4 < 2 ? SparseOnes() : at::ones({1 + 1000 * i}), "one of many"));
      }
      for (Pending& each : pending) {
        self.communicator->Wait(each);
        const at::Tensor sum = each.tensor.is_sparse() ? each.tensor.to_dense() : each.tensor;
        EXPECT_EQ(sum.max().item<float>(), static_cast<float>(self.size));
      }
    }
  });
}

// LibTorch's Gloo may corrupt the heap when a sparse all-reduce is not alone.
TEST_P(CommunicatorConformanceTest, SparseSumsAreAloneWhereTheyMustBe) {
  BackendTraits traits;
  const TestedBackend& kind = std::get<0>(GetParam());
  if (kind.add_traits != nullptr) kind.add_traits(traits);
  if (traits.settled == nullptr) GTEST_SKIP() << "needs a backend with BackendTraits::settled";
  RunOnRanks([](Rank& self) {
    if (self.size == 1) return;
    const auto start = [&](const at::Tensor& tensor) {
      return Communicator::FutureOf(self.communicator->AllReduce(tensor, "a sum"));
    };
    const auto dense = start(at::ones({1 << 20}));
    const auto sparse = start(SparseOnes());
    EXPECT_TRUE(dense->completed());
    const auto second = start(SparseOnes());
    EXPECT_TRUE(sparse->completed());
    Pending last = self.communicator->AllReduce(at::ones({1 << 20}), "the last sum");
    EXPECT_TRUE(second->completed());
    self.communicator->Wait(last);
  });
}

TEST_P(CommunicatorConformanceTest, TensorsWithoutElementsAreComplete) {
  RunOnRanks([](Rank& self) {
    bool finished = false;
    const Pending pending = self.communicator->Start({.output = at::empty({0})}, "an empty sum",
                                                     {.finish = [&] { finished = true; }});
    EXPECT_EQ(Communicator::FutureOf(pending), nullptr);
    EXPECT_TRUE(finished);
  });
}

TEST_P(CommunicatorConformanceTest, WaitsInAnyOrder) {
  RunOnRanks([](Rank& self) {
    for (const std::vector<int>& order :
         {std::vector<int>{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 0, 3, 1}}) {
      std::vector<Pending> pending;
      for (int i = 0; i < 4; ++i) {
        pending.push_back(
            self.communicator->AllReduce(at::full({i + 1}, i + 1, at::kLong), "a sum"));
      }
      for (const int i : order) {
        self.communicator->Wait(pending[i]);
        EXPECT_EQ(pending[i].tensor[i].item<int64_t>(), (i + 1) * self.size);
        self.communicator->Wait(pending[i]);  // returns at once
      }
    }
    Pending low = self.communicator->AllReduceMin(at::full({1}, self.rank), "a minimum");
    Pending high = self.communicator->AllReduceMax(at::full({1}, self.rank), "a maximum");
    self.communicator->Wait(high);
    self.communicator->Wait(low);
    EXPECT_EQ(low.tensor.item<int>(), 0);
    EXPECT_EQ(high.tensor.item<int>(), self.size - 1);
  });
}

TEST_P(CommunicatorConformanceTest, FinishIsTheLastStep) {
  RunOnRanks([](Rank& self) {
    const at::Tensor tensor = at::ones({3});
    const at::Tensor doubled = at::zeros({3});
    Pending pending = self.communicator->Start(
        {.output = tensor}, "a sum",
        {.finish = [&] { doubled.copy_(tensor * 2); }, .results = {doubled}});
    if (const Communicator::Future future = Communicator::FutureOf(pending)) {
      // A future that is made of the operation's: as a comm hook makes it.
      const auto chained = future->then(
          [](c10::ivalue::Future& done) {
            return c10::IValue(done.value().toTensorVector().at(0) + 1);
          },
          c10::TensorType::get());
      self.communicator->WaitFuture(chained, {tensor}, "a chained future");
      EXPECT_EQ(chained->value().toTensor()[2].item<int>(), 2 * self.size + 1);
      EXPECT_TRUE(future->value().toTensorVector().at(0).is_same(doubled));
    }
    self.communicator->Wait(pending);
    EXPECT_EQ(doubled[2].item<int>(), 2 * self.size);
  });
}

TEST_P(CommunicatorConformanceTest, ABarrierInTwoSteps) {
  std::atomic<int> begun{0};
  RunOnRanks([&](Rank& self) {
    self.communicator->EndBarrier();  // none has begun
    for (int round = 1; round < 4; ++round) {
      ++begun;
      self.communicator->BeginBarrier(at::kCPU, "a barrier");
      self.communicator->EndBarrier();
      EXPECT_GE(begun.load(), round * self.size);
    }
    self.communicator->Barrier(at::kCPU);
  });
}

TEST_P(CommunicatorConformanceTest, ARetiredCommunicatorStartsNothing) {
  RunOnRanks([](Rank& self) {
    self.communicator->Barrier(at::kCPU);
    EXPECT_FALSE(self.communicator->retired());
    Pending started = self.communicator->AllReduce(at::ones({4}), "a sum");
    self.communicator->Retire();
    EXPECT_TRUE(self.communicator->retired());
    const std::string text = "cannot be used any more, until all ranks renew it";
    EXPECT_THAT(SumError(self), HasSubstr(text));
    if (self.size == 1) return;  // there, the sum was complete at once
    EXPECT_THAT(ErrorOf<CommunicationError>([&] { self.communicator->Wait(started); }),
                HasSubstr(text));
  });
}

// Tests that need a peer.
class CommunicatorPeersTest : public CommunicatorConformanceTest {};

TEST_P(CommunicatorPeersTest, MessagesKeepTheirOrder) {
  RunOnRanks([](Rank& self) {
    Communicator& communicator = *self.communicator;
    const int next = (self.rank + 1) % self.size;
    const int previous = (self.rank + self.size - 1) % self.size;
    std::vector<Pending> sent;
    for (int i = 0; i < 6; ++i) {
      sent.push_back(communicator.Send(at::full({i}, 10 * self.rank + i, at::kInt), next, i % 2,
                                       {"a message to rank", next}));
    }
    std::vector<Pending> received;
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 6; ++i) tensors.push_back(at::zeros({i}, at::kInt));
    for (const int i : {1, 3, 5, 0, 2, 4}) {
      received.push_back(
          communicator.Receive(tensors[i], previous, i % 2, {"a message from rank", previous}, {}));
    }
    // A collective does not wait for messages.
    communicator.Barrier(at::kCPU);
    for (auto pending = received.rbegin(); pending != received.rend(); ++pending) {
      communicator.Wait(*pending);
    }
    for (Pending& pending : sent) communicator.Wait(pending);
    for (int i = 0; i < 6; ++i) {
      EXPECT_TRUE(tensors[i].eq(10 * previous + i).all().item<bool>()) << tensors[i];
    }
  });
}

TEST_P(CommunicatorPeersTest, AMessageOfAnotherSizeIsAnError) {
  RunOnRanks([](Rank& self) {
    if (self.rank == 0) {
      Pending pending = self.communicator->Send(at::ones({4}), 1, 0, {"a message to rank", 1});
      (void)pending;
    }
    const std::string error = ErrorOf<CommunicationError>([&] {
      if (self.rank == 1) {
        Pending pending =
            self.communicator->Receive(at::ones({2}), 0, 0, {"a message from rank", 0}, {});
        self.communicator->Wait(pending);
      }
      self.communicator->Barrier(at::kCPU);
    });
    EXPECT_THAT(error, AllOf(HasSubstr("a message from rank 0"), HasSubstr("rank 0 sends "),
                             HasSubstr("and this rank receives ")));
  });
}

TEST_P(CommunicatorPeersTest, AFailureReachesEveryWait) {
  std::latch waiting(std::get<1>(GetParam()));
  RunOnRanks([&](Rank& self) {
    if (self.rank == 1) {
      waiting.arrive_and_wait();
      self.monitor->Report("the disk is full");
      EXPECT_THAT(SumError(self), HasSubstr("the disk is full"));
      return;
    }
    Pending pending = self.communicator->AllReduce(at::ones({4}), "a sum");
    waiting.arrive_and_wait();
    try {
      self.communicator->Wait(pending);
      ADD_FAILURE() << "no error";
    } catch (const PeerFailedError& error) {
      EXPECT_EQ(error.rank(), 1);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("a sum"), HasSubstr("the disk is full")));
    }
    EXPECT_TRUE(self.communicator->retired());
    EXPECT_THAT(SumError(self), HasSubstr("rank 1"));
  });
}

TEST_P(CommunicatorPeersTest, ALateRankIsNamedAfterTheTimeout) {
  std::latch timed_out(std::get<1>(GetParam()));
  RunOnRanks(
      [&](Rank& self) {
        if (self.rank > 0) return timed_out.arrive_and_wait();
        const std::string error = SumError(self);
        timed_out.arrive_and_wait();
        EXPECT_THAT(error,
                    AllOf(HasSubstr("a sum"),
                          AnyOf(HasSubstr("not all ranks came within"), HasSubstr("Timed out")),
                          HasSubstr("rank 1 is alive and has launched 0 collectives")));
      },
      {.timeout = absl::Milliseconds(50)});
}

TEST_P(CommunicatorPeersTest, CollectivesThatDifferAreNamed) {
  RunOnRanks([](Rank& self) {
    EXPECT_THAT(SumError(self, self.rank == 0 ? 3 : 2),
                AllOf(HasSubstr("rank 0 is in collective 0, a sum (all-reduce (sum), 12 bytes"),
                      HasSubstr("in collective 0, a sum (all-reduce (sum), 8 bytes")));
  });
}

TEST_P(CommunicatorPeersTest, ARankThatLeftIsNamed) {
  RunOnRanks([](Rank& self) {
    self.communicator->Barrier(at::kCPU);
    if (self.rank == 1) return self.Leave();
    const std::string error = ErrorOf<PeerFailedError>([&] {
      Pending pending = self.communicator->AllReduce(at::ones({4}), "a sum");
      self.communicator->Wait(pending);
    });
    EXPECT_THAT(error, AllOf(HasSubstr("rank 1"), HasSubstr("it has left the process group")));
  });
}

std::string NameOf(const ::testing::TestParamInfo<std::tuple<TestedBackend, int>>& info) {
  return absl::StrCat(std::get<0>(info.param).name, "On", std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Backends, CommunicatorConformanceTest,
                         ::testing::Combine(::testing::ValuesIn(TestedBackends()),
                                            ::testing::Values(1, 2, 3)),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Backends, CommunicatorPeersTest,
                         ::testing::Combine(::testing::ValuesIn(TestedBackends()),
                                            ::testing::Values(2, 3)),
                         NameOf);

// ---- Faults that only a fake has.

TestedBackend Fake() { return TestedFake("Fake", FakeNetwork::Delivery::kLastArriver); }

TEST(CommunicatorTest, AFailedLaunchIsReported) {
  const auto script = [](const FakeCall& call) {
    return FakeFate{.launch_error = call.rank == 1 ? "no memory" : ""};
  };
  RunRanks(Fake(), 3,
           [](Rank& self) {
             EXPECT_THAT(SumError(self), AllOf(HasSubstr("a sum"), HasSubstr("no memory")));
             ASSERT_TRUE(self.monitor->failure().has_value());
             EXPECT_EQ(self.monitor->failure()->rank, 1);
           },
           {.script = script});
}

// Rank 1 waits for no operation. The first one fails when both ranks have started it.
TEST(CommunicatorTest, AForgottenErrorStopsTheNextOperation) {
  const auto script = [](const FakeCall& call) {
    return FakeFate{.error = call.rank == 1 && call.number == 0 ? "a flipped bit" : ""};
  };
  std::latch started(2);
  RunRanks(Fake(), 2,
           [&](Rank& self) {
             Pending first = self.communicator->AllReduce(at::ones({4}), "the first sum");
             started.arrive_and_wait();
             EXPECT_THAT(SumError(self), HasSubstr("a flipped bit"));
             if (self.rank == 1) {
               EXPECT_THAT(SumError(self), HasSubstr("rank 1"));
             }
           },
           {.script = script});
}

// A backend on which a sparse all-reduce must be alone, and whose threads are busy as long as
// `Looks` says.
template <int Looks>
TestedBackend BusyFake() {
  TestedBackend kind = Fake();
  kind.add_traits = [](BackendTraits& traits) {
    traits.settled = [](c10d::Backend& /*backend*/) {
      static std::atomic<int> looks{0};
      return looks.fetch_add(1) >= Looks;
    };
  };
  return kind;
}
constexpr int kForEver = std::numeric_limits<int>::max();

TEST(CommunicatorTest, ASparseSumStartsWhenTheBackendHasSettled) {
  RunRanks(BusyFake<5000>(), 2, [](Rank& self) {
    Pending pending = self.communicator->AllReduce(SparseOnes(), "a sparse sum");
    self.communicator->Wait(pending);
    EXPECT_EQ(pending.tensor.to_dense().max().item<float>(), 2);
  });
}

TEST(CommunicatorTest, AWaitForABusyBackendHasATimeout) {
  RunRanks(BusyFake<kForEver>(), 2,
           [](Rank& self) {
             if (self.rank == 1) return;
             EXPECT_THAT(ErrorOf<CommunicationError>([&] {
                           (void)self.communicator->AllReduce(SparseOnes(), "a sparse sum");
                         }),
                         HasSubstr("it must be alone on the backend"));
           },
           {.timeout = absl::Milliseconds(50)});
}

TEST(CommunicatorTest, AWaitForABusyBackendEndsWithAPeer) {
  RunRanks(BusyFake<kForEver>(), 2, [](Rank& self) {
    if (self.rank == 1) {
      self.monitor->Report("out of memory");
      return;
    }
    EXPECT_THAT(ErrorOf<PeerFailedError>(
                    [&] { (void)self.communicator->AllReduce(SparseOnes(), "a sparse sum"); }),
                HasSubstr("out of memory"));
  });
}

TEST(CommunicatorTest, AnOperationOfAnEarlierIncarnationIsRefused) {
  RunRanks(Fake(), 2, [](Rank& self) {
    Pending pending = self.communicator->AllReduce(at::ones({4}), "a sum");
    Communicator next(nullptr, self.monitor, {.membership = {.incarnation = 1}});
    EXPECT_THAT(ErrorOf<CommunicationError>([&] { next.Wait(pending); }),
                HasSubstr("was started before the process group was renewed"));
  });
}

}  // namespace
}  // namespace ddp::internal
