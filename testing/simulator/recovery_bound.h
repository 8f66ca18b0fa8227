#ifndef DDP_TESTING_SIMULATOR_RECOVERY_BOUND_H_
#define DDP_TESTING_SIMULATOR_RECOVERY_BOUND_H_

#include <cstdint>

#include "testing/simulator/story.h"

namespace ddp::testing {

// For how long, in microseconds, a job may be without a generation that runs, as its options say:
// from the last of faults that overlap, the store being up and enough nodes there, to the moment at
// which every rank of a new generation was started, or the job has ended.
//
//     a lost node's lease runs out, or membership is frozen as long   lease
//   + a worker that hangs is found                                  HangLimitUs()
//   + one that is left beats in full, and finds it out                two heartbeats; where few
//                                                                    are left as long as they are
//                                                                    heard lightly in between
//   + everybody is told, whose connection has broken by using it      heartbeat, pause
//   + workers end, by force if need be                                shutdown timeout, grace
//   + what they leave behind ends, where that is slow                 the most that it takes
//   + who leaves says so; what was on its way is given up             two timeouts of requests
//   + all are back, and are told their places                         pauses, heartbeats
//   + workers are started, where that is slow                         the most that it takes, each
//   + where the job has not begun: the last call
//
// `nodes`: how many are left; the fewer, the longer. `has_begun`: it has had a generation.
int64_t RecoveryBoundUs(const Story& story, int nodes, bool has_begun);

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_RECOVERY_BOUND_H_
