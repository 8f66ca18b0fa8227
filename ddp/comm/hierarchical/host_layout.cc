#include "ddp/comm/hierarchical/host_layout.h"

#include <utility>

#include <glog/logging.h>

namespace ddp::internal {

HostLayout::HostLayout(std::vector<RankRange> hosts, int rank)
    : hosts_(std::move(hosts)), rank_(rank), host_(HostOf(rank)) {}

int HostLayout::HostOf(int rank) const {
  for (size_t host = 0; host < hosts_.size(); ++host) {
    if (rank >= hosts_[host].begin && rank < hosts_[host].end) return static_cast<int>(host);
  }
  LOG(FATAL) << "rank " << rank << " is on no host";
}

int HostLayout::CourierOf(int host, int rank) const {
  const RankRange& theirs = hosts_[HostOf(rank)];
  return hosts_[host].begin + (rank - theirs.begin) * hosts_[host].size() / theirs.size();
}

std::optional<std::vector<RankRange>> HostsFrom(std::span<const RankRange> ranges) {
  std::vector<RankRange> hosts;
  for (int rank = 0; rank < static_cast<int>(ranges.size()); ++rank) {
    if (!hosts.empty() && rank < hosts.back().end) {
      if (ranges[rank] != hosts.back()) return std::nullopt;
      continue;
    }
    if (ranges[rank].begin != rank || ranges[rank].end <= rank) return std::nullopt;
    hosts.push_back(ranges[rank]);
  }
  if (hosts.empty() || hosts.back().end != static_cast<int>(ranges.size())) return std::nullopt;
  return hosts;
}

}  // namespace ddp::internal
