#include "launcher/failure_report.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "elastic/health/error_record.h"

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

// What is known of a worker that said nothing itself.
std::string WithoutErrorFile(const elastic::WorkerFailure& failure) {
  const int signal = failure.status.signal;
  std::string text = signal != 0
                         ? absl::StrCat("Signal ", signal, " (", elastic::SignalName(signal),
                                        ") received by PID ", failure.pid)
                         : absl::StrCat("The worker ", elastic::DescribeExit(failure.status));
  if (failure.was_stopped) return absl::StrCat(text, ": stopped because of the root cause");
  if (!failure.instead.empty()) {
    return absl::StrCat("The worker ", failure.instead, failure.pid > 0 ? ": killed" : "");
  }
  if (signal == 0) absl::StrAppend(&text, " and wrote no error file; its own output says more");
  return text;
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
  const std::string root = elsewhere.empty() ? Entry(0, failures.at(0))
                                             : absl::StrCat("  on another node: ", elsewhere, "\n");
  const size_t width =
      std::min(kMaxBorder, std::max({title.size(), LongestLine(others), LongestLine(root)}));
  const std::string border(width, '=');
  const std::string section(width, '-');
  return absl::StrCat(border, "\n", title, "\n", section, "\nFailures:\n", others, section,
                      "\nRoot Cause (first observed failure):\n", root, border, "\n");
}

std::vector<elastic::WorkerFailure> RootCauseFirst(std::vector<elastic::WorkerFailure> failures) {
  const auto root =
      std::find_if(failures.begin(), failures.end(),
                   [](const elastic::WorkerFailure& f) { return !f.is_victim && !f.was_stopped; });
  if (root != failures.end()) std::rotate(failures.begin(), root, root + 1);
  return failures;
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
      result.text = error->message;
      if (failure.is_victim) absl::StrAppend(&result.text, "\n(it saw a peer fail first)");
      // Some writers begin the call stack with the message.
      const absl::string_view callstack =
          absl::StripPrefix(error->callstack, absl::StrCat(error->message, "\n"));
      if (!callstack.empty()) absl::StrAppend(&result.text, "\n", callstack);
      if (error->time != absl::InfinitePast()) time = error->time;
    } else if (!absl::IsNotFound(error.status())) {
      result.error_file = failure.error_file;
      absl::StrAppend(&result.text,
                      "\n(the error file cannot be used: ", std::string(error.status().message()),
                      ")");
    }
  }
  result.time = absl::FormatTime("%Y-%m-%d_%H:%M:%S", time, context.time_zone);
  return result;
}

}  // namespace ddp::launcher
