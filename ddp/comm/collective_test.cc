#include "ddp/comm/collective.h"

#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/strings/str_cat.h"
#include "ddp/comm/backend/backend_traits.h"
#include "ddp/common/reduce_op.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using Kind = Collective::Kind;
using Tensors = std::vector<at::Tensor>;

// Records the last call as a text.
class RecordingBackend : public c10d::Backend {
 public:
  RecordingBackend() : Backend(0, 2) {}

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return Record("allreduce", tensors[0], absl::StrCat("op ", OpOf(options.reduceOp)));
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return Record("broadcast", tensors[0], absl::StrCat("root ", options.rootRank));
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& options) override {
    return Record("reduce_scatter", from, absl::StrCat("to ", to.numel()));
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& to, at::Tensor& from,
                                               std::vector<int64_t>& to_sizes,
                                               std::vector<int64_t>& from_sizes,
                                               const c10d::AllToAllOptions&) override {
    return Record("alltoall", from,
                  absl::StrCat("sizes ", to_sizes[0], " ", to_sizes[1], " from ", from_sizes[0],
                               " ", from_sizes[1]));
  }

  std::string Launch(const Collective& collective) {
    collective.Launch(*this, BackendTraits());
    return std::exchange(call_, "");
  }

 private:
  static int OpOf(const c10d::ReduceOp& op) { return static_cast<int>(op.op_); }

  c10::intrusive_ptr<c10d::Work> Record(const char* name, const at::Tensor& tensor,
                                        const std::string& more) {
    call_ = absl::StrCat(name, " of ", tensor.numel(), " ", c10::toString(tensor.scalar_type()),
                         ", ", more);
    return nullptr;
  }

  std::string call_;
};

constexpr int kSum = c10d::ReduceOp::SUM;
constexpr int kMax = c10d::ReduceOp::MAX;
constexpr int kMin = c10d::ReduceOp::MIN;

// No backend knows complex numbers or bools, and every backend can move bytes.
TEST(CollectiveTest, ABackendGetsTypesThatItKnows) {
  RecordingBackend backend;
  EXPECT_EQ(backend.Launch({.output = at::ones({3})}),
            absl::StrCat("allreduce of 3 Float, op ", kSum));
  EXPECT_EQ(backend.Launch({.output = at::complex(at::ones({3}), at::ones({3}))}),
            absl::StrCat("allreduce of 6 Float, op ", kSum));
  const at::Tensor flags = at::zeros({4}, at::kBool);
  EXPECT_EQ(backend.Launch({.op = ReduceOp::kSum, .output = flags}),
            absl::StrCat("allreduce of 4 Byte, op ", kMax));
  EXPECT_EQ(backend.Launch({.op = ReduceOp::kProduct, .output = flags}),
            absl::StrCat("allreduce of 4 Byte, op ", kMin));
  EXPECT_EQ(backend.Launch({.kind = Kind::kBroadcast, .root = 1, .output = at::ones({3})}),
            "broadcast of 12 Byte, root 1");
  EXPECT_EQ(
      backend.Launch(
          {.kind = Kind::kReduceScatter, .output = at::zeros({2}), .input = at::ones({2, 2})}),
      "reduce_scatter of 4 Float, to 2");
}

TEST(CollectiveTest, SizesOfPartsAreInBytes) {
  RecordingBackend backend;
  EXPECT_EQ(backend.Launch({.kind = Kind::kAllToAllSized,
                            .output = at::zeros({3}, at::kDouble),
                            .input = at::ones({4}, at::kDouble),
                            .output_sizes = {1, 2},
                            .input_sizes = {3, 1}}),
            "alltoall of 32 Byte, sizes 8 16 from 24 8");
}

TEST(CollectiveTest, TheAgreedTensorIsEqualOnAllRanks) {
  const at::Tensor small = at::zeros({2});
  const at::Tensor large = at::zeros({2, 2});
  const auto agreed = [&](Kind kind) {
    return Collective{.kind = kind, .output = small, .input = large}.agreed().numel();
  };
  EXPECT_EQ(agreed(Kind::kAllReduce), 2);
  EXPECT_EQ(agreed(Kind::kReduceScatter), 2);
  EXPECT_EQ(agreed(Kind::kAllGather), 4);
  EXPECT_FALSE((Collective{.kind = Kind::kAllToAllSized, .output = small}.sizes_agree()));
}

TEST(CollectiveTest, OnlyACollectiveThatIsEmptyOnAllRanksIsSkipped) {
  const at::Tensor none = at::zeros({0});
  EXPECT_TRUE(Collective{.output = none}.IsEmpty());
  EXPECT_FALSE(Collective{.output = at::ones({1})}.IsEmpty());
  // This rank sends nothing and others may.
  EXPECT_FALSE((Collective{.kind = Kind::kAllToAllSized, .output = none, .input = none}.IsEmpty()));
  EXPECT_FALSE(Collective{.output = at::zeros({0, 2}).to_sparse()}.IsEmpty());
}

TEST(CollectiveTest, AGroupOfOneCopies) {
  const at::Tensor output = at::zeros({4});
  Collective{.kind = Kind::kAllGather, .output = output, .input = at::arange(4.0F).view({2, 2})}
      .CopyInGroupOfOne();
  EXPECT_TRUE(output.equal(at::arange(4.0F)));
}

TEST(CollectiveTest, NamesAreLiterals) {
  EXPECT_STREQ((Collective{.op = ReduceOp::kMax}.Name()), "all-reduce (maximum)");
  EXPECT_STREQ((Collective{.kind = Kind::kReduceScatter, .op = ReduceOp::kBitXor}.Name()),
               "reduce-scatter (bitwise xor)");
  EXPECT_FALSE((Collective{.kind = Kind::kBroadcast}.needs_all_ranks()));
}

}  // namespace
}  // namespace ddp::internal
