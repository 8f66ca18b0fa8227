#ifndef DDP_COMM_REPORTS_RENEWAL_H_
#define DDP_COMM_REPORTS_RENEWAL_H_

#include <memory>
#include <optional>

#include "absl/time/time.h"
#include "ddp/comm/meeting/group_store.h"
#include "ddp/comm/reports/report_log.h"
#include "ddp/common/membership.h"
#include "ddp/health/group_failure.h"

namespace ddp::internal {

// Renews a group after a failure: waits in the store until all ranks of `next`, the incarnation
// that they will build, have called this function. Returns nullopt when all have come. Otherwise
// returns a rank that will not come: its process is gone, it has left the group, or `timeout` has
// passed. Every rank gets the same answer, also a rank that calls later.
//
// When a rank is missing after 200 ms, and again every 3 s, one rank asks all where they are (see
// ReportLog::AskWhere). A missing rank that does not answer within 3 s counts as gone.
//
// Blocks the calling thread. Throws what the store throws; the call may then be repeated.
std::optional<GroupFailure> MeetForRenewal(const std::shared_ptr<GroupStore>& store, ReportLog& log,
                                           const Membership& next, absl::Duration timeout);

}  // namespace ddp::internal

#endif  // DDP_COMM_REPORTS_RENEWAL_H_
