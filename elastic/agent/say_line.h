#ifndef DDP_ELASTIC_AGENT_SAY_LINE_H_
#define DDP_ELASTIC_AGENT_SAY_LINE_H_

#include <unistd.h>

#include <string>

namespace ddp::elastic {

// Tells the user one line, on stderr, in one write, so that it does not mix with what workers
// print. What cannot be written is lost: nobody reads it.
inline void SayLine(const std::string& line) {
  const std::string text = line + "\n";
  (void)!write(STDERR_FILENO, text.data(), text.size());
}

// The same for a line of ddprun's, which says so.
inline void SayOwnLine(const std::string& line) { SayLine("ddprun: " + line); }

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_SAY_LINE_H_
