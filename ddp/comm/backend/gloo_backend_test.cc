#include "ddp/comm/backend/gloo_backend.h"

#include <exception>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "ddp/comm/backend/backend_traits.h"
#include "ddp/comm/backend/operation_fault.h"
#include "ddp/common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::HasSubstr;

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Two connected ranks in this process.
std::vector<BackendPtr> ConnectTwo() {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<BackendPtr> ranks(2);
  const auto connect = [&](int rank) {
    ranks[rank] = MakeGlooBackend(
        store, {.rank = rank, .size = 2, .timeout = absl::Seconds(60), .single_host = true});
  };
  std::thread peer([&] { connect(1); });
  connect(0);
  peer.join();
  return ranks;
}

c10::intrusive_ptr<c10d::Work> Sum(const BackendPtr& backend, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors = {tensor};
  return backend->allreduce(tensors, c10d::AllreduceOptions());
}

BackendTraits Traits() {
  BackendTraits traits;
  AddGlooTraits(traits);
  return traits;
}

TEST(GlooBackendTest, OnlyReleasesThatTrustAPeersOffsetsAreWarnedOf) {
  EXPECT_THAT(UnsafeGlooWarning(2, 11, 0), HasSubstr("LibTorch 2.11.0's Gloo"));
  EXPECT_THAT(UnsafeGlooWarning(2, 14, 0), HasSubstr("build with LibTorch 2.14.1 or newer"));
  EXPECT_EQ(UnsafeGlooWarning(2, 14, 1), "");
  EXPECT_EQ(UnsafeGlooWarning(2, 15, 0), "");
  EXPECT_EQ(UnsafeGlooWarning(3, 0, 0), "");
}

TEST(GlooBackendTest, ConnectsAndSums) {
  const std::vector<BackendPtr> ranks = ConnectTwo();
  EXPECT_TRUE(IsGloo(*ranks[0]));
  const at::Tensor zero = at::full({3}, 1.0F);
  const at::Tensor one = at::full({3}, 2.0F);
  const auto first = Sum(ranks[0], zero);
  Sum(ranks[1], one)->wait();
  first->wait();
  EXPECT_EQ(zero.sum().item<float>(), 9);
  EXPECT_EQ(one.sum().item<float>(), 9);
}

// The peer never joins the operation. The destructors of both backends return.
TEST(GlooBackendTest, OperationsCanBeEnded) {
  const std::vector<BackendPtr> ranks = ConnectTwo();
  const auto alone = Sum(ranks[0], at::full({3}, 1.0F));
  EXPECT_FALSE(alone->isCompleted());
  Traits().end_operations(*ranks[0]);
  EXPECT_ANY_THROW(alone->wait());
  EXPECT_EQ(FaultOf(alone->getFuture()->exception_ptr()), OperationFault::kConnection);
}

// Operations with different tags exchange nothing: each rank's first operation meets the other's
// second one.
TEST(GlooBackendTest, TagsMatchTheOperations) {
  const std::vector<BackendPtr> ranks = ConnectTwo();
  const auto start = [&](int rank, uint32_t tag, const at::Tensor& tensor) {
    Traits().set_tag(*ranks[rank], tag);
    return Sum(ranks[rank], tensor);
  };
  const std::vector<at::Tensor> small = {at::full({2}, 1.0F), at::full({2}, 10.0F)};
  const std::vector<at::Tensor> large = {at::full({5}, 1.0F), at::full({5}, 10.0F)};
  const auto a = start(0, 77, small[0]);
  const auto b = start(1, 99, large[1]);
  const auto c = start(0, 99, large[0]);
  const auto d = start(1, 77, small[1]);
  for (const auto& work : {a, b, c, d}) work->wait();
  for (const int rank : {0, 1}) {
    EXPECT_EQ(small[rank].sum().item<float>(), 22);
    EXPECT_EQ(large[rank].sum().item<float>(), 55);
  }
}

// A rank that left earlier would take the connection from a peer that is not connected with it yet.
TEST(GlooBackendTest, NoRankIsConnectedBeforeAllAre) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto connect_and_leave = [&](int rank) {
    const BackendPtr backend = MakeGlooBackend(
        store, {.rank = rank, .size = 2, .timeout = absl::Seconds(60), .single_host = true});
    EXPECT_EQ(store->add("connected/count", 0), 2);
  };
  std::thread peer([&] { connect_and_leave(1); });
  connect_and_leave(0);
  peer.join();
  for (const std::string& key : GlooKeys(2)) store->deleteKey(key);
  EXPECT_EQ(store->getNumKeys(), 0);
}

TEST(GlooBackendTest, AMissingRankIsAnErrorInTime) {
  try {
    MakeGlooBackend(c10::make_intrusive<c10d::HashStore>(),
                    {.size = 2, .timeout = absl::Milliseconds(50), .single_host = true});
    FAIL() << "connected to nobody";
  } catch (const CommunicationError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 0 of 2: Gloo could not connect the ranks"));
  }
}

}  // namespace
}  // namespace ddp::internal
