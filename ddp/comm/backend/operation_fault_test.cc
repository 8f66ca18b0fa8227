#include "ddp/comm/backend/operation_fault.h"

#include <stdexcept>

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(OperationFaultTest, TheTypeDecidesAndNotTheText) {
  const auto fault_of = [](auto error) { return FaultOf(std::make_exception_ptr(error)); };
  EXPECT_EQ(fault_of(std::runtime_error("Connection closed by peer")), OperationFault::kOwn);
  EXPECT_EQ(fault_of(C10_BUILD_ERROR(DistNetworkError, "x")), OperationFault::kConnection);
  EXPECT_EQ(fault_of(C10_BUILD_ERROR(DistBackendError, "rank 1 has aborted the group")),
            OperationFault::kOwn);
  EXPECT_EQ(fault_of(PeerAbortedError({}, "x")), OperationFault::kPeerAborted);
}

}  // namespace
}  // namespace ddp::internal
