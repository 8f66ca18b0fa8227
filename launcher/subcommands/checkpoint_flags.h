#ifndef DDP_LAUNCHER_SUBCOMMANDS_CHECKPOINT_FLAGS_H_
#define DDP_LAUNCHER_SUBCOMMANDS_CHECKPOINT_FLAGS_H_

#include <array>

namespace ddp::launcher {

// A flag of `ddprun checkpoint`, for the parser and the shell completion.
struct CheckpointFlag {
  const char* name;  // without dashes
  bool takes_value;
  const char* verb;  // of which verb; empty: of all
  const char* help;  // a few words, without the characters '[]:
};

inline constexpr std::array kCheckpointFlags = {
    CheckpointFlag{"all", false, "verify", "every checkpoint of the folder, not only the newest"},
    CheckpointFlag{"keep-last", true, "prune", "how many of the newest complete ones stay"},
    CheckpointFlag{"dry-run", false, "prune", "tells what would be deleted, and deletes nothing"},
    CheckpointFlag{"json", false, "", "as JSON"},
    CheckpointFlag{"help", false, "", "what the verbs and flags mean"},
};

// The words behind `ddprun checkpoint`.
inline constexpr std::array kCheckpointVerbs = {"ls", "show", "verify", "diff", "prune"};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_SUBCOMMANDS_CHECKPOINT_FLAGS_H_
