#ifndef DDP_LAUNCHER_WATCH_METRICS_TEXT_H_
#define DDP_LAUNCHER_WATCH_METRICS_TEXT_H_

#include <string>

#include "elastic/agent/job_status.h"

namespace ddp::launcher {

// Returns one node's metrics in Prometheus' text format (content type kMetricsContentType).
// `status` is the agent's own; its first node is this one. Unknown numbers are left out.
// docs/watching.md lists the metrics. Pure. Thread: any.
std::string MetricsText(const elastic::JobStatus& status);

inline constexpr char kMetricsContentType[] = "text/plain; version=0.0.4; charset=utf-8";

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_WATCH_METRICS_TEXT_H_
