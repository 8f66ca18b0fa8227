#include "launcher/meeting/local_address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "base/host_addresses.h"
#include "base/unique_fd.h"

namespace ddp::launcher {
namespace {

std::string Text(const sockaddr& address) {
  const bool is_ipv6 = address.sa_family == AF_INET6;
  return NumericAddress(&address, is_ipv6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
}

bool IsLinkLocal(const sockaddr& address) {
  if (address.sa_family != AF_INET6) return false;
  return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

absl::StatusOr<AddressList> Resolve(const std::string& peer) {
  // The port has no meaning: nothing is sent.
  absl::StatusOr<AddressList> found = ResolveHost(peer, {.port = 9, .socket_type = SOCK_DGRAM});
  if (found.ok()) return found;
  return absl::NotFoundError(absl::StrCat("cannot resolve ", peer, ": ", found.status().message()));
}

// Returns the address that the kernel would send from; empty when there is no route.
std::string SourceAddressFor(const addrinfo& peer) {
  UniqueFd fd(socket(peer.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.valid() || connect(fd.get(), peer.ai_addr, peer.ai_addrlen) != 0) return "";
  sockaddr_storage own{};
  socklen_t size = sizeof(own);
  auto* const address = reinterpret_cast<sockaddr*>(&own);
  if (getsockname(fd.get(), address, &size) != 0 || IsLinkLocal(*address)) return "";
  return Text(*address);
}

struct FreeAddresses {
  void operator()(ifaddrs* list) const { freeifaddrs(list); }
};
using Interfaces = std::unique_ptr<ifaddrs, FreeAddresses>;

// Returns null when the system does not tell them.
Interfaces ListInterfaces() {
  ifaddrs* list = nullptr;
  return Interfaces(getifaddrs(&list) == 0 ? list : nullptr);
}

bool Has(const ifaddrs& entry, const sockaddr& address) {
  if (entry.ifa_addr == nullptr || entry.ifa_addr->sa_family != address.sa_family) return false;
  if (address.sa_family == AF_INET6) {
    return IN6_ARE_ADDR_EQUAL(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr,
                              &reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr)->sin6_addr);
  }
  const auto bits = [](const sockaddr* of) {
    return reinterpret_cast<const sockaddr_in*>(of)->sin_addr.s_addr;
  };
  const bool has_network = (entry.ifa_flags & IFF_LOOPBACK) != 0 && entry.ifa_netmask != nullptr;
  const in_addr_t mask = has_network ? bits(entry.ifa_netmask) : ~in_addr_t{0};
  return ((bits(&address) ^ bits(entry.ifa_addr)) & mask) == 0;
}

bool IsIpv4(const LocalAddress& address) { return address.address.find('.') != std::string::npos; }

}  // namespace

std::vector<LocalAddress> LocalAddresses() {
  const Interfaces interfaces = ListInterfaces();
  std::vector<LocalAddress> addresses;
  for (const ifaddrs* entry = interfaces.get(); entry != nullptr; entry = entry->ifa_next) {
    const sockaddr* const address = entry->ifa_addr;
    if (address == nullptr || (entry->ifa_flags & IFF_UP) == 0 || IsLinkLocal(*address)) continue;
    if (address->sa_family != AF_INET && address->sa_family != AF_INET6) continue;
    addresses.push_back({.address = Text(*address),
                         .interface = entry->ifa_name,
                         .is_loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0});
  }
  return addresses;
}

bool IsOwnAddress(const sockaddr& address) {
  const Interfaces interfaces = ListInterfaces();
  if (interfaces == nullptr) return true;
  for (const ifaddrs* entry = interfaces.get(); entry != nullptr; entry = entry->ifa_next) {
    if ((entry->ifa_flags & IFF_UP) != 0 && Has(*entry, address)) return true;
  }
  return false;
}

std::string InterfaceOf(const std::string& address) {
  const std::vector<LocalAddress> ours = LocalAddresses();
  const auto interface_of = [&](const std::string& text) -> std::string {
    for (const LocalAddress& own : ours) {
      if (own.address == text) return own.interface;
    }
    return "";
  };
  if (std::string found = interface_of(address); !found.empty()) return found;
  const absl::StatusOr<AddressList> resolved = Resolve(address);
  if (!resolved.ok()) return "";
  for (const addrinfo* entry = resolved->get(); entry != nullptr; entry = entry->ai_next) {
    if (std::string found = interface_of(Text(*entry->ai_addr)); !found.empty()) return found;
  }
  return "";
}

absl::StatusOr<LocalAddress> LocalAddressTowards(const std::string& peer, bool beyond_host) {
  const std::string advice = "; --local-addr says by which address other nodes reach this one";
  absl::StatusOr<AddressList> resolved = Resolve(peer);
  if (!resolved.ok()) {
    return absl::NotFoundError(absl::StrCat(std::string(resolved.status().message()), advice));
  }
  std::string source;
  for (const addrinfo* entry = resolved->get(); entry != nullptr && source.empty();
       entry = entry->ai_next) {
    source = SourceAddressFor(*entry);
  }
  if (source.empty()) {
    return absl::NotFoundError(absl::StrCat("no interface of this host leads to ", peer, advice));
  }
  const bool loopback = IsLoopback(source);
  if (!loopback || !beyond_host) return LocalAddress{source, InterfaceOf(source), loopback};
  const std::vector<LocalAddress> ours = LocalAddresses();
  const LocalAddress* best = nullptr;
  for (const LocalAddress& own : ours) {
    if (own.is_loopback) continue;
    if (best == nullptr || (IsIpv4(own) && !IsIpv4(*best))) best = &own;
  }
  // A host without a network can still run several agents.
  return best != nullptr ? *best : LocalAddress{source, InterfaceOf(source), true};
}

}  // namespace ddp::launcher
