#include "ddp/transfer/coalesced_broadcast.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <ATen/Functions.h>

#include "ddp/common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::RankStore;
using ::testing::HasSubstr;

constexpr RankStore kStore = RankStore::kTcpStore;
constexpr int kRoot = 1;

// ---- Bits

TEST(SameBitsTest, ComparesBitsAndNotNumbers) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(SameBits(at::full({2}, nan), at::full({2}, nan)));
  EXPECT_FALSE(SameBits(at::full({1}, 0.0F), at::full({1}, -0.0F)));
  EXPECT_TRUE(SameBits(at::empty({0}), at::empty({0})));
  EXPECT_FALSE(SameBits(at::tensor({1, 2}), at::tensor({1, 3})));
}

TEST(SameBitsTest, ComparesElementsAndNotMemory) {
  const at::Tensor matrix = at::arange(6).view({2, 3});
  EXPECT_TRUE(SameBits(matrix.t(), matrix.t().contiguous()));
  EXPECT_FALSE(SameBits(matrix.view({3, 2}), matrix.t()));
}

// ---- The broadcast

RANK_TEST(CoalescedBroadcastTest, CopiesTheRootsBitsWhateverTheMessages, .world_size = 2,
          .stores = {kStore}) {
  const auto group = init_process_group();
  const int rank = group->rank();
  const auto of = [&](at::ScalarType type) { return at::device(group->device()).dtype(type); };
  for (const int64_t chunk_bytes : {int64_t{1}, int64_t{40}, int64_t{1} << 20}) {
    const std::vector<at::Tensor> tensors = {
        at::full({5}, rank, of(at::kFloat)),
        at::full({3}, rank, of(at::kShort)),
        at::full({2, 3}, rank, of(at::kDouble)).t(),  // not contiguous
        at::full({2, 1}, rank, of(at::kFloat)).expand({2, 4}),
        at::empty({0}, of(at::kFloat)),
        at::full({}, rank, of(at::kBool)),
        at::full({4}, rank, of(at::kFloat)),
    };
    const at::Tensor view = tensors[0].narrow(0, 1, 2);
    const std::vector<at::Tensor> values =
        BroadcastCoalesced(group->communicator(), tensors, {"a", "b", "c", "d", "e", "f", "g"},
                           {.rank = rank, .root = kRoot, .chunk_bytes = chunk_bytes});
    ASSERT_EQ(values.size(), tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor expected = at::full(tensors[i].sizes(), kRoot, tensors[i].options());
      EXPECT_TRUE(at::equal(tensors[i], expected)) << i;
      EXPECT_TRUE(at::equal(values[i], expected)) << i;
      EXPECT_TRUE(values[i].is_contiguous()) << i;
    }
    EXPECT_EQ(view.sum().item<float>(), 2 * kRoot);
    EXPECT_EQ(tensors[3].stride(1), 0);
  }
  group->barrier();
}

RANK_TEST(CoalescedBroadcastTest, RaisesTheVersionOfATensorThatChanged, .world_size = 2,
          .stores = {kStore},
          .not_on_device = "nothing is compared there, for the host would wait") {
  const auto group = init_process_group();
  const int rank = group->rank();
  const std::vector<at::Tensor> tensors = {at::ones({2}), at::full({2}, rank, at::kFloat),
                                           at::full({2}, rank, at::kFloat)};
  std::vector<uint64_t> versions;
  for (const at::Tensor& tensor : tensors) versions.push_back(tensor._version());
  BroadcastCoalesced(
      group->communicator(), tensors, {"equal", "raised", "kept"},
      {.rank = rank, .root = kRoot, .keeps_version = [](size_t index) { return index == 2; }});
  EXPECT_EQ(tensors[0]._version(), versions[0]);
  EXPECT_EQ(tensors[1]._version(), versions[1] + (rank == kRoot ? 0 : 1));
  EXPECT_EQ(tensors[2]._version(), versions[2]);
  EXPECT_EQ(tensors[2][0].item<float>(), kRoot);
  group->barrier();
}

RANK_TEST(CoalescedBroadcastTest, RefusesTensorsThatAreNotDense, .world_size = 1,
          .stores = {kStore}) {
  const auto group = init_process_group();
  const auto refused = [&](const at::Tensor& tensor) {
    return ErrorOf<ConfigurationError>([&] {
      BroadcastCoalesced(group->communicator(), {at::ones({1}), tensor}, {"fine", "odd"},
                         {.what = "the broadcast of the model"});
    });
  };
  EXPECT_EQ(refused(at::ones({2}).to_sparse()),
            "rank 0: the broadcast of the model takes dense tensors, and odd is Sparse: register a "
            "dense one, or name it in params_and_buffers_to_ignore on all ranks");
  EXPECT_THAT(refused(at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8)),
              HasSubstr("and odd is quantized: register"));
  EXPECT_TRUE(BroadcastCoalesced(group->communicator(), {}, {}, {}).empty());
}

}  // namespace
}  // namespace ddp::internal
