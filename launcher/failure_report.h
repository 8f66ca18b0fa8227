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
// programs look for it there. `failures` begins with the root cause and must not be empty; where
// the root cause is on another node, `elsewhere` says in one line what it was, and all of
// `failures` are the others. Ends in a newline. Pure; any thread.
std::string FormatFailureReport(const std::string& entrypoint,
                                const std::vector<ReportedFailure>& failures,
                                const std::string& elsewhere = "");

// Where and when a report is made.
struct ReportContext {
  std::string host;
  absl::TimeZone time_zone = absl::LocalTimeZone();
};

// Puts the root cause first: the first failure, in the order given, of a worker that was neither
// stopped by the agent nor a victim of another failure. The others keep their order. Pure.
std::vector<elastic::WorkerFailure> RootCauseFirst(std::vector<elastic::WorkerFailure> failures);

// Adds to `failure` what the worker said in its error file. A file that cannot be understood
// becomes part of the text; nothing in it can do harm. Reads the file; any thread.
ReportedFailure DescribeFailure(const elastic::WorkerFailure& failure,
                                const ReportContext& context);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FAILURE_REPORT_H_
