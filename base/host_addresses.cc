#include "base/host_addresses.h"

#include <array>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ddp {

absl::StatusOr<AddressList> ResolveHost(const std::string& host, const AddressQuery& query) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = query.socket_type;
  hints.ai_flags = query.is_numeric ? AI_NUMERICHOST : 0;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), absl::StrCat(query.port).c_str(), &hints, &found);
  if (error != 0) return absl::UnavailableError(gai_strerror(error));
  return AddressList(found, &freeaddrinfo);
}

std::string NumericAddress(const sockaddr* address, socklen_t size) {
  // getnameinfo() gives the path of a unix socket.
  if (address->sa_family != AF_INET && address->sa_family != AF_INET6) return "";
  std::array<char, NI_MAXHOST> text{};
  const int error =
      getnameinfo(address, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text.data() : "";
}

}  // namespace ddp
