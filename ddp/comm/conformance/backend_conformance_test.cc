// The conformance tests of c10d::Backend: each collective, type, size, and behaviour that a backend
// claims. test_backends.h lists the backends and says how to add one. The ranks are threads of
// this process, and each has a backend of its own.
//
// Length: one case for each promise of a backend, all on the same groups.
#include <atomic>
#include <functional>
#include <future>
#include <latch>
#include <map>
#include <memory>
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
#include "ddp/comm/conformance/case_run.h"
#include "ddp/comm/conformance/collective_case.h"
#include "ddp/comm/conformance/test_backends.h"
#include "ddp/comm/conformance/test_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::RunThreads;
using ::testing::ContainsRegex;
using ::testing::Not;

using Work = c10::intrusive_ptr<c10d::Work>;

// Numbers of bytes that no power of two divides, above the sizes at which a backend may start to
// work in chunks.
constexpr int64_t kAboveOneChunk = (64 << 10) + 3;
constexpr int64_t kSeveralChunks = (1 << 20) + 4099;

std::string ErrorOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

class BackendTest : public ::testing::TestWithParam<std::tuple<TestedBackend, int>> {
 protected:
  const TestedBackend& kind() const { return std::get<0>(GetParam()); }
  const Claims& claims() const { return kind().claims; }
  int size() const { return std::get<1>(GetParam()); }

  // Returns a connected group, which later cases use too.
  TestGroup& group() {
    std::unique_ptr<TestGroup>& group = (*groups_)[{kind().name, size()}];
    if (!group) group = std::make_unique<TestGroup>(kind(), size());
    return *group;
  }

  static void SetUpTestSuite() { groups_ = std::make_unique<Groups>(); }
  static void TearDownTestSuite() { groups_.reset(); }

  // A failure may have left the group in any state.
  void TearDown() override {
    if (HasFailure()) groups_->erase({kind().name, size()});
  }

  // Runs the claimed ones of `cases`, and compares each result with the reference.
  void Check(const std::vector<Case>& cases, size_t depth = 1) {
    std::vector<Case> claimed;
    for (const Case& c : cases) {
      if (c.operation == Operation::kSendReceive && size() == 1) continue;
      if (Claimed(claims(), c)) claimed.push_back(c);
    }
    std::vector<std::vector<Outcome>> outcomes(size());
    group().Run([&](TestRank& self) { outcomes[self.rank] = RunCases(self, claimed, depth); });
    for (size_t i = 0; i < claimed.size(); ++i) {
      const AllInputs inputs = AllInputsOf(claimed[i], size());
      for (int rank = 0; rank < size(); ++rank) {
        std::string error = outcomes[rank].at(i).error;
        if (error.empty()) {
          error = Difference(outcomes[rank][i].outputs, ExpectedOf(claimed[i], inputs, rank));
        }
        EXPECT_EQ(error, "") << Describe(claimed[i], size()) << ", on rank " << rank;
      }
    }
  }

 private:
  using Groups = std::map<std::pair<std::string, int>, std::unique_ptr<TestGroup>>;
  static inline std::unique_ptr<Groups> groups_;
};

// The operations that the cases of collective_case.h have.
std::vector<Operation> CaseOperations() {
  return AllOperationsBut({Operation::kReceiveAny, Operation::kBarrier});
}

TEST_P(BackendTest, MovesEveryType) {
  std::vector<Case> cases;
  for (const Operation operation : CaseOperations()) {
    if (Reduces(operation)) continue;
    for (const at::ScalarType type : kAllTypes) {
      cases.push_back({.operation = operation, .type = type, .seed = cases.size()});
    }
  }
  Check(cases);
}

TEST_P(BackendTest, ReducesEveryType) {
  std::vector<Case> cases;
  for (const Operation operation : CaseOperations()) {
    if (!Reduces(operation)) continue;
    // On 2 cores, 8 ranks take their time.
    if (size() > 4 && !InPlace(operation)) continue;
    for (const at::ScalarType type : kAllTypes) {
      for (const Reduction reduction : kAllReductions) {
        cases.push_back({.operation = operation,
                         .type = type,
                         .reduction = reduction,
                         .count = 37,
                         .seed = cases.size()});
      }
    }
  }
  Check(cases, /*depth=*/8);
}

TEST_P(BackendTest, TakesEverySize) {
  std::vector<Case> cases;
  for (const Operation operation : CaseOperations()) {
    for (const at::ScalarType type : {at::kByte, at::kFloat}) {
      const auto element = static_cast<int64_t>(c10::elementSize(type));
      for (const int64_t count :
           {int64_t{0}, int64_t{1}, int64_t{1021}, (kAboveOneChunk + element - 1) / element}) {
        cases.push_back(
            {.operation = operation, .type = type, .count = count, .seed = cases.size()});
      }
    }
    // Some operations have such a part for each rank: the whole is as large then.
    const int64_t parts = InPlace(operation) || size() <= 2 ? 1 : size();
    cases.push_back({.operation = operation,
                     .type = at::kByte,
                     .count = kSeveralChunks / parts,
                     .seed = cases.size()});
  }
  Check(cases);
}

TEST_P(BackendTest, TakesEveryRoot) {
  std::vector<Case> cases;
  for (const Operation operation : CaseOperations()) {
    if (!HasRoot(operation)) continue;
    for (int root = 0; root < size(); ++root) {
      for (const int64_t count : {7, 70000}) {
        cases.push_back(
            {.operation = operation, .count = count, .root = root, .seed = cases.size()});
      }
    }
  }
  Check(cases);
}

TEST_P(BackendTest, TakesTensorsWithGaps) {
  if (claims().strided.empty()) GTEST_SKIP() << kind().name << " takes no tensors with gaps";
  std::vector<Case> cases;
  for (const Operation operation : CaseOperations()) {
    for (const at::ScalarType type : {at::kChar, at::kHalf, at::kFloat, at::kDouble}) {
      for (const int64_t count : {1, 1021}) {
        for (const uint64_t which_ranks : {0, 1, 2}) {
          cases.push_back({.operation = operation,
                           .type = type,
                           .count = count,
                           .seed = 3 * cases.size() + which_ranks,
                           .strided = true});
        }
      }
    }
  }
  Check(cases);
}

// The element (i, j) of one rank meets the element (i, j) of the others, wherever they lie.
TEST_P(BackendTest, ATransposedTensorMeetsAnOrdinaryOne) {
  if (!claims().TakesStrided(Operation::kAllReduce)) {
    GTEST_SKIP() << kind().name << " takes no transposed tensors";
  }
  group().Run([](TestRank& self) {
    const at::Tensor values = at::arange(35, at::kFloat).view({5, 7});
    const at::Tensor mine = self.rank == 0 ? values.t().contiguous().t() : values.clone();
    Await(self.StartSum(mine));
    EXPECT_TRUE(at::equal(mine, values * self.size)) << mine;
  });
}

TEST_P(BackendTest, ManyOperationsAreInProgressAtOnce) {
  std::vector<Case> cases;
  for (int round = 0; round < 3; ++round) {
    for (const Operation operation : CaseOperations()) {
      const int64_t count = int64_t{1} << (cases.size() * 5 % 17);
      cases.push_back({.operation = operation,
                       .count = count,
                       .root = static_cast<int>(cases.size()) % size(),
                       .seed = cases.size()});
    }
  }
  Check(cases, /*depth=*/16);
}

TEST_P(BackendTest, ReductionsHaveEqualBitsOnAllRanks) {
  const bool known = claims().tree_order || size() <= 2;
  for (const at::ScalarType type : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    for (const Reduction reduction : {Reduction::SUM, Reduction::AVG, Reduction::PRODUCT}) {
      const bool large = type == at::kFloat && reduction == Reduction::SUM;
      for (const int64_t count : {int64_t{1}, int64_t{1021}, large ? kSeveralChunks / 4 : 0}) {
        const Case c{.type = type, .reduction = reduction, .count = count, .random_floats = true};
        if (!Claimed(claims(), c)) continue;
        std::vector<Outcome> outcomes(size());
        group().Run(
            [&](TestRank& self) { outcomes[self.rank] = Finish(self, c, Launch(self, c)); });
        const AllInputs inputs = AllInputsOf(c, size());
        const std::vector<at::Tensor> expected =
            known ? ExpectedOf(c, inputs, 0) : outcomes[0].outputs;
        for (int rank = 0; rank < size(); ++rank) {
          EXPECT_EQ(outcomes[rank].error, "");
          EXPECT_EQ(Difference(outcomes[rank].outputs, expected), "")
              << Describe(c, size()) << ", on rank " << rank;
        }
      }
    }
  }
}

// ((0 + 1) + (2 + 3)), element by element, in every operation that reduces.
TEST_P(BackendTest, SumsFollowTheBalancedTree) {
  if (!claims().tree_order) GTEST_SKIP() << kind().name << " adds in another order";
  std::vector<Case> cases;
  for (const Operation operation : CaseOperations()) {
    if (!Reduces(operation)) continue;
    for (const at::ScalarType type : kAllTypes) {
      if (!c10::isFloatingType(type) && !c10::isComplexType(type)) continue;
      for (const Reduction reduction : {Reduction::SUM, Reduction::AVG, Reduction::PREMUL_SUM}) {
        for (const int64_t count : {5, type == at::kFloat ? 20011 : 1021}) {
          cases.push_back({.operation = operation,
                           .type = type,
                           .reduction = reduction,
                           .count = count,
                           .root = size() - 1,
                           .seed = cases.size(),
                           .random_floats = true});
        }
      }
    }
  }
  Check(cases, /*depth=*/8);
}

TEST_P(BackendTest, OneReceivesFromAny) {
  if (!claims().Has(Operation::kReceiveAny)) GTEST_SKIP() << kind().name << " has no recvAnysource";
  constexpr int kTag = 3;
  group().Run([&](TestRank& self) {
    if (self.rank > 0) {
      std::vector<at::Tensor> message = {at::full({9}, self.rank, at::kInt)};
      Await(self.Start([&](auto& backend) { return backend.send(message, 0, kTag); }));
      return;
    }
    std::vector<bool> heard(self.size);
    for (int i = 1; i < self.size; ++i) {
      std::vector<at::Tensor> message = {at::zeros({9}, at::kInt)};
      const Work work =
          self.Start([&](auto& backend) { return backend.recvAnysource(message, kTag); });
      Await(work);
      const int source = work->sourceRank();
      ASSERT_TRUE(source > 0 && source < self.size && !heard[source]) << source;
      heard[source] = true;
      EXPECT_TRUE(message[0].eq(source).all().item<bool>()) << message[0] << " from " << source;
    }
  });
}

TEST_P(BackendTest, MessagesOfOneTagKeepTheirOrder) {
  if (!claims().Has(Operation::kSendReceive) || size() == 1) {
    GTEST_SKIP() << kind().name << " sends no messages here";
  }
  group().Run([](TestRank& self) {
    std::vector<Work> sent, received;
    std::vector<std::vector<at::Tensor>> out, in;
    for (int i = 0; i < 8; ++i) {
      out.push_back({at::full({100 * i + 1}, 10 * self.rank + i, at::kInt)});
      in.push_back({at::zeros({100 * i + 1}, at::kInt)});
      const int next = (self.rank + 1) % self.size;
      sent.push_back(self.Start([&](auto& backend) { return backend.send(out[i], next, i % 2); }));
    }
    const int previous = (self.rank + self.size - 1) % self.size;
    for (const int i : {1, 0, 3, 5, 2, 7, 4, 6}) {
      received.push_back(
          self.Start([&](auto& backend) { return backend.recv(in[i], previous, i % 2); }));
    }
    for (auto work = received.rbegin(); work != received.rend(); ++work) Await(*work);
    for (const Work& work : sent) Await(work);
    for (int i = 0; i < 8; ++i) {
      EXPECT_TRUE(in[i][0].eq(10 * previous + i).all().item<bool>()) << i << ": " << in[i][0];
    }
  });
}

TEST_P(BackendTest, ABarrierWaitsForEveryRank) {
  if (!claims().Has(Operation::kBarrier)) GTEST_SKIP() << kind().name << " has no barrier";
  std::atomic<int> begun{0};
  group().Run([&](TestRank& self) {
    for (int round = 1; round <= 50; ++round) {
      ++begun;
      Await(self.Start([](auto& backend) { return backend.barrier(); }));
      EXPECT_GE(begun.load(), round * self.size);
    }
  });
}

TEST_P(BackendTest, FuturesCompleteWithoutAWait) {
  group().Run([](TestRank& self) {
    const at::Tensor tensor = at::full({5}, self.rank + 1.0F);
    const int sum = self.size * (self.size + 1) / 2;
    const Work work = self.StartSum(tensor);
    const auto future = work->getFuture();
    ASSERT_NE(future, nullptr);
    const auto chained = future->then(
        [](c10::ivalue::Future& done) {
          return c10::IValue(done.value().toTensorVector().at(0) * 2);
        },
        c10::TensorType::get());
    std::promise<float> seen;
    chained->addCallback([&](c10::ivalue::Future& done) {
      seen.set_value(done.hasError() ? -1 : done.value().toTensor()[4].item<float>());
    });
    EXPECT_EQ(seen.get_future().get(), 2 * sum);  // no call of wait() so far
    Await(work);
    EXPECT_TRUE(work->isCompleted());
    EXPECT_EQ(tensor[0].item<float>(), sum);
    EXPECT_TRUE(future->value().toTensorVector().at(0).is_same(tensor));
  });
}

// The caller's tensors live as long as the operation needs them.
TEST_P(BackendTest, AForgottenOperationCompletes) {
  group().Run([](TestRank& self) {
    for (int i = 0; i < 10; ++i) self.StartSum(at::ones({1000 * i}));
    const at::Tensor tensor = at::ones({3});
    Await(self.StartSum(tensor));
    EXPECT_EQ(tensor.sum().item<float>(), 3 * self.size);
  });
}

// A backend that claims nothing, or less than it does, escapes the tests.
TEST_P(BackendTest, ClaimsAllThatItDoes) {
  EXPECT_TRUE(claims().Has(Operation::kAllReduce)) << "no test has a backend without a sum";
  int types = 0;
  for (const at::ScalarType type : kAllTypes) {
    types += claims().reduces(Reduction::SUM, type) ? 1 : 0;
  }
  EXPECT_GE(types, 6) << "types that the backend adds";
  group().Run([](TestRank& self) {
    for (const Operation operation : AllOperations()) {
      const bool message =
          operation == Operation::kSendReceive || operation == Operation::kReceiveAny;
      if (self.claims().Has(operation) || message) continue;
      const Case c{.operation = operation};
      EXPECT_NE(Finish(self, c, Launch(self, c)).error, "") << NameOf(operation) << " works";
    }
  });
}

std::string ParamName(const ::testing::TestParamInfo<std::tuple<TestedBackend, int>>& info) {
  return absl::StrCat(std::get<0>(info.param).name, "On", std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Backends, BackendTest,
                         ::testing::Combine(::testing::ValuesIn(TestedBackends()),
                                            ::testing::Values(1, 2, 3, 4, 8)),
                         ParamName);

// ---- Ranks that come late, differ, fail, or go.

constexpr const char* kTimeoutText = "[Tt]imed ?out|[Tt]imeout";

// Gloo's ranks learn that a peer of a peer has failed only by their own timeout. This one is for
// operations that cannot succeed.
constexpr absl::Duration kPatience = absl::Milliseconds(500);

class BackendPeersTest : public BackendTest {};

TEST_P(BackendPeersTest, ALateRankIsWaitedFor) {
  std::latch alone(1);
  TestGroup group(kind(), size());
  group.Run([&](TestRank& self) {
    if (self.rank > 0) alone.wait();
    const at::Tensor tensor = at::full({1000}, self.rank + 1.0F);
    const Work work = self.StartSum(tensor);
    if (self.rank == 0) {
      EXPECT_FALSE(work->isCompleted());
      alone.count_down();
    }
    Await(work);
    EXPECT_EQ(tensor[999].item<float>(), self.size * (self.size + 1) / 2);
  });
}

// A wait may be given up. The operation itself goes on, or fails on this rank for good.
TEST_P(BackendPeersTest, AWaitHasATimeout) {
  if (!claims().timeouts) GTEST_SKIP() << kind().name << " has no timeouts";
  std::latch alone(1);
  TestGroup group(kind(), size());
  group.Run([&](TestRank& self) {
    if (self.rank > 0) alone.wait();
    const at::Tensor tensor = at::ones({10});
    const Work work = self.StartSum(tensor);
    if (self.rank == 0) {
      EXPECT_THAT(ErrorOf([&] { work->wait(std::chrono::milliseconds(20)); }),
                  ContainsRegex(kTimeoutText));
      alone.count_down();
    }
    if (ErrorOf([&] { Await(work); }).empty()) {
      EXPECT_EQ(tensor.sum().item<float>(), 10 * self.size);
    } else {
      EXPECT_FALSE(work->isSuccess());
    }
  });
}

TEST_P(BackendPeersTest, AMissingRankIsAnErrorInTime) {
  if (!claims().timeouts) GTEST_SKIP() << kind().name << " has no timeouts";
  for (const bool by_option : {false, true}) {
    std::latch timed_out(1);
    TestGroup group(kind(), size());
    group.Run([&](TestRank& self) {
      if (self.rank == 0) {
        constexpr absl::Duration kShort = absl::Milliseconds(50);
        if (!by_option) self.SetTimeout(kShort);
        c10d::AllreduceOptions options;
        if (by_option) options.timeout = absl::ToChronoMilliseconds(kShort);
        std::vector<at::Tensor> tensors = {at::ones({10})};
        const std::string error = ErrorOf([&] {
          Await(self.Start([&](auto& backend) { return backend.allreduce(tensors, options); }));
        });
        EXPECT_THAT(error, ContainsRegex(kTimeoutText));
        timed_out.count_down();
      }
      timed_out.wait();
      if (self.rank > 0) self.SetTimeout(kPatience);
      // The ranks no longer agree about the operations that have run: the group has ended.
      EXPECT_NE(ErrorOf([&] { Await(self.StartSum(at::ones({10}))); }), "");
    });
  }
}

TEST_P(BackendPeersTest, AnAbortEndsTheOperations) {
  if (claims().abort == Claims::Abort::kNone) GTEST_SKIP() << kind().name << " cannot be aborted";
  const bool alone = claims().abort == Claims::Abort::kOwnRank;
  std::latch started(size() - 1);
  std::latch aborted(1);
  TestGroup group(kind(), size());
  group.Run([&](TestRank& self) {
    const bool missing = self.rank == self.size - 1;
    Work work;
    if (!missing) {
      work = self.StartSum(at::ones({100000}));
      started.count_down();
    }
    started.wait();
    if (self.rank == 0 || alone) self.Abort();
    if (self.rank == 0) aborted.count_down();
    if (missing && alone) return;  // has nothing to end
    aborted.wait();                // otherwise the missing rank could complete the operation
    const std::string error = ErrorOf([&] {
      if (missing) work = self.StartSum(at::ones({100000}));
      Await(work);
    });
    EXPECT_NE(error, "");
    // "Application timeout" is how Gloo ends a connection.
    EXPECT_THAT(error, Not(ContainsRegex("[Tt]imed ?out")));
    EXPECT_TRUE(!work || work->isCompleted());
  });
}

// The destructor returns, and the peers do not wait forever for the rank.
TEST_P(BackendPeersTest, ABackendIsDestroyedWithAnOperationInProgress) {
  std::latch gone(1);
  TestGroup group(kind(), size());
  group.Run([&](TestRank& self) {
    if (self.rank == 0) {
      const Work work = self.StartSum(at::ones({1000}));
      self.Destroy();
      gone.count_down();
      if (self.claims().abort != Claims::Abort::kNone) {
        EXPECT_NE(ErrorOf([&] { Await(work); }), "");
      }
      return;
    }
    gone.wait();
    if (self.claims().timeouts) self.SetTimeout(kPatience);
    const at::Tensor tensor = at::ones({1000});
    // The first sum may have what rank 0 gave before it went. There is no second one.
    const std::string error = ErrorOf([&] { Await(self.StartSum(tensor)); });
    if (error.empty()) {
      EXPECT_EQ(tensor.sum().item<float>(), 1000 * self.size);
    }
    EXPECT_NE(ErrorOf([&] { Await(self.StartSum(tensor)); }), "");
  });
}

// Returns rank `rank`'s part in the given way to differ, on tensors of `work`. Rank 0 differs.
Work StartMismatch(const TestRank& self, int way, std::vector<at::Tensor>& tensors) {
  const bool differs = self.rank == 0;
  tensors = {at::ones({way == 1 && differs ? 5 : 4})};
  if (way == 2) tensors = {at::ones({differs ? 1 << 18 : 4})};
  if (way == 3 && differs) tensors = {at::ones({4}, at::kInt)};
  c10d::AllreduceOptions options;
  if (way == 4 && differs) options.reduceOp = Reduction::MAX;
  return self.Start([&](auto& backend) {
    return way == 0 && differs ? backend.broadcast(tensors) : backend.allreduce(tensors, options);
  });
}

TEST_P(BackendPeersTest, CollectivesThatDifferGiveNoResult) {
  if (claims().mismatch == Claims::Mismatch::kUndefined) {
    GTEST_SKIP() << kind().name << " may end the process";
  }
  const char* const ways[] = {"a broadcast and a sum", "5 and 4 elements", "1 MiB and 16 bytes",
                              "integers and floating point numbers", "a maximum and a sum"};
  for (int way = 0; way < std::size(ways); ++way) {
    SCOPED_TRACE(ways[way]);
    std::latch started(size());
    TestGroup group(kind(), size());
    group.Run([&](TestRank& self) {
      if (self.claims().timeouts) self.SetTimeout(kPatience);
      std::vector<at::Tensor> tensors;
      Work work;
      std::string error = ErrorOf([&] { work = StartMismatch(self, way, tensors); });
      started.arrive_and_wait();
      if (way == 0 && self.rank == 0) return;  // the root of a broadcast needs nobody
      if (self.claims().mismatch == Claims::Mismatch::kError) {
        if (error.empty()) error = ErrorOf([&] { Await(work); });
        EXPECT_NE(error, "") << ways[way] << " on rank " << self.rank;
      } else {
        EXPECT_FALSE(work->isCompleted()) << ways[way];
      }
    });
  }
}

TEST_P(BackendPeersTest, TwoThreadsUseTwoGroups) {
  TestGroup groups[] = {TestGroup(kind(), size()), TestGroup(kind(), size())};
  RunThreads(2 * size(), [&](int thread) {
    UseOneThread();
    const int which = thread % 2;
    const TestRank& self = groups[which].rank(thread / 2);
    for (int round = 0; round < 100; ++round) {
      const at::Tensor tensor = at::full({round * 7}, 1000 * which + round, at::kInt);
      Await(self.StartSum(tensor));
      ASSERT_TRUE(tensor.eq((1000 * which + round) * self.size).all().item<bool>()) << tensor;
    }
  });
}

// The even and the odd ranks of one store have groups of their own besides the whole one.
TEST_P(BackendPeersTest, SubGroupsAreIndependent) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto part = [&](const std::string& name) {
    return c10::make_intrusive<c10d::PrefixStore>(name, store);
  };
  TestGroup all(kind(), 2 * size(), part("all"));
  TestGroup halves[] = {TestGroup(kind(), size(), part("even")),
                        TestGroup(kind(), size(), part("odd"))};
  all.Run([&](TestRank& self) {
    const TestRank& in_half = halves[self.rank % 2].rank(self.rank / 2);
    for (int round = 0; round < 20; ++round) {
      const at::Tensor whole = at::full({100}, self.rank, at::kInt);
      const at::Tensor half = at::full({100}, self.rank, at::kInt);
      std::vector<Work> works;
      // Each half has its own order of the two groups.
      if (self.rank % 2 == 0) works.push_back(self.StartSum(whole));
      works.push_back(in_half.StartSum(half));
      if (self.rank % 2 == 1) works.push_back(self.StartSum(whole));
      for (auto work = works.rbegin(); work != works.rend(); ++work) Await(*work);
      const int n = in_half.size;
      EXPECT_EQ(whole[99].item<int>(), n * (2 * n - 1));
      EXPECT_EQ(half[99].item<int>(), n * (n - 1) + n * (self.rank % 2));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, BackendPeersTest,
                         ::testing::Combine(::testing::ValuesIn(TestedBackends()),
                                            ::testing::Values(2, 3)),
                         ParamName);

}  // namespace
}  // namespace ddp::internal
