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
#include "ddp/comm/host_group/segment.h"
#include "ddp/comm/kernels/element_type.h"
#include "ddp/comm/shared_memory/collective_engine.h"

namespace ddp::internal {

// Carries out collectives of ranks on two or more hosts: inside a host by a CollectiveEngine,
// between hosts by a HostLink. Free of LibTorch.
//
// Each rank has a courier on every other host, and is the client of its couriers (see HostLayout).
// What only the rank needs or gives travels between the two, so it goes over the link once. See
// docs/shared-memory.md, "Several hosts".
//
// Order of addition. `deterministic`: the tree of ReduceTree() over all ranks by number. A host
// sends one partial for each subtree that it has (see TreePartials()). Otherwise a host sends one
// partial, its own tree, and the hosts are combined in a tree by number. Either is the same in
// every run and on every rank.
//
// Agreement. Messages carry a fingerprint of the request, so ranks in different collectives
// exchange nothing and wait: the caller finds out who differs. Collectives without a tag are
// compared before they begin: they fail on all ranks with kInvalidArgument. So does an all-to-all
// whose sizes do not fit.
//
// Threads. Run() blocks, and one thread calls it. All ranks call it with the same collectives in
// the same order. After an error the engine is at an end.
class HierarchicalEngine {
 public:
  struct Options {
    bool deterministic = true;
    // The longest chunk; 0: longer with more ranks, so that messages do not get short.
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

  static constexpr size_t kShortestChunk = size_t{1} << 20;

  struct Chunk;
  using Transfers = std::vector<std::unique_ptr<HostLink::Transfer>>;
  using Inputs = std::span<const std::span<const std::byte>>;
  using Outputs = std::span<const std::span<std::byte>>;

  // The steps of chunk n of a reduction, which all chunks go through in order. Several chunks are
  // in progress at once: the hosts add up one while the link carries others.
  struct Steps {
    std::function<void(size_t n)> receive;         // starts to receive
    std::function<absl::Status(size_t n)> send;    // reduces on the host, and starts to send
    std::function<absl::Status(size_t n)> finish;  // waits for what comes, and combines it
    std::function<absl::Status(size_t n)> gather;  // a chunk behind; may be null
  };
  static absl::Status RunChunks(size_t total, const Steps& steps);

  absl::Status RunKind(const CollectiveRequest& request);
  absl::Status RunLocal(CollectiveRequest request);
  absl::Duration Left() const;
  absl::Status WaitAll(Transfers& transfers) const;
  absl::Status Agree(const CollectiveKey& mine);
  template <typename T>
  absl::Status GatherValues(std::vector<T>& values);
  absl::Status Broadcast(std::span<std::byte> data, int root);
  absl::Status BroadcastOnHost(std::span<std::byte> data, int member);
  absl::Status AllToAll(Inputs inputs, Outputs outputs);
  absl::Status AllGatherSized(std::span<const std::byte> input);
  absl::Status Exchange(Inputs inputs, Outputs outputs);
  size_t element() const { return SizeOf(request_->type); }

  absl::Status AllGather(std::span<const std::byte> input, Outputs outputs);
  absl::Status GatherOnHost(Outputs outputs, size_t begin, size_t bytes);
  void FindClients();
  // Call `visit(place, rank)` for each client on another host, and `visit(host, rank)` for each
  // courier.
  template <typename Visit>
  void ForEachClient(const Visit& visit) const {
    const RankRange places = clients_[layout_.member()];
    for (int place = places.begin; place < places.end; ++place) {
      if (place != place_) visit(place, ranks_[place]);
    }
  }
  template <typename Visit>
  void ForEachCourier(const Visit& visit) const {
    for (int host = 0; host < layout_.host_count(); ++host) {
      if (host != host_) visit(host, layout_.CourierOf(host, layout_.rank()));
    }
  }
  // Returns the bytes of a part in a chunk, where all parts of a chunk have about chunk_bytes_.
  size_t BytesOfPart() const;

  // In reductions.cc.
  absl::Status AllReduce(std::span<std::byte> data);
  absl::Status ReduceScatter(Inputs inputs, std::span<std::byte> output);
  Chunk& ChunkOf(size_t number);
  absl::Status EndChunks(absl::Status status);
  void Receive(Chunk& chunk);
  absl::Status Send(Chunk& chunk);
  absl::Status ReduceOnHost(Chunk& chunk, size_t bytes);
  absl::Status Combine(Chunk& chunk, std::span<std::byte> output);
  absl::Status Gather(Chunk& chunk);

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
  std::vector<std::shared_ptr<Chunk>> chunks_;    // in progress; their memory is kept

  // Parts are in the order of places: on every host, the clients of a member have places that
  // follow each other.
  std::vector<int> ranks_;          // by place
  int place_ = 0;                   // of this rank
  std::vector<RankRange> clients_;  // places, by member of this host; the member itself is one

  // Of the collective that is being run.
  const CollectiveRequest* request_ = nullptr;
  absl::Time deadline_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_HIERARCHICAL_ENGINE_H_
