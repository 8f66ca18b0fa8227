#ifndef DDP_LAUNCHER_METRICS_TEXT_H_
#define DDP_LAUNCHER_METRICS_TEXT_H_

#include <string>

#include "elastic/agent/job_status.h"

namespace ddp::launcher {

// What one node has to say to Prometheus, in its text format (the content type is
// kMetricsContentType). `status` is the agent's own: of its nodes, the first is this one. Numbers
// that are not known are left out. docs/watching.md lists the metrics.
//
// Pure; any thread.
std::string MetricsText(const elastic::JobStatus& status);

inline constexpr char kMetricsContentType[] = "text/plain; version=0.0.4; charset=utf-8";

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_METRICS_TEXT_H_
