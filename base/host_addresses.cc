#include "base/host_addresses.h"

#include <array>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
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

absl::StatusOr<std::vector<std::string>> NumericAddressesOf(const std::string& host) {
  const absl::StatusOr<AddressList> found = ResolveHost(host);
  std::vector<std::string> addresses;
  for (const addrinfo* entry = found.ok() ? found->get() : nullptr; entry != nullptr;
       entry = entry->ai_next) {
    std::string text = NumericAddress(entry->ai_addr, entry->ai_addrlen);
    if (!text.empty()) addresses.push_back(std::move(text));
  }
  if (!addresses.empty()) return addresses;
  return absl::UnavailableError(
      absl::StrCat("cannot resolve the name ", host, ": ",
                   found.ok() ? "it has no address" : std::string(found.status().message())));
}

std::string NumericAddress(const sockaddr* address, socklen_t size) {
  // getnameinfo() gives the path of a unix socket.
  if (address->sa_family != AF_INET && address->sa_family != AF_INET6) return "";
  std::array<char, NI_MAXHOST> text{};
  const int error =
      getnameinfo(address, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text.data() : "";
}

bool IsLoopback(const std::string& numeric_address) {
  return absl::StartsWith(numeric_address, "127.") || numeric_address == "::1" ||
         absl::StartsWith(numeric_address, "::ffff:127.");
}

}  // namespace ddp
