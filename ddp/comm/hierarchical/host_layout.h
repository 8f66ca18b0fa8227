// The ranks of each host. Free of LibTorch.
#ifndef DDP_COMM_HIERARCHICAL_HOST_LAYOUT_H_
#define DDP_COMM_HIERARCHICAL_HOST_LAYOUT_H_

#include <optional>
#include <span>
#include <vector>

#include "ddp/comm/hierarchical/tree_partials.h"

namespace ddp::internal {

// The hosts of a group, and who exchanges what with whom between them. Member m is the m-th rank of
// its host. A value.
class HostLayout {
 public:
  // `hosts` hold the ranks from 0 on, without a gap, each at least one; `rank` is one of them.
  HostLayout(std::vector<RankRange> hosts, int rank);

  int rank() const { return rank_; }
  int ranks() const { return hosts_.back().end; }
  const std::vector<RankRange>& hosts() const { return hosts_; }
  int host_count() const { return static_cast<int>(hosts_.size()); }
  int host() const { return host_; }  // this rank's
  const RankRange& local() const { return hosts_[host_]; }
  int member() const { return rank_ - local().begin; }
  int HostOf(int rank) const;

  // The rank on `host` that carries what only `rank` needs or gives. On its own host a rank is its
  // own courier; the ranks of another host have couriers of consecutive numbers.
  int CourierOf(int host, int rank) const;

 private:
  std::vector<RankRange> hosts_;
  int rank_;
  int host_;
};

// Returns the hosts, when each rank stands in the range that all ranks of that range give. Nullopt
// when they contradict each other, or a range is empty. `ranges` are the hosts as the ranks know
// them, by rank.
std::optional<std::vector<RankRange>> HostsFrom(std::span<const RankRange> ranges);

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_HOST_LAYOUT_H_
