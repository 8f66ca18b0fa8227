#ifndef DDP_ELASTIC_AGENT_SAY_LINE_H_
#define DDP_ELASTIC_AGENT_SAY_LINE_H_

#include <unistd.h>

#include <string>

namespace ddp::elastic {

// Writes one line to stderr for the user, in one write, so that it does not mix with the output of
// workers. Errors are ignored: there is no other place to report them.
inline void SayLine(const std::string& line) {
  const std::string text = line + "\n";
  (void)!write(STDERR_FILENO, text.data(), text.size());
}

// The same with the prefix "ddprun: ".
inline void SayOwnLine(const std::string& line) { SayLine("ddprun: " + line); }

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_SAY_LINE_H_
