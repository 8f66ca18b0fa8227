#include "launcher/output/failure_report.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "elastic/error_file/error_record.h"

namespace ddp::launcher {
namespace {

constexpr size_t kMaxBorder = 60;
constexpr char kNoErrorFile[] = "<N/A>";

std::string Entry(size_t index, const ReportedFailure& failure) {
  // Further lines of the text stand under its first one.
  const std::string text =
      absl::StrReplaceAll(failure.text, {{"\n", absl::StrCat("\n", std::string(14, ' '))}});
  return absl::StrCat("[", index, "]:\n",                                                  //
                      "  time      : ", failure.time, "\n",                                //
                      "  host      : ", failure.host, "\n",                                //
                      "  rank      : ", failure.rank,                                      //
                      " (local_rank: ", failure.local_rank, ")\n",                         //
                      "  exitcode  : ", failure.exit_code, " (pid: ", failure.pid, ")\n",  //
                      "  error_file: ", failure.error_file, "\n",                          //
                      "  traceback : ", text, "\n");
}

size_t LongestLine(const std::string& text) {
  size_t longest = 0;
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  for (const std::string& line : lines) longest = std::max(longest, line.size());
  return longest;
}

// Returns the message and the call stack. Some writers begin the call stack with the message.
// Python ends it with the message, and torchrun then shows the call stack alone.
std::string OwnWords(const elastic::ErrorRecord& error, bool is_victim) {
  const std::string saw = is_victim ? "\n(it saw a peer fail first)" : "";
  if (absl::EndsWith(error.callstack, error.message)) return absl::StrCat(error.callstack, saw);
  const absl::string_view callstack =
      absl::StripPrefix(error.callstack, absl::StrCat(error.message, "\n"));
  return absl::StrCat(error.message, saw, callstack.empty() ? "" : "\n", callstack);
}

// Returns the text about a worker that wrote no error file.
std::string WithoutErrorFile(const elastic::WorkerFailure& failure) {
  const bool is_exit = failure.status.signal == 0 && failure.status.cause.empty() &&
                       !failure.was_stopped && failure.instead.empty();
  return absl::StrCat(AgentsWords(failure),
                      is_exit ? " and wrote no error file; its own output says more" : "");
}

}  // namespace

std::string FormatFailureReport(const std::string& entrypoint,
                                const std::vector<ReportedFailure>& failures,
                                const std::string& elsewhere) {
  const std::string title = absl::StrCat(entrypoint, " FAILED");
  const size_t first_other = elsewhere.empty() ? 1 : 0;
  std::string others;
  for (size_t i = first_other; i < failures.size(); ++i) {
    absl::StrAppend(&others, Entry(i, failures[i]));
  }
  if (others.empty()) others = "  <NO_OTHER_FAILURES>\n";
  const std::string root =
      elsewhere.empty() ? Entry(0, failures.at(0)) : absl::StrCat("  ", elsewhere, "\n");
  const size_t width =
      std::min(kMaxBorder, std::max({title.size(), LongestLine(others), LongestLine(root)}));
  const std::string border(width, '=');
  const std::string section(width, '-');
  return absl::StrCat(border, "\n", title, "\n", section, "\nFailures:\n", others, section,
                      "\nRoot Cause (first observed failure):\n", root, border, "\n");
}

std::string AgentsWords(const elastic::WorkerFailure& failure) {
  const int signal = failure.status.signal;
  if (!failure.instead.empty() && !failure.was_stopped) {
    const std::string end =
        failure.pid > 0 ? absl::StrCat(": told to end, it ", elastic::DescribeExit(failure.status))
                        : "";
    return absl::StrCat("The worker ", failure.instead, end);
  }
  const std::string text =
      signal != 0 ? absl::StrCat("Signal ", signal, " (", elastic::SignalName(signal),
                                 ") received by PID ", failure.pid,
                                 failure.status.cause.empty() ? "" : ", ", failure.status.cause)
                  : absl::StrCat("The worker ", elastic::DescribeExit(failure.status));
  return failure.was_stopped ? absl::StrCat(text, ": stopped because of the root cause") : text;
}

std::string DescribeCauseElsewhere(const elastic::JobResult& result) {
  if (result.cause_elsewhere.empty()) return "";
  switch (result.end) {
    case elastic::JobEndReason::kWorkerFailed:
    case elastic::JobEndReason::kBudgetSpent:
    case elastic::JobEndReason::kNoProgress:
      break;
    default:  // not a worker's failure, or the text names the worker
      return result.cause_elsewhere;
  }
  const std::string host =
      result.cause_host.empty() ? "" : absl::StrCat(" (", result.cause_host, ")");
  return absl::StrCat("on another node", host, ": ", result.cause_elsewhere);
}

ReportedFailure DescribeFailure(const elastic::WorkerFailure& failure,
                                const ReportContext& context) {
  ReportedFailure result;
  result.rank = failure.rank;
  result.local_rank = failure.local_rank;
  result.pid = failure.pid;
  result.exit_code = failure.status.signal != 0 ? -failure.status.signal : failure.status.exit_code;
  result.host = context.host;
  result.error_file = kNoErrorFile;
  result.text = WithoutErrorFile(failure);
  absl::Time time = failure.wall_time;
  if (!failure.error_file.empty()) {
    const absl::StatusOr<elastic::ErrorRecord> error = elastic::ReadErrorRecord(failure.error_file);
    if (error.ok()) {
      result.error_file = failure.error_file;
      result.text = OwnWords(*error, failure.is_victim);
      // The worker's own words do not say that it did not end by itself.
      if (!failure.instead.empty() && !failure.was_stopped) {
        result.text = absl::StrCat(AgentsWords(failure), "\n", result.text);
      }
      if (error->time != absl::InfinitePast()) time = error->time;
    } else if (!absl::IsNotFound(error.status())) {
      result.error_file = failure.error_file;
      result.text = absl::StrCat(AgentsWords(failure), "\n(the error file cannot be used: ",
                                 std::string(error.status().message()), ")");
    }
  }
  result.time = absl::FormatTime("%Y-%m-%d_%H:%M:%S", time, context.time_zone);
  return result;
}

}  // namespace ddp::launcher
