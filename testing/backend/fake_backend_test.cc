#include "testing/backend/fake_backend.h"

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "ddp/common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"
#include "testing/backend/thread_ranks.h"

namespace ddp::testing {
namespace {

NOT_ON_DEVICE("the subject is FakeNetwork");

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Hold = FakeFate::Hold;
using Kind = FakeCall::Kind;

// Connects the backends of `size` ranks, without process groups: one thread can use them all.
std::vector<BackendPtr> ConnectAll(FakeNetwork& network, int size) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<BackendPtr> backends(size);
  RunThreads(size, [&](int rank) {
    backends[rank] = network.Connect(
        {.store = store, .rank = rank, .size = size, .connect_timeout = std::chrono::seconds(60)});
  });
  return backends;
}

WorkPtr Sum(const BackendPtr& backend, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors = {tensor};
  return backend->allreduce(tensors, c10d::AllreduceOptions());
}

std::string ErrorOf(const WorkPtr& work) {
  const auto future = work->getFuture();
  return future->completed() && future->hasError() ? future->tryRetrieveErrorMessage() : "none";
}

TEST(FakeBackendTest, AddsInRankOrder) {
  FakeNetwork network;
  const std::vector<BackendPtr> backends = ConnectAll(network, 3);
  const float values[] = {1e8F, 3.0F, -1e8F};  // the sum depends on the order
  for (const std::vector<int>& order : {std::vector<int>{0, 1, 2}, {2, 0, 1}, {1, 2, 0}}) {
    std::vector<at::Tensor> tensors(3);
    std::vector<WorkPtr> works;
    for (const int rank : order) {
      tensors[rank] = at::full({2}, values[rank]);
      works.push_back(Sum(backends[rank], tensors[rank]));
      EXPECT_EQ(works.back()->isCompleted(), works.size() == 3);
    }
    for (const at::Tensor& tensor : tensors) {
      EXPECT_EQ(tensor[1].item<float>(), (values[0] + values[1]) + values[2]);
    }
    EXPECT_TRUE(works[0]->getFuture()->value().toTensorVector().at(0).is_same(tensors[order[0]]));
  }
}

TEST(FakeBackendTest, ADifferentCollectiveNeverCompletes) {
  FakeNetwork network;
  const std::vector<BackendPtr> backends = ConnectAll(network, 2);
  const WorkPtr small = Sum(backends[0], at::ones({2}));
  const WorkPtr large = Sum(backends[1], at::ones({3}));
  EXPECT_FALSE(small->isCompleted() || large->isCompleted());
  // The next ones meet again.
  EXPECT_FALSE(Sum(backends[0], at::ones({2}))->isCompleted());
  EXPECT_TRUE(Sum(backends[1], at::ones({2}))->isCompleted());
}

TEST(FakeBackendTest, HeldCompletionsComeInTheOrderOfTheTest) {
  FakeNetwork network({.script = [](const FakeCall& call) {
    return FakeFate{.hold = call.rank == 1 ? Hold::kCompletion : Hold::kNothing};
  }});
  const std::vector<BackendPtr> backends = ConnectAll(network, 2);
  std::vector<at::Tensor> tensors;
  std::vector<WorkPtr> works;
  std::vector<int> order;
  for (int i = 0; i < 3; ++i) {
    tensors.push_back(at::ones({1}));
    works.push_back(Sum(backends[1], tensors[i]));
    works[i]->getFuture()->addCallback([&order, i](c10::ivalue::Future&) { order.push_back(i); });
    EXPECT_TRUE(Sum(backends[0], at::ones({1}))->isCompleted());
    EXPECT_EQ(tensors[i].item<float>(), 1);  // not written yet
  }
  const std::vector<FakeCall> held = network.AwaitHeld(3);
  ASSERT_EQ(held.size(), 3u);
  EXPECT_EQ(held[2].number, 2);
  EXPECT_EQ(held[2].kind, Kind::kAllReduce);
  EXPECT_EQ(held[2].bytes, 4);
  for (const int i : {2, 0, 1}) network.Release(held[i]);
  EXPECT_THAT(order, ElementsAre(2, 0, 1));
  for (const at::Tensor& tensor : tensors) EXPECT_EQ(tensor.item<float>(), 2);
}

TEST(FakeBackendTest, AHeldArrivalKeepsThePeersWaiting) {
  FakeNetwork network({.script = [](const FakeCall& call) {
    return FakeFate{.hold = call.rank == 0 ? Hold::kArrival : Hold::kNothing};
  }});
  const std::vector<BackendPtr> backends = ConnectAll(network, 2);
  const WorkPtr late = Sum(backends[0], at::ones({1}));
  const WorkPtr early = Sum(backends[1], at::ones({1}));
  EXPECT_FALSE(late->isCompleted() || early->isCompleted());
  network.Release(network.AwaitHeld(1).front());
  EXPECT_TRUE(late->isCompleted() && early->isCompleted());
}

TEST(FakeBackendTest, FailsWhatTheScriptFails) {
  FakeNetwork network({.script = [](const FakeCall& call) {
    if (call.rank == 0) return FakeFate();
    return FakeFate{.lost = call.number == 2,
                    .launch_error = call.number == 0 ? "no memory" : "",
                    .error = call.number == 1 ? "a flipped bit" : ""};
  }});
  const std::vector<BackendPtr> backends = ConnectAll(network, 2);
  std::vector<WorkPtr> works;
  for (int i = 0; i < 3; ++i) works.push_back(Sum(backends[0], at::ones({1})));
  EXPECT_THROW(Sum(backends[1], at::ones({1})), std::runtime_error);
  EXPECT_THAT(ErrorOf(Sum(backends[1], at::ones({1}))), HasSubstr("a flipped bit"));
  EXPECT_FALSE(Sum(backends[1], at::ones({1}))->isCompleted());
  EXPECT_FALSE(works[0]->isCompleted());
  EXPECT_EQ(ErrorOf(works[1]), "none");
  EXPECT_TRUE(works[1]->isCompleted());
  EXPECT_FALSE(works[2]->isCompleted());
}

TEST(FakeBackendTest, ADestroyedBackendBreaksConnections) {
  FakeNetwork network;
  std::vector<BackendPtr> backends = ConnectAll(network, 2);
  std::vector<at::Tensor> message = {at::full({1}, 7.0F)};
  backends[1]->send(message, 0, 3);
  const WorkPtr sum = Sum(backends[0], at::ones({1}));
  std::vector<at::Tensor> received = {at::zeros({1})};
  const WorkPtr awaited = backends[0]->recv(received, 1, 4);
  backends[1].reset();
  EXPECT_THAT(ErrorOf(sum), HasSubstr("Connection closed by rank 1"));
  EXPECT_THAT(ErrorOf(awaited), HasSubstr("Connection closed by rank 1"));
  EXPECT_THAT(ErrorOf(Sum(backends[0], at::ones({1}))), HasSubstr("Connection closed by rank 1"));
  EXPECT_EQ(ErrorOf(backends[0]->recv(received, 1, 3)), "none");  // it was sent before
  EXPECT_EQ(received[0].item<float>(), 7);
  EXPECT_THAT(ErrorOf(backends[0]->recv(received, 1, 3)), HasSubstr("closed by rank 1"));
}

TEST(FakeBackendTest, TheEndOfTheNetworkEndsEveryOperation) {
  for (const auto delivery :
       {FakeNetwork::Delivery::kLastArriver, FakeNetwork::Delivery::kOwnThread}) {
    WorkPtr left;
    BackendPtr outlives;
    {
      FakeNetwork network({.delivery = delivery});
      outlives = ConnectAll(network, 2)[0];
      left = Sum(outlives, at::ones({1}));
    }
    EXPECT_TRUE(left->isCompleted());
    EXPECT_THROW(Sum(outlives, at::ones({1})), std::runtime_error);
  }
}

TEST(FakeBackendTest, CompletesOnItsOwnThread) {
  FakeNetwork network({.delivery = FakeNetwork::Delivery::kOwnThread});
  const std::vector<BackendPtr> backends = ConnectAll(network, 2);
  std::vector<WorkPtr> works;
  std::thread::id thread;
  for (const BackendPtr& backend : backends) {
    works.push_back(Sum(backend, at::ones({1})));
    const auto chained = works.back()->getFuture()->then(
        [&thread](c10::ivalue::Future&) {
          thread = std::this_thread::get_id();
          return c10::IValue();
        },
        c10::NoneType::get());
    if (works.size() == 1) continue;
    works[0]->getFuture()->wait();
    chained->wait();
  }
  EXPECT_NE(thread, std::thread::id());
}

// A rank that does not come is an error of the others.
TEST(FakeBackendTest, ConnectingHasATimeout) {
  FakeNetwork network;
  EXPECT_THROW(network.Connect({.store = c10::make_intrusive<c10d::HashStore>(),
                                .size = 2,
                                .connect_timeout = std::chrono::milliseconds(1)}),
               CommunicationError);
}

THREAD_RANK_TEST(ThreadRanksTest, RanksRunCollectives, 1, 2, 3) {
  const at::Tensor sum = at::full({2}, group->rank() + 1.0F);
  group->all_reduce(sum);
  EXPECT_EQ(sum[0].item<int>(), group->size() * (group->size() + 1) / 2);
  EXPECT_EQ(group->backend(), "fake");
  const auto alone = group->new_group({0});
  EXPECT_EQ(alone != nullptr, group->rank() == 0);
}

// Each incarnation has new backends.
THREAD_RANK_TEST(ThreadRanksTest, AGroupIsRenewed, 2, 3) {
  for (int incarnation = 1; incarnation < 4; ++incarnation) {
    if (group->rank() == 1) group->report_failure("on purpose");
    EXPECT_THROW(
        {
          if (group->rank() == 1) throw ReductionError("reported");
          group->barrier();
        },
        c10::Error);
    group->ensure_usable();
    EXPECT_EQ(group->incarnation(), incarnation);
    group->barrier();
  }
}

}  // namespace
}  // namespace ddp::testing
