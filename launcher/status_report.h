#ifndef DDP_LAUNCHER_STATUS_REPORT_H_
#define DDP_LAUNCHER_STATUS_REPORT_H_

#include <string>
#include <vector>

#include "elastic/agent/job_status.h"

namespace ddp::launcher {

// What `ddprun status` prints. Pure functions; any thread.

// A job for a person who was woken up: one line on where the job is, one for each thing that is not
// as it should be, then nodes, ranks and the last failures. At most `rows_max` nodes and as many
// ranks; where there are more, those that something is wrong with come first. Plain ASCII, at most
// a few columns wide more than the longest text in it.
std::string StatusTable(const elastic::JobStatus& status, size_t rows_max);

// What is wrong, a line each, the worst first: nodes whose lease has run out, ranks that make no
// progress, stragglers, a job that is not at its full size, a budget that is spent.
std::vector<std::string> StatusWarnings(const elastic::JobStatus& status);

// One JSON object per call, {"jobs": [...]}, with a line end. Numbers that are not known are null.
// docs/watching.md is its schema.
std::string StatusJson(const std::vector<elastic::JobStatus>& jobs);

// Whether a rank that has committed nothing for so long stands still: longer than half a minute,
// and than ten steps of the fastest rank of its job (`steps_per_second`; negative: not known).
bool StandsStill(const elastic::RankRow& rank, double steps_per_second);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_STATUS_REPORT_H_
