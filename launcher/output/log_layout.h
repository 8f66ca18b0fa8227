#ifndef DDP_LAUNCHER_OUTPUT_LOG_LAYOUT_H_
#define DDP_LAUNCHER_OUTPUT_LOG_LAYOUT_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "launcher/output/log_files.h"

namespace ddp::launcher {

// Makes the folder of each worker and names the files in it. The layout is torchrun's:
//   <log_dir>/<run id>_<random>/attempt_<n>/<local rank>/{stdout.log,stderr.log,error.json}
//   <log_dir>/<run id>_<random>/attempt_<n>/{filtered_stdout.log,filtered_stderr.log}
//
// n is the number of failures that the job was charged so far. A change of members starts the
// workers again under the same n. Their files are then in attempt_<n>.g<generation>, so that the
// files of the earlier generation stay as they are.
//
// Use one LogLayout for all worker folders of a job: it remembers the first generation of each
// attempt, and its copies learn nothing of later ones. Thread-compatible.
class LogLayout {
 public:
  // Files of one worker in one attempt. All empty when there are no files (--log-dir=/dev/null).
  struct WorkerFiles {
    std::string folder;
    std::string stdout_log;
    std::string stderr_log;
    std::string error_file;
    // Files that all workers of the attempt share: the lines that match a filter.
    std::string filtered_stdout;
    std::string filtered_stderr;
  };

  // Layout without files: workers get no error file, and redirected output is dropped.
  LogLayout() = default;

  // Makes `<log_dir>/<run id>_<random>` and the folders above it. Characters of the run id that
  // cannot stand in a file name become `_`. "/dev/null" gives the same as LogLayout(). Others can
  // read the folder if they can read `log_dir`; they can write no folder that this function makes.
  // Errors: kInvalidArgument, names the folder and the reason.
  static absl::StatusOr<LogLayout> Create(const std::string& log_dir, const std::string& run_id);

  // Makes the folder of a worker, and the folders above it where something has removed them.
  // `generation` must never decrease. Follows no link. Errors: as MakeLogFolder();
  // kFailedPrecondition means that another user can write a folder or has put a link in its place.
  absl::StatusOr<WorkerFiles> MakeWorkerFolder(int attempt, uint64_t generation, int local_rank);

  // Returns `<log_dir>/<run id>_<random>`; empty when there are no files.
  const std::string& root() const { return root_.path; }

  // Opens a file that MakeWorkerFolder() has named, for appending. Errors: as OpenLogFile().
  absl::StatusOr<UniqueFd> OpenFile(const std::string& path) const;

 private:
  explicit LogLayout(LogRoot root);

  LogRoot root_;
  std::map<int, uint64_t> first_generation_;  // first generation of each attempt
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OUTPUT_LOG_LAYOUT_H_
