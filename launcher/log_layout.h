#ifndef DDP_LAUNCHER_LOG_LAYOUT_H_
#define DDP_LAUNCHER_LOG_LAYOUT_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "launcher/log_files.h"

namespace ddp::launcher {

// Where the files of each worker are: as torchrun's,
//   <log_dir>/<run id>_<random>/attempt_<n>/<local rank>/{stdout.log,stderr.log,error.json}
//
// where n is the number of failures that the job was charged so far. A change of members starts the
// workers again under the same n: their files are then in attempt_<n>.g<generation>, so that those
// of the generation before stay as they are.
//
// A value. Thread-compatible.
class LogLayout {
 public:
  // Of one worker in one attempt. All empty where there are no files (--log-dir=/dev/null).
  struct WorkerFiles {
    std::string folder;
    std::string stdout_log;
    std::string stderr_log;
    std::string error_file;
    // Of all workers of the attempt together: the lines that match a filter.
    std::string filtered_stdout;
    std::string filtered_stderr;
  };

  // No files: workers get no error file, and redirected output is dropped.
  LogLayout() = default;

  // Makes `<log_dir>/<run id>_<random>` and the folders above it. Characters of the run id that
  // cannot stand in a file name become `_`. With "/dev/null" the same as LogLayout(). Others may
  // read what they may read in `log_dir`; no folder that this makes can be written by others.
  // Errors: kInvalidArgument, names the folder and why it cannot be made.
  static absl::StatusOr<LogLayout> Create(const std::string& log_dir, const std::string& run_id);

  // Makes the folder of a worker. Generations never go back. Follows no link.
  // Errors: kFailedPrecondition (another user can write a folder or has put a link in its place),
  // kInternal (another reason). Both name the folder.
  absl::StatusOr<WorkerFiles> MakeWorkerFolder(int attempt, uint64_t generation, int local_rank);

  // `<log_dir>/<run id>_<random>`; empty where there are no files.
  const std::string& root() const { return root_.path; }

  // Opens one of the files that MakeWorkerFolder has named, for appending (OpenLogFile).
  absl::StatusOr<UniqueFd> OpenFile(const std::string& path) const;

 private:
  explicit LogLayout(LogRoot root);

  LogRoot root_;
  std::map<int, uint64_t> first_generation_;  // by attempt
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_LOG_LAYOUT_H_
