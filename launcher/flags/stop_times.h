#ifndef DDP_LAUNCHER_FLAGS_STOP_TIMES_H_
#define DDP_LAUNCHER_FLAGS_STOP_TIMES_H_

#include "absl/status/status.h"
#include "elastic/job/job_spec.h"
#include "launcher/flags/flag_reader.h"
#include "launcher/flags/host_resources.h"

namespace ddp::launcher {

// Reads the flags that bound the end of workers and of the job into `times`.
absl::Status ReadStopTimes(const FlagReader& flags, const HostResources& host,
                           elastic::AgentTimes& times);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FLAGS_STOP_TIMES_H_
