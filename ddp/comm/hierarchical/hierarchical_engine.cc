#include "ddp/comm/hierarchical/hierarchical_engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "ddp/comm/kernels/reduce.h"

namespace ddp::internal {
namespace {

using Kind = CollectiveRequest::Kind;
using Stream = HostLink::Stream;

constexpr size_t kAlignment = 64;

// The message of one host to the others about a collective.
struct HostAnswer {
  CollectiveHeader header;  // of the host's first rank
  int32_t differs = -1;     // the host's first rank with another header
  int32_t unused = 0;
};

template <typename T>
std::span<const std::byte> BytesOf(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

template <typename T>
std::span<std::byte> WritableBytesOf(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

bool AreEqual(const CollectiveHeader& left, const CollectiveHeader& right) {
  return std::memcmp(&left, &right, sizeof(left)) == 0;
}

absl::Duration LeftOf(absl::Time deadline) { return deadline - MonotonicClock().Now(); }

}  // namespace

// An all-reduce in progress.
struct HierarchicalEngine::Reduction {
  std::byte* data = nullptr;
  size_t count = 0;  // elements
  ReduceKind kind = ReduceKind::kSum;
  ElementType type = ElementType::kFloat;
  double factor = 1;
  absl::Time deadline;
  size_t element = 1;  // bytes
};

// A part of the array on its way, and the memory of this member's slice of it.
struct HierarchicalEngine::Chunk {
  size_t begin = 0;  // elements
  size_t count = 0;
  Slice mine;  // relative to the chunk
  std::unique_ptr<std::byte[]> memory;
  size_t region = 0;                 // bytes of each of the following
  std::vector<std::byte*> partials;  // of all hosts
  std::vector<std::byte*> raw;       // by member of this host; only when it has several partials
  Transfers partials_on_link;
  Transfers results_on_link;

  // Returns where the partial's element `offset` of the chunk is.
  std::byte* At(size_t partial, size_t offset, size_t element) const {
    return partials[partial] + (offset - mine.begin) * element;
  }
};

HierarchicalEngine::HierarchicalEngine(HostLayout layout, CollectiveEngine* local, HostLink* link,
                                       const Options& options)
    : layout_(std::move(layout)),
      local_(local),
      link_(link),
      chunk_bytes_(options.chunk_bytes / kAlignment * kAlignment) {
  std::vector<RankRange> all;
  const int hosts = layout_.host_count();
  for (int host = 0; host < hosts; ++host) {
    partials_.push_back(options.deterministic ? TreePartials(layout_.hosts()[host], layout_.ranks())
                                              : std::vector<RankRange>{{host, host + 1}});
    first_partial_.push_back(static_cast<int>(all.size()));
    all.insert(all.end(), partials_.back().begin(), partials_.back().end());
  }
  partial_count_ = static_cast<int>(all.size());
  if (!options.deterministic) partials_[layout_.host()] = {layout_.local()};
  for (int member = 0; member < layout_.local().size(); ++member) {
    const int courier = layout_.local().begin + member;
    std::vector<int>& clients = clients_.emplace_back(1, courier);
    for (int rank = 0; rank < layout_.ranks(); ++rank) {
      if (rank != courier && layout_.CourierOf(layout_.host(), rank) == courier) {
        clients.push_back(rank);
      }
    }
  }
  if (hosts == 1) return;
  combination_ =
      std::make_unique<TreeCombination>(all, options.deterministic ? layout_.ranks() : hosts);
  // Two hosts that exchange one partial each have the result after one message.
  scatters_ = hosts > 2 || partial_count_ > hosts;
  const bool gathers = partials_[layout_.host()].size() > 1;
  const auto lanes = static_cast<size_t>(layout_.lanes());
  const auto own_lanes =
      static_cast<size_t>(layout_.LanesOf(layout_.host(), layout_.member()).size());
  // SliceOf() rounds up, to an element and to a line.
  const size_t region = own_lanes * (chunk_bytes_ / lanes / kAlignment + 2) * kAlignment;
  const auto members = static_cast<size_t>(layout_.local().size());
  gather_after_ = kChunksOnLink + (scatters_ ? 1 : 0);
  for (size_t i = 0; i < gather_after_ + 1 + kReceivesAhead; ++i) {
    auto chunk = std::make_unique<Chunk>();
    const size_t regions = partial_count_ + (gathers ? members : 0);
    chunk->memory = std::make_unique_for_overwrite<std::byte[]>(regions * region);
    for (size_t j = 0; j < regions; ++j) {
      auto& list = j < static_cast<size_t>(partial_count_) ? chunk->partials : chunk->raw;
      list.push_back(chunk->memory.get() + j * region);
    }
    chunks_.push_back(std::move(chunk));
  }
}

HierarchicalEngine::~HierarchicalEngine() = default;

// ---- Steps that all collectives use.

absl::Status HierarchicalEngine::RunLocal(CollectiveRequest request, absl::Time deadline) {
  struct Completion {
    std::atomic<bool> done = false;
    absl::Status status;
  };
  const auto completion = std::make_shared<Completion>();
  local_->Start(std::move(request), LeftOf(deadline), [completion](const absl::Status& status) {
    completion->status = status;
    completion->done.store(true, std::memory_order_release);
    completion->done.notify_all();
  });
  const auto done = [&] { return completion->done.load(std::memory_order_acquire); };
  // The engine ends the operation at its deadline. After the end of the local group, another thread
  // may be about to report it.
  if (!local_->Drive(done, absl::InfiniteFuture())) completion->done.wait(false);
  return completion->status;
}

absl::Status HierarchicalEngine::WaitAll(Transfers& transfers, absl::Time deadline) {
  for (auto& transfer : transfers) DDP_RETURN_IF_ERROR(transfer->Wait(LeftOf(deadline)));
  transfers.clear();
  return absl::OkStatus();
}

// ---- Agreement.

// Returns the first rank whose header is not that of rank 0, the same on all ranks; -1: none.
absl::StatusOr<int> HierarchicalEngine::FirstToDiffer(const CollectiveHeader& mine,
                                                      absl::Time deadline) {
  const int members = layout_.local().size();
  const int host = layout_.host();
  std::vector<HostAnswer> answers(layout_.host_count());
  answers[host].header = mine;
  if (members > 1) {
    std::vector<CollectiveHeader> headers(members);
    CollectiveRequest request{.kind = Kind::kAllGather, .elements = sizeof(mine)};
    request.inputs = {BytesOf(mine)};
    for (CollectiveHeader& header : headers) request.outputs.push_back(WritableBytesOf(header));
    DDP_RETURN_IF_ERROR(RunLocal(std::move(request), deadline));
    answers[host].header = headers.front();
    for (int member = members - 1; member > 0; --member) {
      if (AreEqual(headers[member], headers.front())) continue;
      answers[host].differs = layout_.local().begin + member;
    }
  }
  int32_t first = answers[host].differs;
  if (link_ == nullptr) return first;
  if (layout_.member() == 0) {
    Transfers transfers;
    for (int other = 0; other < layout_.host_count(); ++other) {
      if (other == host) continue;
      const int leader = layout_.hosts()[other].begin;
      transfers.push_back(link_->Receive(leader, Stream::kData, WritableBytesOf(answers[other])));
      transfers.push_back(link_->Send(leader, Stream::kData, BytesOf(answers[host])));
    }
    DDP_RETURN_IF_ERROR(WaitAll(transfers, deadline));
    first = -1;
    for (int other = 0; other < layout_.host_count() && first < 0; ++other) {
      const bool equal = AreEqual(answers[other].header, answers[0].header);
      first = equal ? answers[other].differs : layout_.hosts()[other].begin;
    }
  }
  if (members == 1) return first;
  CollectiveRequest request{.kind = Kind::kBroadcast, .root = 0, .elements = sizeof(first)};
  if (layout_.member() == 0) {
    request.inputs = {BytesOf(first)};
  } else {
    request.outputs = {WritableBytesOf(first)};
  }
  DDP_RETURN_IF_ERROR(RunLocal(std::move(request), deadline));
  return first;
}

absl::Status HierarchicalEngine::Agree(const CollectiveHeader& mine, absl::Time deadline) {
  const absl::StatusOr<int> first = FirstToDiffer(mine, deadline);
  if (!first.ok()) return first.status();
  if (*first < 0) return absl::OkStatus();
  const std::string text =
      absl::StrCat("rank ", *first, " has started another collective than rank 0, or one of ",
                   "another size or type");
  if (mine.tagged == 0) return absl::InvalidArgumentError(text);
  // The caller gives the collective up when it knows more.
  std::atomic<bool> done = false;
  absl::Status end;
  local_->StartAside({.advance = [] { return false; }, .may_advance = [] { return false; }},
                     LeftOf(deadline), [&](const absl::Status& status) {
                       end = status;
                       done.store(true, std::memory_order_release);
                       done.notify_all();
                     });
  if (!local_->Drive([&] { return done.load(std::memory_order_acquire); },
                     absl::InfiniteFuture())) {
    done.wait(false);
  }
  return end;
}

// ---- All-reduce.

absl::Status HierarchicalEngine::AllReduce(std::span<std::byte> data, ReduceKind kind,
                                           ElementType type, double factor, absl::Time deadline) {
  const Reduction reduction{.data = data.data(),
                            .count = data.size() / SizeOf(type),
                            .kind = kind,
                            .type = type,
                            .factor = factor,
                            .deadline = deadline,
                            .element = SizeOf(type)};
  if (link_ == nullptr) {
    return RunLocal({.kind = Kind::kAllReduce,
                     .reduction = kind,
                     .type = type,
                     .factor = factor,
                     .elements = reduction.count,
                     .inputs = {data},
                     .outputs = {data}},
                    deadline);
  }
  const absl::Status status = RunChunks(reduction);
  // Nobody writes into the array, or reads the chunks, when their transfers are gone.
  for (const auto& chunk : chunks_) {
    chunk->partials_on_link.clear();
    chunk->results_on_link.clear();
  }
  return status;
}

absl::Status HierarchicalEngine::RunChunks(const Reduction& reduction) {
  const size_t step = chunk_bytes_ / reduction.element;
  const size_t total = (reduction.count + step - 1) / step;
  const auto chunk = [&](size_t number) -> Chunk& { return *chunks_[number % chunks_.size()]; };
  size_t received = 0;
  for (size_t i = 0; i < total + gather_after_; ++i) {
    for (; received < std::min(total, i + 1 + kReceivesAhead); ++received) {
      Chunk& next = chunk(received);
      next.begin = received * step;
      next.count = std::min(step, reduction.count - next.begin);
      next.mine = layout_.MemberSlice(next.count, reduction.element, layout_.member());
      Receive(reduction, next);
    }
    if (i < total) {
      DDP_RETURN_IF_ERROR(ReduceOnHost(reduction, chunk(i)));
      Send(reduction, chunk(i));
    }
    if (i >= kChunksOnLink && i - kChunksOnLink < total) {
      DDP_RETURN_IF_ERROR(Combine(reduction, chunk(i - kChunksOnLink)));
    }
    if (i >= gather_after_) {
      DDP_RETURN_IF_ERROR(GatherOnHost(reduction, chunk(i - gather_after_)));
    }
  }
  return absl::OkStatus();
}

// Returns the part of a lane that the owner on `host` combines; relative to the chunk.
Slice HierarchicalEngine::CombinedOn(int host, const Reduction& reduction, const Chunk& chunk,
                                     int lane) const {
  const Slice whole = layout_.LaneSlice(chunk.count, reduction.element, lane);
  if (!scatters_) return whole;
  const Slice part = SliceOf(whole.count, reduction.element, host, layout_.host_count());
  return {.begin = whole.begin + part.begin, .count = part.count};
}

template <typename Visit>
void HierarchicalEngine::ForEachMeeting(const Visit& visit) const {
  const RankRange lanes = layout_.LanesOf(layout_.host(), layout_.member());
  for (int lane = lanes.begin; lane < lanes.end; ++lane) {
    for (int host = 0; host < layout_.host_count(); ++host) {
      if (host != layout_.host()) visit(lane, host, layout_.OwnerOf(host, lane));
    }
  }
}

// Starts to receive the partials of the other hosts.
void HierarchicalEngine::Receive(const Reduction& reduction, Chunk& chunk) {
  ForEachMeeting([&](int lane, int host, int rank) {
    const Slice slice = CombinedOn(layout_.host(), reduction, chunk, lane);
    if (slice.count == 0) return;
    for (size_t i = 0; i < partials_[host].size(); ++i) {
      std::byte* const to = chunk.At(first_partial_[host] + i, slice.begin, reduction.element);
      chunk.partials_on_link.push_back(
          link_->Receive(rank, Stream::kData, {to, slice.count * reduction.element}));
    }
  });
}

// Starts to send this host's partials, and to receive the other hosts' results into the array: no
// member of this host reads the array's chunk any more.
void HierarchicalEngine::Send(const Reduction& reduction, Chunk& chunk) {
  const int own = layout_.host();
  ForEachMeeting([&](int lane, int host, int rank) {
    const Slice slice = CombinedOn(host, reduction, chunk, lane);
    if (slice.count == 0) return;
    for (size_t i = 0; i < partials_[own].size(); ++i) {
      const std::byte* const from =
          chunk.At(first_partial_[own] + i, slice.begin, reduction.element);
      chunk.partials_on_link.push_back(
          link_->Send(rank, Stream::kData, {from, slice.count * reduction.element}));
    }
    if (scatters_) {
      std::byte* const to = reduction.data + (chunk.begin + slice.begin) * reduction.element;
      chunk.results_on_link.push_back(
          link_->Receive(rank, Stream::kResults, {to, slice.count * reduction.element}));
    }
  });
}

// Puts this host's partials of this member's slice into the chunk's memory.
absl::Status HierarchicalEngine::ReduceOnHost(const Reduction& reduction, Chunk& chunk) {
  const int members = layout_.local().size();
  const size_t element = reduction.element;
  std::byte* const data = reduction.data + chunk.begin * element;
  const size_t own = first_partial_[layout_.host()];
  std::byte* const partial = chunk.partials[own];
  if (members == 1) {
    const std::byte* const input = data;
    ReduceTree(reduction.kind, reduction.type, std::span(&input, 1), std::span(&partial, 1),
               chunk.count, reduction.factor);
    return absl::OkStatus();
  }
  CollectiveRequest request{.reduction = reduction.kind, .type = reduction.type};
  bool equal = true;
  for (int member = 0; member < members; ++member) {
    const Slice slice = layout_.MemberSlice(chunk.count, element, member);
    request.inputs.push_back(std::span(data + slice.begin * element, slice.count * element));
    equal &= slice.count == chunk.mine.count;
  }
  const size_t bytes = chunk.mine.count * element;
  const std::vector<RankRange>& partials = partials_[layout_.host()];
  if (partials.size() == 1) {
    request.kind = Kind::kReduceScatter;
    request.factor = reduction.factor;
    request.elements = equal ? chunk.mine.count : 0;
    request.outputs = {std::span(partial, bytes)};
    return RunLocal(std::move(request), reduction.deadline);
  }
  request.kind = Kind::kAllToAll;
  for (std::byte* const raw : chunk.raw) request.outputs.push_back(std::span(raw, bytes));
  DDP_RETURN_IF_ERROR(RunLocal(std::move(request), reduction.deadline));
  for (size_t i = 0; i < partials.size(); ++i) {
    const std::vector<const std::byte*> inputs(
        chunk.raw.begin() + (partials[i].begin - layout_.local().begin),
        chunk.raw.begin() + (partials[i].end - layout_.local().begin));
    ReduceTree(reduction.kind, reduction.type, inputs, std::span(&chunk.partials[own + i], 1),
               chunk.mine.count, reduction.factor);
  }
  return absl::OkStatus();
}

// Puts the result of what this member combines into the array, and starts to send it.
absl::Status HierarchicalEngine::Combine(const Reduction& reduction, Chunk& chunk) {
  DDP_RETURN_IF_ERROR(WaitAll(chunk.partials_on_link, reduction.deadline));
  const size_t element = reduction.element;
  std::byte* const data = reduction.data + chunk.begin * element;
  const RankRange lanes = layout_.LanesOf(layout_.host(), layout_.member());
  for (int lane = lanes.begin; lane < lanes.end; ++lane) {
    const Slice slice = CombinedOn(layout_.host(), reduction, chunk, lane);
    std::vector<std::byte*> partials(partial_count_);
    for (int i = 0; i < partial_count_; ++i) partials[i] = chunk.At(i, slice.begin, element);
    combination_->Run(reduction.kind, reduction.type, partials, data + slice.begin * element,
                      slice.count);
  }
  if (!scatters_) return absl::OkStatus();
  ForEachMeeting([&](int lane, int /*host*/, int rank) {
    const Slice mine = CombinedOn(layout_.host(), reduction, chunk, lane);
    if (mine.count > 0) {
      chunk.results_on_link.push_back(
          link_->Send(rank, Stream::kResults, {data + mine.begin * element, mine.count * element}));
    }
  });
  return absl::OkStatus();
}

absl::Status HierarchicalEngine::GatherOnHost(const Reduction& reduction, Chunk& chunk) {
  DDP_RETURN_IF_ERROR(WaitAll(chunk.results_on_link, reduction.deadline));
  const int members = layout_.local().size();
  if (members == 1) return absl::OkStatus();
  const size_t element = reduction.element;
  std::byte* const data = reduction.data + chunk.begin * element;
  CollectiveRequest request{.kind = Kind::kAllGather};
  for (int member = 0; member < members; ++member) {
    const Slice slice = layout_.MemberSlice(chunk.count, element, member);
    request.outputs.push_back(std::span(data + slice.begin * element, slice.count * element));
    request.elements = std::max<uint64_t>(request.elements, slice.count * element);
  }
  request.inputs = {request.outputs[layout_.member()]};
  return RunLocal(std::move(request), reduction.deadline);
}

// ---- Broadcast.

absl::Status HierarchicalEngine::Broadcast(std::span<std::byte> data, int root,
                                           absl::Time deadline) {
  const int root_host = layout_.HostOf(root);
  const bool from_here = root_host == layout_.host();
  const int local_root = from_here ? root - layout_.local().begin : 0;
  // Other hosts pass the pieces on as they come.
  const size_t piece = from_here ? data.size() : chunk_bytes_;
  Transfers transfers;
  for (size_t offset = 0; link_ != nullptr && offset < data.size(); offset += chunk_bytes_) {
    const auto part = data.subspan(offset, std::min(chunk_bytes_, data.size() - offset));
    if (layout_.rank() == root) {
      for (int host = 0; host < layout_.host_count(); ++host) {
        if (host == root_host) continue;
        transfers.push_back(link_->Send(layout_.hosts()[host].begin, Stream::kData, part));
      }
    } else if (!from_here && layout_.member() == 0) {
      transfers.push_back(link_->Receive(root, Stream::kData, part));
    }
  }
  for (size_t offset = 0; offset < data.size(); offset += piece) {
    const auto part = data.subspan(offset, std::min(piece, data.size() - offset));
    if (!from_here && layout_.member() == 0) {
      DDP_RETURN_IF_ERROR(transfers[offset / piece]->Wait(LeftOf(deadline)));
    }
    if (layout_.local().size() == 1) continue;
    CollectiveRequest request{
        .kind = Kind::kBroadcast, .root = local_root, .elements = part.size()};
    if (layout_.member() == local_root) {
      request.inputs = {part};
    } else {
      request.outputs = {part};
    }
    DDP_RETURN_IF_ERROR(RunLocal(std::move(request), deadline));
  }
  return from_here ? WaitAll(transfers, deadline) : absl::OkStatus();
}

}  // namespace ddp::internal
