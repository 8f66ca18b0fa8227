#include "ddp/comm/hierarchical/host_layout.h"

#include <algorithm>
#include <utility>

#include <glog/logging.h>

namespace ddp::internal {

HostLayout::HostLayout(std::vector<RankRange> hosts, int rank)
    : hosts_(std::move(hosts)), rank_(rank), host_(HostOf(rank)) {
  for (const RankRange& host : hosts_) stripes_ = std::max(stripes_, host.size());
}

int HostLayout::HostOf(int rank) const {
  for (size_t host = 0; host < hosts_.size(); ++host) {
    if (rank >= hosts_[host].begin && rank < hosts_[host].end) return static_cast<int>(host);
  }
  LOG(FATAL) << "rank " << rank << " is on no host";
}

RankRange HostLayout::StripesOf(int host, int member) const {
  const int members = hosts_[host].size();
  return {.begin = member * stripes_ / members, .end = (member + 1) * stripes_ / members};
}

int HostLayout::OwnerOf(int host, int stripe) const {
  int member = 0;
  while (StripesOf(host, member).end <= stripe) ++member;
  return hosts_[host].begin + member;
}

int HostLayout::CourierOf(int host, int rank) const {
  const RankRange& theirs = hosts_[HostOf(rank)];
  return hosts_[host].begin + (rank - theirs.begin) * hosts_[host].size() / theirs.size();
}

Slice HostLayout::StripeSlice(size_t count, size_t element_bytes, int stripe) const {
  return SliceOf(count, element_bytes, stripe, stripes_);
}

Slice HostLayout::MemberSlice(size_t count, size_t element_bytes, int member) const {
  const RankRange stripes = StripesOf(host_, member);
  const Slice first = StripeSlice(count, element_bytes, stripes.begin);
  const Slice last = StripeSlice(count, element_bytes, stripes.end - 1);
  return {.begin = first.begin, .count = last.begin + last.count - first.begin};
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
