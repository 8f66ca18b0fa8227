#ifndef DDP_LAUNCHER_CHECKPOINT_CHECKPOINT_COMMAND_H_
#define DDP_LAUNCHER_CHECKPOINT_CHECKPOINT_COMMAND_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::launcher {

// `ddprun checkpoint`: looks at the checkpoints of a job, verifies, compares and removes them.
// Needs no job, no store and no LibTorch.

// Parsed arguments of `ddprun checkpoint`.
struct CheckpointRequest {
  enum class Verb { kList, kShow, kVerify, kDiff, kPrune };

  bool help = false;  // then no other field counts
  Verb verb = Verb::kList;
  std::vector<std::string> paths;  // two for kDiff, else one
  bool json = false;
  bool all = false;      // of kVerify: every checkpoint of a folder
  int keep_last = 0;     // of kPrune: at least 1
  bool dry_run = false;  // of kPrune
};

// Parses the arguments behind `checkpoint`. Pure. Errors: kInvalidArgument, one line that names the
// argument and what is expected.
absl::StatusOr<CheckpointRequest> ParseCheckpointArguments(
    const std::vector<std::string>& arguments);

// Prints the report on stdout, and errors on stderr, a line each. While bytes are read, and stderr
// is a terminal, a line there shows how far the reading is. `arguments` begin with `checkpoint`.
// Returns the exit code:
// - 0: done, and nothing is wrong.
// - 1: a checkpoint is damaged, or two differ.
// - 2: a mistake on the command line.
// - 3: a folder or a checkpoint cannot be read or removed.
int RunCheckpointCommand(const std::vector<std::string>& arguments);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_CHECKPOINT_CHECKPOINT_COMMAND_H_
