#ifndef DDP_LAUNCHER_FAILURE_REPORT_H_
#define DDP_LAUNCHER_FAILURE_REPORT_H_

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "elastic/agent/worker_failure.h"

namespace ddp::launcher {

// One failed worker as the report shows it. All of it is text for people.
struct ReportedFailure {
  int rank = 0;
  int local_rank = 0;
  int pid = 0;
  int exit_code = 0;  // minus the signal where one killed the worker, as torchrun shows it
  std::string host;
  std::string time;        // "2026-11-21_01:36:32"
  std::string error_file;  // its path, or "<N/A>" when the worker wrote none
  std::string text;        // of the exception, or what is known without one; may have many lines
};

// The report that ends the output of a failed job, laid out as torchrun's, because people and
// programs look for it there. `failures` begins with the root cause; where that is none of this
// node's workers, `elsewhere` says in one line what and where it was, and all of `failures`, if
// there are any, are the others. Ends in a newline. Pure; any thread.
std::string FormatFailureReport(const std::string& entrypoint,
                                const std::vector<ReportedFailure>& failures,
                                const std::string& elsewhere = "");

// `elsewhere` of a job that ended so; empty where the root cause is here, or nothing failed. Pure.
std::string DescribeCauseElsewhere(const elastic::JobResult& result);

// Where and when a report is made.
struct ReportContext {
  std::string host;
  absl::TimeZone time_zone = absl::LocalTimeZone();
};

// How a worker ended, in the agent's words, whatever it says itself. Pure.
std::string AgentsWords(const elastic::WorkerFailure& failure);

// Adds to `failure` what the worker said in its error file. A file that cannot be understood
// becomes part of the text; nothing in it can do harm. Reads the file; any thread.
ReportedFailure DescribeFailure(const elastic::WorkerFailure& failure,
                                const ReportContext& context);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FAILURE_REPORT_H_
