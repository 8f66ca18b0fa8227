#ifndef DDP_COMM_GROUP_ERROR_H_
#define DDP_COMM_GROUP_ERROR_H_

#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/common/error.h"
#include "ddp/health/group_health.h"

namespace ddp::internal {

// Throws `error`, a decision of GroupHealth, as the exception of its kind. First reports its
// message to all ranks when this rank is the cause.
[[noreturn]] inline void ThrowGroupError(FailureMonitor& monitor, const GroupError& error) {
  if (error.is_cause) monitor.Report(error.message);
  switch (error.kind) {
    case GroupError::Kind::kPeerFailed:
      throw PeerFailedError(error.peer, error.message);
    case GroupError::Kind::kReduction:
      throw ReductionError(error.message);
    case GroupError::Kind::kCommunication:
      break;
  }
  throw CommunicationError(error.message);
}

}  // namespace ddp::internal

#endif  // DDP_COMM_GROUP_ERROR_H_
