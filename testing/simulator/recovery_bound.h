#ifndef DDP_TESTING_SIMULATOR_RECOVERY_BOUND_H_
#define DDP_TESTING_SIMULATOR_RECOVERY_BOUND_H_

#include <cstdint>

#include "testing/simulator/story.h"

namespace ddp::testing {

// Returns the longest time, in microseconds, that a job may be without a running generation,
// according to its options. The time begins with the last of overlapping faults, while the store is
// up and enough nodes are there. It ends when every rank of a new generation was started, or the
// job has ended. It is the sum of:
//
//     lease of a lost node expires, or membership is frozen as long   lease
//   + hanging worker is found                                         HangLimitUs()
//   + heartbeat of a remaining node finds the loss                    heartbeat
//   + all nodes are notified; a broken connection is found by use     heartbeat, pause
//   + workers end, by SIGKILL if need be                              shutdown timeout, grace
//   + strays of the workers end, where that is slow                   the longest time
//   + nodes leave by a request; requests under way time out           two timeouts of requests
//   + all nodes have joined and have their placement                  pauses, heartbeats
//   + workers are started, where that is slow                         the longest time, each
//   + last call, for a job that has not begun
//
// `has_begun`: the job has had a generation.
int64_t RecoveryBoundUs(const Story& story, bool has_begun);

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_RECOVERY_BOUND_H_
