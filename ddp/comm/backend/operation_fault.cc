#include "ddp/comm/backend/operation_fault.h"

#include <gloo/common/error.h>

#include "ddp/common/error.h"

namespace ddp::internal {

OperationFault FaultOf(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerAbortedError&) {
    return OperationFault::kPeerAborted;
  } catch (const c10::DistNetworkError&) {
    return OperationFault::kConnection;
  } catch (const ::gloo::IoException&) {
    return OperationFault::kConnection;
  } catch (...) {
    return OperationFault::kOwn;
  }
}

std::string TextOf(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& thrown) {
    return MessageOf(thrown);
  }
}

}  // namespace ddp::internal
