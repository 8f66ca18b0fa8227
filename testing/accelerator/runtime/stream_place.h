#ifndef DDP_TESTING_ACCELERATOR_RUNTIME_STREAM_PLACE_H_
#define DDP_TESTING_ACCELERATOR_RUNTIME_STREAM_PLACE_H_

#include <compare>
#include <cstdint>

namespace ddp::testing {

// Names a stream: stream 0 of a device is its default stream.
struct StreamPlace {
  int device = 0;
  int64_t stream = 0;

  friend auto operator<=>(const StreamPlace&, const StreamPlace&) = default;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_RUNTIME_STREAM_PLACE_H_
