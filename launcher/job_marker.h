#ifndef DDP_LAUNCHER_JOB_MARKER_H_
#define DDP_LAUNCHER_JOB_MARKER_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ddp::launcher {

// How `ddprun status` finds the jobs of this user that run on this host, those on a private server
// included, without being told an endpoint: each agent leaves a file `job.json` in its runtime
// folder, which goes with the folder when the job has ended.
struct JobMarker {
  std::string run_id;
  int64_t instance = 0;  // of the run id
  std::string endpoint;  // "host:port", "unix:///path": as --rdzv-endpoint takes it; no secrets
  bool with_credentials = false;  // the endpoint wants those of DDP_REDIS_USER, ...
  pid_t agent_pid = 0;
};

// Writes the marker into `runtime_folder` (see MakePrivateFolder; its name begins with
// kRuntimeFolderPrefix). Errors: kInternal, names the file.
absl::Status WriteJobMarker(const std::string& runtime_folder, const JobMarker& marker);

// The markers in the folders directly below `parents`, by run id and instance. Believes only what
// this user alone can have written; skips what is no marker, or whose agent has ended. Two agents
// of one job on this host are two markers.
std::vector<JobMarker> FindJobMarkers(const std::vector<std::string>& parents);

// Where MakePrivateFolder makes folders: TMPDIR where that is set, and /tmp.
std::vector<std::string> RuntimeFolderParents();

inline constexpr char kRuntimeFolderPrefix[] = "ddprun_";

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_JOB_MARKER_H_
