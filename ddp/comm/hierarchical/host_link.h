// Free of LibTorch.
#ifndef DDP_COMM_HIERARCHICAL_HOST_LINK_H_
#define DDP_COMM_HIERARCHICAL_HOST_LINK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ddp::internal {

// Carries bytes between ranks of different hosts. The n-th message that a rank sends to another one
// on a stream meets the n-th that the other one receives on that stream. Streams do not wait for
// each other. Both sides give the same size. Used by one thread at a time; End() by any.
class HostLink {
 public:
  enum class Stream : uint8_t { kData, kResults };

  // A message in progress. Its memory stays valid until Wait() has returned, or the destructor.
  class Transfer {
   public:
    virtual ~Transfer() = default;
    // Blocks until the message has arrived, or its memory may be used again. Called once. Errors:
    // kDeadlineExceeded: the time has passed; kUnavailable: the connection has ended. After an
    // error the link carries nothing more.
    virtual absl::Status Wait(absl::Duration timeout) = 0;
  };

  virtual ~HostLink() = default;

  // The messages from now on belong to a collective with this fingerprint. A message never meets
  // one of another fingerprint: its Wait() then ends with the deadline, or with the link.
  virtual void Enter(uint32_t fingerprint) = 0;

  // Start a message. Never block.
  virtual std::unique_ptr<Transfer> Send(int rank, Stream stream,
                                         std::span<const std::byte> data) = 0;
  virtual std::unique_ptr<Transfer> Receive(int rank, Stream stream, std::span<std::byte> data) = 0;

  // Closes the connections: all messages fail soon, on this rank and on its peers. Blocks for a
  // millisecond. May be called several times.
  virtual void End() = 0;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_HOST_LINK_H_
