#ifndef DDP_LAUNCHER_OUTPUT_SAY_H_
#define DDP_LAUNCHER_OUTPUT_SAY_H_

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "elastic/agent/say_line.h"

namespace ddp::launcher {

// Prints one line of ddprun's own on stderr, given without its newline, at once. Blocks while
// stderr is full and nobody reads it; after `patience` the line is lost. Use it where there is no
// LogRouter. While workers run, use LogRouter::Say(), which never blocks on a console.
inline void Say(const std::string& line, absl::Duration patience = absl::InfiniteDuration()) {
  elastic::SayOwnLine(line, patience);
}

inline void SayError(const absl::Status& status,
                     absl::Duration patience = absl::InfiniteDuration()) {
  Say(std::string(status.message()), patience);
}

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OUTPUT_SAY_H_
