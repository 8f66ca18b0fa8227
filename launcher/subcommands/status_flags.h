#ifndef DDP_LAUNCHER_SUBCOMMANDS_STATUS_FLAGS_H_
#define DDP_LAUNCHER_SUBCOMMANDS_STATUS_FLAGS_H_

#include <array>

namespace ddp::launcher {

// A flag of `ddprun status`, for the parser and the shell completion.
struct StatusFlag {
  const char* name;  // name without dashes
  bool takes_value;
  const char* help;  // a few words, without the characters '[]:
};

constexpr std::array kStatusFlags = {
    StatusFlag{"rdzv-backend", true, "redis, c10d or static, as the job was started"},
    StatusFlag{"rdzv-endpoint", true, "the Redis server of the job"},
    StatusFlag{"rdzv-id", true, "the job there"},
    StatusFlag{"instance", true, "which of the jobs that had this id"},
    StatusFlag{"json", false, "as JSON"},
    StatusFlag{"all", false, "every node and rank"},
    StatusFlag{"help", false, "what the flags mean"},
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_SUBCOMMANDS_STATUS_FLAGS_H_
