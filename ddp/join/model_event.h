#ifndef DDP_JOIN_MODEL_EVENT_H_
#define DDP_JOIN_MODEL_EVENT_H_

#include <cstdint>
#include <string>

#include "ddp/reducer/pass/pass_parts.h"

namespace ddp::internal {

// An event of one wrapped model that the ranks of a Join announce: the collectives that follow it.
struct ModelEvent {
  enum class Kind : uint8_t {
    kPass,     // one reduction of gradients, with `parts`
    kForward,  // a forward, with broadcasts of buffers
    kDelayed,  // the all-reduce of delayed gradients
  };

  Kind kind = Kind::kPass;
  PassParts parts = {};         // kPass
  bool buffers_before = false;  // kForward: a broadcast before it
  bool buffers_after = false;   // kForward: a broadcast after it

  // Converts to and from the event number of a Joinable.
  int Encode() const;
  static ModelEvent Decode(int number);

  // Returns the name of the event for a message, with its article.
  std::string ToString() const;

  friend bool operator==(const ModelEvent&, const ModelEvent&) = default;
};

}  // namespace ddp::internal

#endif  // DDP_JOIN_MODEL_EVENT_H_
