#ifndef DDP_LAUNCHER_OUTPUT_SAY_H_
#define DDP_LAUNCHER_OUTPUT_SAY_H_

#include <string>

#include "absl/status/status.h"
#include "elastic/agent/say_line.h"

namespace ddp::launcher {

// Prints one line of ddprun's own on stderr, given without its newline, at once. May block: use it
// where there is no LogRouter. While workers run, use LogRouter::Say(), which never blocks on a
// console.
inline void Say(const std::string& line) { elastic::SayOwnLine(line); }

inline void SayError(const absl::Status& status) { Say(std::string(status.message())); }

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OUTPUT_SAY_H_
