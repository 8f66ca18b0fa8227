#include "ddp/comm/backend/nccl_backend.h"

#include <ATen/Functions.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "ddp/common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(NcclBackendTest, SumsOnTheGpu) {
  if (VisibleCudaDevices() == 0)
    GTEST_SKIP() << "built without --config=cuda, or no CUDA device here";
  const auto backend = MakeNcclBackend(c10::make_intrusive<c10d::HashStore>(), {});
  std::vector<at::Tensor> tensors = {at::ones({1024}, at::TensorOptions().device(at::kCUDA))};
  backend->allreduce(tensors, c10d::AllreduceOptions())->wait();
  EXPECT_EQ(tensors[0].sum().item<float>(), 1024);
}

TEST(NcclBackendTest, SaysWhatIsMissing) {
  if (VisibleCudaDevices() > 0) GTEST_SKIP() << "nothing is missing here";
  try {
    MakeNcclBackend(c10::make_intrusive<c10d::HashStore>(), {});
    FAIL() << "made a backend without a GPU";
  } catch (const ConfigurationError& error) {
    EXPECT_THAT(error.what(), ::testing::AnyOf(::testing::HasSubstr("--config=cuda"),
                                               ::testing::HasSubstr("this process sees 0")));
  }
}

}  // namespace
}  // namespace ddp::internal
