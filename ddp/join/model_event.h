#ifndef DDP_JOIN_MODEL_EVENT_H_
#define DDP_JOIN_MODEL_EVENT_H_

#include <cstdint>
#include <string>

#include "ddp/reducer/pass/pass_parts.h"

namespace ddp::internal {

// An event that a wrapped model announces under a Join: it tells the joined ranks which collectives
// follow.
struct ModelEvent {
  enum class Kind : uint8_t {
    kPass,        // one reduction of gradients, with `parts`, and of delayed gradients if any
    kForward,     // a forward, with its synchronization of buffers if any
    kDelayed,     // the all-reduce of delayed gradients, in a model without buckets
    kStatistics,  // one sum of a layer's batch statistics: a header with its size, then the sum
  };

  Kind kind = Kind::kPass;
  PassParts parts = {};         // kPass
  bool buffers_before = false;  // kForward: buffers are synchronized before it
  bool buffers_after = false;   // kForward: buffers are synchronized after it

  // Converts to and from the event number of a Joinable.
  int Encode() const;
  static ModelEvent Decode(int number);

  // Returns the name of the event for a message, with its article.
  std::string ToString() const;

  friend bool operator==(const ModelEvent&, const ModelEvent&) = default;
};

}  // namespace ddp::internal

#endif  // DDP_JOIN_MODEL_EVENT_H_
