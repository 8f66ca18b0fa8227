#ifndef DDP_LAUNCHER_LOCAL_ADDRESS_H_
#define DDP_LAUNCHER_LOCAL_ADDRESS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::launcher {

// An address of this host, and the interface that has it.
struct LocalAddress {
  std::string address;    // "10.0.0.7", "fd00::7"
  std::string interface;  // "eth0"
  bool is_loopback = false;
  bool operator==(const LocalAddress&) const = default;
};

// The addresses of this host's interfaces that are up, in the system's order, without link-local
// ones (which mean nothing to another host without a scope).
std::vector<LocalAddress> LocalAddresses();

// The address by which others reach this host, found by asking the kernel which one it would send
// from to `peer` (a name or an address; nothing is sent). No name of this host is ever looked up:
// what a host is called and where it is reached are different things.
//
// Where that is a loopback address, `peer` is this host itself. For a job of one node it is the
// answer; for more (`beyond_host`) the first address that is none, an IPv4 one if there is one.
//
// Errors: kNotFound (the name cannot be resolved, or there is no way to the peer; the text says to
// give --local-addr).
absl::StatusOr<LocalAddress> LocalAddressTowards(const std::string& peer, bool beyond_host);

// The interface that has `address`; empty where none does. For --local-addr, which may be a name:
// it is resolved.
std::string InterfaceOf(const std::string& address);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_LOCAL_ADDRESS_H_
