#ifndef DDP_COMM_HIERARCHICAL_HIERARCHICAL_ENGINE_H_
#define DDP_COMM_HIERARCHICAL_HIERARCHICAL_ENGINE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/comm/hierarchical/host_layout.h"
#include "ddp/comm/hierarchical/host_link.h"
#include "ddp/comm/hierarchical/tree_partials.h"
#include "ddp/comm/kernels/element_type.h"
#include "ddp/comm/shared_memory/collective_engine.h"

namespace ddp::internal {

// The properties of a collective in which all ranks agree. A value without padding.
struct CollectiveHeader {
  uint64_t elements = 0;
  uint64_t sizes = 0;  // a hash of the sizes of all tensors
  double factor = 1;
  int32_t root = -1;
  uint32_t tag = 0;
  uint8_t operation = 0;
  uint8_t reduction = 0;
  uint8_t value_type = 0;
  uint8_t tagged = 0;
  uint8_t unused[4] = {};
};

// Carries out collectives of ranks on several hosts: inside a host by a CollectiveEngine, between
// hosts by a HostLink. Free of LibTorch.
//
// All-reduce. The array goes in chunks through four steps, and several chunks are in progress at
// once: so the hosts add up one chunk while the link carries others.
//   1. Each member gets its slice of the chunk, reduced over the ranks of its host.
//   2. The owners of a lane on all hosts exchange their partials (see HostLayout).
//   3. The owner combines the partials of all hosts. With more than two hosts, or hosts that send
//      more than one partial, the owner on each host combines a part of the lane, and sends the
//      result to the others.
//   4. The members of the host copy each other's slices.
// With hosts of equal sizes that are powers of two, a host sends (and receives) 2 (H - 1) / H times
// the array over its link, for H hosts.
//
// Reduce-scatter and all-gather. Each rank has a courier on every other host (see HostLayout). A
// courier carries the host's partials of the rank's part to the rank, or the rank's input to the
// host. So a host receives only what its own ranks need, once.
//
// Order of addition. `deterministic`: the tree of ReduceTree() over all ranks by number. A host
// sends one partial for each subtree that it has (see TreePartials()). Otherwise a host sends one
// partial, its own tree, and the hosts are combined in a tree by number. Either is the same in
// every run and on every rank.
//
// Threads. All methods block, and one thread calls them. All ranks call the same ones in the same
// order. After an error the engine is at an end.
//
// Errors. Those of the CollectiveEngine and of the link.
class HierarchicalEngine {
 public:
  struct Options {
    bool deterministic = true;
    size_t chunk_bytes = size_t{512} << 10;
  };

  // `local` has the members of this host, and outlives this object; so does `link`, which is null
  // when there is one host.
  HierarchicalEngine(HostLayout layout, CollectiveEngine* local, HostLink* link,
                     const Options& options);
  ~HierarchicalEngine();
  HierarchicalEngine(const HierarchicalEngine&) = delete;
  HierarchicalEngine& operator=(const HierarchicalEngine&) = delete;

  // Compares `mine` across all ranks; so it is a barrier, too. When the ranks differ: with a tag,
  // blocks until the deadline or the end of the local group. Otherwise kInvalidArgument, on all
  // ranks.
  absl::Status Agree(const CollectiveHeader& mine, absl::Time deadline);

  // Puts the combination of all ranks' arrays into `data`.
  absl::Status AllReduce(std::span<std::byte> data, ReduceKind kind, ElementType type,
                         double factor, absl::Time deadline);

  // Puts the combination of all ranks' inputs number n into the output of rank n. `inputs` has one
  // for each rank, and all have the size of `output`. The output may be the rank's own input.
  absl::Status ReduceScatter(std::span<const std::span<const std::byte>> inputs,
                             std::span<std::byte> output, ReduceKind kind, ElementType type,
                             double factor, absl::Time deadline);

  // Copies the input of rank n into output number n of all ranks. All have one size. The input may
  // be the rank's own output.
  absl::Status AllGather(std::span<const std::byte> input,
                         std::span<const std::span<std::byte>> outputs, absl::Time deadline);

  // Copies the root's bytes to all ranks.
  absl::Status Broadcast(std::span<std::byte> data, int root, absl::Time deadline);

  const HostLayout& layout() const { return layout_; }

 private:
  // How many chunks the link carries while the host adds up the next one.
  static constexpr size_t kChunksOnLink = 4;

  // For how many chunks after that one the partials may already come. The word that a receiver is
  // ready travels behind the receiver's own data: a link without it would be idle.
  static constexpr size_t kReceivesAhead = 2;

  struct Reduction;
  struct Chunk;
  struct PartsReduction;
  struct PartsChunk;
  using Transfers = std::vector<std::unique_ptr<HostLink::Transfer>>;

  absl::Status RunLocal(CollectiveRequest request, absl::Time deadline);
  static absl::Status WaitAll(Transfers& transfers, absl::Time deadline);
  absl::StatusOr<int> FirstToDiffer(const CollectiveHeader& mine, absl::Time deadline);

  Slice CombinedOn(int host, const Reduction& reduction, const Chunk& chunk, int lane) const;
  // Calls `visit(lane, host, owner)` for each lane of this member and each other host.
  template <typename Visit>
  void ForEachMeeting(const Visit& visit) const;

  absl::Status RunChunks(const Reduction& reduction);
  // The steps of one chunk.
  absl::Status ReduceOnHost(const Reduction& reduction, Chunk& chunk);
  void Receive(const Reduction& reduction, Chunk& chunk);
  void Send(const Reduction& reduction, Chunk& chunk);
  absl::Status Combine(const Reduction& reduction, Chunk& chunk);
  absl::Status GatherOnHost(const Reduction& reduction, Chunk& chunk);

  // In hierarchical_engine_parts.cc.
  size_t StepOfParts(size_t element) const;
  absl::Status ReducePartsOnHost(const PartsReduction& reduction, PartsChunk& chunk);
  void ReceivePartials(const PartsReduction& reduction, PartsChunk& chunk);
  void SendPartials(const PartsReduction& reduction, PartsChunk& chunk);
  absl::Status CombineParts(const PartsReduction& reduction, PartsChunk& chunk);
  absl::Status GatherPartsOnHost(std::span<const std::span<std::byte>> outputs, size_t begin,
                                 size_t bytes, absl::Time deadline);

  const HostLayout layout_;
  CollectiveEngine* const local_;
  HostLink* const link_;
  const size_t chunk_bytes_;
  std::vector<std::vector<RankRange>> partials_;  // by host
  std::vector<int> first_partial_;                // of each host, among all
  int partial_count_ = 0;
  std::unique_ptr<TreeCombination> combination_;  // of the partials; null for one host
  bool scatters_ = false;                         // step 3 divides the lanes among the hosts
  size_t gather_after_ = 0;                       // step 4 is that many chunks behind step 1
  std::vector<std::unique_ptr<Chunk>> chunks_;    // in progress; their memory is kept
  std::vector<std::vector<int>>
      clients_;  // whose courier each member of this host is; itself first
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_HIERARCHICAL_ENGINE_H_
