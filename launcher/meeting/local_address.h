#ifndef DDP_LAUNCHER_MEETING_LOCAL_ADDRESS_H_
#define DDP_LAUNCHER_MEETING_LOCAL_ADDRESS_H_

#include <sys/socket.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::launcher {

// An address of this host and the interface that has it.
struct LocalAddress {
  std::string address;    // "10.0.0.7", "fd00::7"
  std::string interface;  // "eth0"
  bool is_loopback = false;
  bool operator==(const LocalAddress&) const = default;
};

// Returns the addresses of this host's interfaces that are up, in the system's order. Link-local
// IPv6 addresses are left out: without a scope they mean nothing to another host.
std::vector<LocalAddress> LocalAddresses();

// Returns true when an interface of this host that is up has `address`; a loopback interface has
// its whole network. A successful bind is no proof: with the sysctl ip_nonlocal_bind, or on a host
// that balances load by IPVS, it succeeds for addresses of other hosts. Also returns true when the
// interfaces cannot be listed.
bool IsOwnAddress(const sockaddr& address);

// Returns the address by which other nodes reach this host: the one from which the kernel would
// send to `peer`, a name or an address. Nothing is sent. No name of this host is looked up: a
// host's name need not resolve to the address where others reach it.
//
// If that address is a loopback one, `peer` is this host itself. With `beyond_host` (a job of more
// than one node) the result is then the first address that is not a loopback one, IPv4 preferred.
// Without `beyond_host`, or when there is no such address, it is the loopback address.
//
// Blocks while `peer` is resolved. Errors: kNotFound (the name cannot be resolved, or no route
// leads to the peer); the text advises --local-addr.
absl::StatusOr<LocalAddress> LocalAddressTowards(const std::string& peer, bool beyond_host);

// Returns the interface that has `address`, or an address to which the name `address` resolves;
// empty when there is none. For --local-addr, which may be a name.
std::string InterfaceOf(const std::string& address);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_MEETING_LOCAL_ADDRESS_H_
