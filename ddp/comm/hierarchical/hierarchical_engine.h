#ifndef DDP_COMM_HIERARCHICAL_HIERARCHICAL_ENGINE_H_
#define DDP_COMM_HIERARCHICAL_HIERARCHICAL_ENGINE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ddp/comm/hierarchical/host_layout.h"
#include "ddp/comm/hierarchical/host_link.h"
#include "ddp/comm/hierarchical/tree_partials.h"
#include "ddp/comm/kernels/element_type.h"
#include "ddp/comm/shared_memory/collective_engine.h"

namespace ddp::internal {

// Carries out collectives of ranks on two or more hosts: inside a host by a CollectiveEngine,
// between hosts by a HostLink. Free of LibTorch.
//
// All-reduce. The array goes in chunks through four steps, and several chunks are in progress at
// once: so the hosts add up one chunk while the link carries others.
//   1. Each member gets its slice of the chunk, reduced over the ranks of its host.
//   2. The owners of a stripe on all hosts exchange their partials (see HostLayout).
//   3. The owner combines the partials of all hosts. With more than two hosts, or hosts that send
//      more than one partial, the owner on each host combines a part of the stripe, and sends the
//      result to the others.
//   4. The members of the host copy each other's slices.
// With hosts of equal sizes that are powers of two, a host sends (and receives) 2 (H - 1) / H times
// the array over its link, for H hosts.
//
// Reduce-scatter and all-gather. Each rank has a courier on every other host (see HostLayout). A
// courier carries the host's partials of the rank's part to the rank, or the rank's input to the
// host. So a host receives only what its own ranks need, once.
//
// Gather, scatter, all-to-all, sparse tensors. Each rank sends to each what that one needs.
//
// Order of addition. `deterministic`: the tree of ReduceTree() over all ranks by number. A host
// sends one partial for each subtree that it has (see TreePartials()). Otherwise a host sends one
// partial, its own tree, and the hosts are combined in a tree by number. Either is the same in
// every run and on every rank.
//
// Agreement. Messages carry a fingerprint of tag, kind, reduction, types, root and number of
// elements, so ranks in different collectives exchange nothing. Such collectives wait until the
// deadline, or until they are given up: the caller finds out who differs. Collectives without a tag
// are compared before they begin: they fail on all ranks with kInvalidArgument. So does an
// all-to-all whose sizes do not fit.
//
// Threads. Run() blocks, and one thread calls it. All ranks call it with the same collectives in
// the same order. After an error the engine is at an end.
class HierarchicalEngine {
 public:
  struct Options {
    bool deterministic = true;
    // The longest chunk; 0: longer with more stripes and hosts, so that messages do not get short.
    size_t chunk_bytes = 0;
  };

  // `local` has the members of this host. It and `link` outlive this object.
  HierarchicalEngine(HostLayout layout, CollectiveEngine* local, HostLink* link,
                     const Options& options);
  HierarchicalEngine(const HierarchicalEngine&) = delete;
  HierarchicalEngine& operator=(const HierarchicalEngine&) = delete;

  // Carries out a collective. `request` is as for a CollectiveEngine, with ranks for members:
  // inputs and outputs "for each member" are for each rank, and a reduce-scatter has parts of one
  // size. Errors: those of the CollectiveEngine and of the link.
  absl::Status Run(const CollectiveRequest& request, absl::Time deadline);

 private:
  // How many chunks the link carries while the host adds up the next one.
  static constexpr size_t kChunksOnLink = 4;

  // For how many chunks after that one the partials may already come. The word that a receiver is
  // ready travels behind the receiver's own data: a link without it would be idle.
  static constexpr size_t kReceivesAhead = 2;

  struct Header;
  struct Chunk;
  struct ScatterChunk;
  using Transfers = std::vector<std::unique_ptr<HostLink::Transfer>>;
  using Inputs = std::span<const std::span<const std::byte>>;
  using Outputs = std::span<const std::span<std::byte>>;

  // The steps of chunk n, which all chunks go through in order.
  struct Steps {
    std::function<void(size_t n)> receive;         // starts to receive
    std::function<absl::Status(size_t n)> send;    // reduces on the host, and starts to send
    std::function<absl::Status(size_t n)> finish;  // waits for what comes, and combines it
    std::function<absl::Status(size_t n)> gather;  // `gather_after` chunks behind; may be null
    size_t gather_after = kChunksOnLink;
  };
  static absl::Status RunChunks(size_t total, const Steps& steps);

  absl::Status RunKind(const CollectiveRequest& request);
  absl::Status RunLocal(CollectiveRequest request);
  absl::Duration Left() const;
  absl::Status WaitAll(Transfers& transfers) const;
  absl::Status Agree(const Header& mine);
  absl::Status Broadcast(std::span<std::byte> data, int root);
  absl::Status BroadcastOnHost(std::span<std::byte> data, int member);
  absl::Status Reduce(std::span<const std::byte> input, std::span<std::byte> output);
  absl::Status AllToAll(Inputs inputs, Outputs outputs);
  absl::Status AllGatherSized(std::span<const std::byte> input);
  absl::Status Exchange(Inputs inputs, Outputs outputs);
  absl::Status ReduceOnHost(CollectiveRequest request, size_t count, bool even,
                            std::span<std::byte* const> raw, std::span<std::byte* const> partials);
  size_t element() const { return SizeOf(request_->type); }

  // In all_reduce.cc.
  void MakeChunks();
  absl::Status AllReduce(std::span<std::byte> data);
  Slice CombinedOn(int host, const Chunk& chunk, int stripe) const;
  template <typename Visit>
  void ForEachMeeting(const Visit& visit) const;
  void Receive(Chunk& chunk);
  absl::Status Send(Chunk& chunk);
  absl::Status Combine(Chunk& chunk);
  absl::Status Gather(Chunk& chunk);

  // In reduce_scatter.cc.
  void FindClients();
  size_t ScatterStep(size_t element) const;
  absl::Status ReduceScatter(Inputs inputs, std::span<std::byte> output);
  void Receive(ScatterChunk& chunk);
  absl::Status Send(Inputs inputs, ScatterChunk& chunk);
  absl::Status Combine(ScatterChunk& chunk, std::byte* output);
  absl::Status AllGather(std::span<const std::byte> input, Outputs outputs);
  absl::Status GatherOnHost(Outputs outputs, size_t begin, size_t bytes);

  const HostLayout layout_;
  const int host_;
  const int members_;  // of this host
  CollectiveEngine* const local_;
  HostLink* const link_;
  size_t chunk_bytes_;
  std::vector<std::vector<RankRange>> partials_;  // by host
  std::vector<int> first_partial_;                // of each host, among all
  int partial_count_ = 0;
  std::unique_ptr<TreeCombination> combination_;  // of the partials
  bool scatters_ = false;                         // step 3 divides the stripes among the hosts
  std::vector<std::shared_ptr<Chunk>> chunks_;    // in progress; their memory is kept
  // Whose courier each member of this host is; itself first.
  std::vector<std::vector<int>> clients_;

  // Of the collective that is being run.
  const CollectiveRequest* request_ = nullptr;
  absl::Time deadline_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_HIERARCHICAL_ENGINE_H_
