#ifndef DDP_LAUNCHER_WATCH_JOB_MARKER_H_
#define DDP_LAUNCHER_WATCH_JOB_MARKER_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ddp::launcher {

// One agent of a job that runs on this host for this user. `ddprun status`, called without
// --rdzv-endpoint, finds jobs by these markers, also jobs on a private server. An agent that has
// reached the rendezvous writes its marker into the file `job.json` in its runtime folder. The
// file is removed with the folder when the agent has ended.
struct JobMarker {
  std::string run_id;
  int64_t instance = 0;  // instance of the run id
  std::string endpoint;  // "host:port" or "unix:///path", as in --rdzv-endpoint; no secrets
  bool with_credentials = false;  // endpoint requires those of DDP_REDIS_USER, ..., or `password`
  std::string password;  // random one, made by ddprun for this job, never the user's; empty: none
  pid_t agent_pid = 0;
};

// Writes the marker into `runtime_folder`, atomically. MakePrivateFolder() made the folder, with
// kRuntimeFolderPrefix. Errors: kInternal, names the file.
absl::Status WriteJobMarker(const std::string& runtime_folder, const JobMarker& marker);

// Returns the markers in the folders directly below `parents`, sorted by run id and instance. Two
// agents of one job on this host are two markers. Reads only folders and files that belong to this
// user and that nobody else can access. Skips invalid markers and those of agents that have ended.
// Looks at no more than 10,000 folders of each parent.
std::vector<JobMarker> FindJobMarkers(const std::vector<std::string>& parents);

// Returns the folders in which MakePrivateFolder() makes folders: /tmp, and TMPDIR where it is set
// to an absolute path.
std::vector<std::string> RuntimeFolderParents();

inline constexpr char kRuntimeFolderPrefix[] = "ddprun_";

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_WATCH_JOB_MARKER_H_
