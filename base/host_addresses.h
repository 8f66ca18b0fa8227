// The addresses of a host's name. No other file calls getaddrinfo().
#ifndef DDP_BASE_HOST_ADDRESSES_H_
#define DDP_BASE_HOST_ADDRESSES_H_

#include <netdb.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp {

// A list as getaddrinfo(3) makes it. The list continues at `ai_next` of each entry.
using AddressList = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

struct AddressQuery {
  int port = 0;                   // the port in each address
  int socket_type = SOCK_STREAM;  // or SOCK_DGRAM
  bool is_numeric = false;        // the host is a numeric address: no name is looked up
};

// Returns the addresses of `host`, a name or a numeric address. There is at least one. Try them in
// this order. Blocks, in a broken network for many seconds; a caller that must not block takes
// NameLookup. Thread: any.
// kUnavailable: `host` has no address now. The message is the resolver's reason and nothing else,
// for example "Name or service not known".
absl::StatusOr<AddressList> ResolveHost(const std::string& host, const AddressQuery& query = {});

// Returns the same as numeric addresses, without any that is neither IPv4 nor IPv6. Errors: as
// above, behind "cannot resolve the name HOST: "; also when none is left.
absl::StatusOr<std::vector<std::string>> NumericAddressesOf(const std::string& host);

// Returns "10.0.0.7" or "fd00::7", with the scope of a link-local address: "fe80::1%eth0". Returns
// an empty text for an address that is neither IPv4 nor IPv6.
std::string NumericAddress(const sockaddr* address, socklen_t size);

// Returns true for a numeric address of this host alone: 127.0.0.0/8, ::1, ::ffff:127.0.0.0/104.
bool IsLoopback(const std::string& numeric_address);

}  // namespace ddp

#endif  // DDP_BASE_HOST_ADDRESSES_H_
