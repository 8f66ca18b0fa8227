// Unix sockets that carry descriptors between the processes of one user on one host.
#ifndef DDP_COMM_HOST_GROUP_DESCRIPTOR_SOCKET_H_
#define DDP_COMM_HOST_GROUP_DESCRIPTOR_SOCKET_H_

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace ddp::internal {

// Return an abstract unix socket of the name: one that listens, or one that is connected to it.
// Other users may connect to a listening socket, too: see CheckSameUser(). ConnectTo() blocks for
// at most `timeout`, while the listener's backlog is full.
absl::StatusOr<UniqueFd> ListenAt(const std::string& name, int backlog);
absl::StatusOr<UniqueFd> ConnectTo(const std::string& name, absl::Duration timeout);

// Blocks until a peer has connected, or for `timeout`.
absl::StatusOr<UniqueFd> Accept(int listener, absl::Duration timeout);

// Returns an error unless the peer's process belongs to this process's user, or to root.
absl::Status CheckSameUser(int socket);

// Send or receive all `bytes`, with descriptors: at most kMaxDescriptors in one call. Each blocks
// for at most `timeout`. kDataLoss: the receiver got another number of descriptors than it expects.
absl::Status SendAll(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors,
                     absl::Duration timeout);
absl::StatusOr<std::vector<UniqueFd>> ReceiveAll(int socket, std::span<std::byte> bytes,
                                                 size_t descriptors, absl::Duration timeout);

inline constexpr size_t kMaxDescriptors = 128;

}  // namespace ddp::internal

#endif  // DDP_COMM_HOST_GROUP_DESCRIPTOR_SOCKET_H_
