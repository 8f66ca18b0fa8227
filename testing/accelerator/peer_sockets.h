#ifndef DDP_TESTING_ACCELERATOR_PEER_SOCKETS_H_
#define DDP_TESTING_ACCELERATOR_PEER_SOCKETS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/unique_fd.h"

namespace ddp::testing {

// Stream sockets from this rank to every other rank of a set on this host.
//
// Thread-compatible, except that any thread may call Abort().
class PeerSockets {
 public:
  // A store that the ranks share.
  struct Store {
    std::function<void(const std::string& key, const std::string& value)> set;
    std::function<std::string(const std::string& key)> get;  // blocks until the key is set
  };
  struct Place {
    int rank = 0;
    int size = 1;
  };

  // Meets the peers under keys that begin with `prefix`. Blocks until all are connected. Returns
  // kDeadlineExceeded when the peers do not connect within `timeout`. What `store` throws passes.
  static absl::StatusOr<PeerSockets> Connect(Place place, const Store& store,
                                             const std::string& prefix, absl::Duration timeout);

  // What one rank sends to another; nullopt: no message.
  using Outgoing = std::vector<std::optional<absl::Span<const char>>>;  // by rank
  using Incoming = std::vector<std::optional<absl::Span<char>>>;

  // Sends and receives at the same time. Each receiver must expect a message of the size and the
  // `tag` that its sender gives it. The entry of this rank is ignored. Blocks until all is sent and
  // received. Returns
  //   kUnavailable        a peer has closed its sockets
  //   kFailedPrecondition a peer sends another size or tag
  //   kAborted            Abort() was called
  //   kDeadlineExceeded   `deadline` on MonotonicClock has passed
  // and then the sockets cannot be used any more.
  absl::Status Exchange(uint64_t tag, const Outgoing& outgoing, const Incoming& incoming,
                        absl::Time deadline = absl::InfiniteFuture());

  // Ends Exchange(), now and later, on this rank; on its peers, too, if they need this rank.
  void Abort();

  PeerSockets(PeerSockets&&) = default;

 private:
  PeerSockets() = default;

  std::vector<UniqueFd> peers_;  // by rank; none for this rank
  UniqueFd aborted_;             // an eventfd: readable after Abort()
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_PEER_SOCKETS_H_
