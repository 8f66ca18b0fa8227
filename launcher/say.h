#ifndef DDP_LAUNCHER_SAY_H_
#define DDP_LAUNCHER_SAY_H_

#include <string>

#include "absl/status/status.h"
#include "elastic/agent/say_line.h"

namespace ddp::launcher {

// Tells the user one line of ddprun's, without its line end, at once: where no LogRouter is, or
// none must be waited for. While workers run, use LogRouter::Say(), which never waits for a console
// that nobody reads.
inline void Say(const std::string& line) { elastic::SayOwnLine(line); }

inline void SayError(const absl::Status& status) { Say(std::string(status.message())); }

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_SAY_H_
