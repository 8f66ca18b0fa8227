#ifndef DDP_LAUNCHER_OUTPUT_FAILURE_REPORT_H_
#define DDP_LAUNCHER_OUTPUT_FAILURE_REPORT_H_

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "elastic/agent/job_result.h"
#include "elastic/agent/worker_failure.h"

namespace ddp::launcher {

// A failed worker as the report shows it. All texts are for people.
struct ReportedFailure {
  int rank = 0;
  int local_rank = 0;
  int pid = 0;
  int exit_code = 0;  // minus N when signal N killed the worker, as in torchrun
  std::string host;
  std::string time;        // "2026-11-21_01:36:32"
  std::string error_file;  // path, or "<N/A>" when the worker wrote none
  std::string text;        // exception, or the agent's account; may have many lines
};

// Returns the report that ends the output of a failed job, with a newline at its end. Its layout is
// torchrun's, because people and programs search for it. `failures` begins with the root cause and
// is not empty. If `elsewhere` is not empty, the root cause is no worker of this node: `elsewhere`
// describes it in one line, and `failures` are the others, if any. Pure. Thread: any.
std::string FormatFailureReport(const std::string& entrypoint,
                                const std::vector<ReportedFailure>& failures,
                                const std::string& elsewhere = "");

// Returns the argument `elsewhere` of FormatFailureReport(); empty if the root cause is on this
// node or nothing failed. Pure.
std::string DescribeCauseElsewhere(const elastic::JobResult& result);

// Host and time zone that a report shows.
struct ReportContext {
  std::string host;
  absl::TimeZone time_zone = absl::LocalTimeZone();
};

// Returns the agent's account of how a worker ended, whatever its error file says. Pure.
std::string AgentsWords(const elastic::WorkerFailure& failure);

// Returns `failure` as the report shows it, with the text of the worker's error file, if any. If
// the file is malformed, the text says why, not what is in it. Reads the file. Thread: any.
ReportedFailure DescribeFailure(const elastic::WorkerFailure& failure,
                                const ReportContext& context);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OUTPUT_FAILURE_REPORT_H_
