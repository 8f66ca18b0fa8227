#ifndef DDP_ELASTIC_AGENT_SAY_LINE_H_
#define DDP_ELASTIC_AGENT_SAY_LINE_H_

#include <poll.h>
#include <unistd.h>

#include <string>

#include "absl/time/time.h"

namespace ddp::elastic {

// Writes one line to stderr for the user, in one write, so that it does not mix with the output of
// workers. Errors are ignored: there is no other place to report them. When nobody reads stderr for
// `patience`, the line is lost; an infinite one blocks for ever.
inline void SayLine(const std::string& line, absl::Duration patience = absl::InfiniteDuration()) {
  if (patience != absl::InfiniteDuration()) {
    pollfd polled{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
    if (::poll(&polled, 1, static_cast<int>(absl::ToInt64Milliseconds(patience))) != 1) return;
  }
  const std::string text = line + "\n";
  (void)!write(STDERR_FILENO, text.data(), text.size());
}

// The same with the prefix "ddprun: ".
inline void SayOwnLine(const std::string& line,
                       absl::Duration patience = absl::InfiniteDuration()) {
  SayLine("ddprun: " + line, patience);
}

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_SAY_LINE_H_
