#ifndef DDP_COMM_DEVICE_PROOF_H_
#define DDP_COMM_DEVICE_PROOF_H_

#include <atomic>
#include <cstdint>
#include <memory>

namespace ddp::internal {

// Whether a device has completed all operations up to some point before any abort.
enum class DeviceOutcome : uint8_t {
  kOpen,    // not known yet
  kProven,  // it has
  kLost,    // an abort came first: what the device has computed from their results may be wrong
};
using DeviceProof = std::shared_ptr<const std::atomic<DeviceOutcome>>;

}  // namespace ddp::internal

#endif  // DDP_COMM_DEVICE_PROOF_H_
