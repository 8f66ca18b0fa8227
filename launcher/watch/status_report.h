#ifndef DDP_LAUNCHER_WATCH_STATUS_REPORT_H_
#define DDP_LAUNCHER_WATCH_STATUS_REPORT_H_

#include <string>
#include <vector>

#include "elastic/agent/job_status.h"

namespace ddp::launcher {

// Texts that `ddprun status` prints. Pure functions. Thread: any.

// Returns a job as a table for a person who was woken up: a line on the state of the job, a line
// for each problem, then nodes, ranks and the last failures. Shows at most `rows_max` nodes and as
// many ranks; if there are more, those with a problem come first. Plain ASCII, at most a few
// columns wider than the longest text in it.
std::string StatusTable(const elastic::JobStatus& status, size_t rows_max);

// Returns the problems of the job, a line each, the worst first; empty when the job has ended.
// Problems are expired leases, ranks without progress, stragglers, failing saves, a job below its
// full size, a spent budget.
std::vector<std::string> StatusWarnings(const elastic::JobStatus& status);

// Returns one JSON object, {"jobs": [...]}, with a newline. Unknown numbers are null.
// docs/watching.md is its schema.
std::string StatusJson(const std::vector<elastic::JobStatus>& jobs);

// Returns true when a rank that has a process stands still. Its last progress is then older than
// half a minute and older than ten steps of the fastest rank of its job. `steps_per_second` is the
// speed of that rank; zero or negative: unknown.
bool StandsStill(const elastic::RankRow& rank, double steps_per_second);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_WATCH_STATUS_REPORT_H_
