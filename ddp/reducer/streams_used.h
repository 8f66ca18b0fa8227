#ifndef DDP_REDUCER_STREAMS_USED_H_
#define DDP_REDUCER_STREAMS_USED_H_

#include <algorithm>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ddp::internal {

// Returns the current stream of `device`, which is not the CPU.
inline c10::Stream CurrentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// The streams on which a device has computed gradients of a pass. Autograd runs the backward of an
// operation on the stream of its forward. Thread-compatible.
class StreamsUsed {
 public:
  void AddCurrent(c10::Device device) {
    const c10::Stream stream = CurrentStream(device);
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
      streams_.push_back(stream);
    }
  }
  void Clear() { streams_.clear(); }

  // Makes the current streams wait for the others on their devices. Returns true when there were
  // any.
  bool Join() const {
    bool joined = false;
    for (const c10::Stream& stream : streams_) {
      const c10::Stream current = CurrentStream(stream.device());
      if (stream == current) continue;
      c10::Event event(stream.device_type());
      event.record(stream);
      event.block(current);
      joined = true;
    }
    return joined;
  }

 private:
  std::vector<c10::Stream> streams_;
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_STREAMS_USED_H_
