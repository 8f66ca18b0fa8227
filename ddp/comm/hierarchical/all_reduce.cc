// The all-reduce of HierarchicalEngine.
#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "ddp/comm/hierarchical/hierarchical_engine.h"

namespace ddp::internal {
namespace {

using Kind = CollectiveRequest::Kind;
using Stream = HostLink::Stream;

constexpr size_t kAlignment = 64;

// Of the messages of a long array.
constexpr size_t kMessageBytes = size_t{128} << 10;
constexpr size_t kShortestChunk = size_t{512} << 10;
constexpr size_t kLongestChunk = size_t{4} << 20;

// An array has at least as many chunks, where they are longer than kShortestChunk: the link is idle
// before the first one and after the last one.
constexpr size_t kChunksOfArray = 16;

}  // namespace

// A part of the array on its way, and the memory of this member's slice of it.
struct HierarchicalEngine::Chunk {
  std::byte* data = nullptr;  // in the array
  size_t count = 0;           // elements
  Slice mine;                 // relative to the chunk
  std::unique_ptr<std::byte[]> memory;
  std::vector<std::byte*> partials;  // of all hosts
  std::vector<std::byte*> raw;       // by member of this host; only when it has several partials
  Transfers partials_on_link;
  Transfers results_on_link;

  // Returns where the partial's element `offset` of the chunk is.
  std::byte* At(size_t partial, size_t offset, size_t element) const {
    return partials[partial] + (offset - mine.begin) * element;
  }
};

void HierarchicalEngine::MakeChunks() {
  const auto stripes = static_cast<size_t>(layout_.stripes());
  if (chunk_bytes_ == 0) {
    const size_t messages = stripes * static_cast<size_t>(layout_.host_count());
    chunk_bytes_ = std::clamp(messages * kMessageBytes, kShortestChunk, kLongestChunk);
  }
  chunk_bytes_ = chunk_bytes_ / kAlignment * kAlignment;
  const bool gathers = partials_[host_].size() > 1;
  const auto own = static_cast<size_t>(layout_.StripesOf(host_, layout_.member()).size());
  // SliceOf() rounds up, to an element and to a line.
  const size_t region = own * (chunk_bytes_ / stripes / kAlignment + 2) * kAlignment;
  // The results of a chunk come one chunk later than its partials.
  const size_t in_progress = kChunksOnLink + (scatters_ ? 1 : 0) + 1 + kReceivesAhead;
  for (size_t i = 0; i < in_progress; ++i) {
    auto chunk = std::make_shared<Chunk>();
    const size_t regions = partial_count_ + (gathers ? members_ : 0);
    chunk->memory = std::make_unique_for_overwrite<std::byte[]>(regions * region);
    for (size_t j = 0; j < regions; ++j) {
      auto& list = j < static_cast<size_t>(partial_count_) ? chunk->partials : chunk->raw;
      list.push_back(chunk->memory.get() + j * region);
    }
    chunks_.push_back(std::move(chunk));
  }
}

absl::Status HierarchicalEngine::AllReduce(std::span<std::byte> data) {
  const size_t bytes = std::clamp(data.size() / kChunksOfArray / kAlignment * kAlignment,
                                  std::min(kShortestChunk, chunk_bytes_), chunk_bytes_);
  const size_t step = bytes / element();
  const size_t count = data.size() / element();
  const auto chunk = [&](size_t number) -> Chunk& { return *chunks_[number % chunks_.size()]; };
  const Steps steps{.receive =
                        [&](size_t number) {
                          Chunk& next = chunk(number);
                          next.data = data.data() + number * step * element();
                          next.count = std::min(step, count - number * step);
                          next.mine = layout_.MemberSlice(next.count, element(), layout_.member());
                          Receive(next);
                        },
                    .send = [&](size_t number) { return Send(chunk(number)); },
                    .finish = [&](size_t number) { return Combine(chunk(number)); },
                    .gather = [&](size_t number) { return Gather(chunk(number)); },
                    .gather_after = kChunksOnLink + (scatters_ ? 1 : 0)};
  const absl::Status status = RunChunks((count + step - 1) / step, steps);
  // Nobody writes into the array, or reads the chunks, when their transfers are gone.
  for (const auto& used : chunks_) {
    used->partials_on_link.clear();
    used->results_on_link.clear();
  }
  return status;
}

// Returns the part of a stripe that the owner on `host` combines; relative to the chunk.
Slice HierarchicalEngine::CombinedOn(int host, const Chunk& chunk, int stripe) const {
  const Slice whole = layout_.StripeSlice(chunk.count, element(), stripe);
  if (!scatters_) return whole;
  const Slice part = SliceOf(whole.count, element(), host, layout_.host_count());
  return {.begin = whole.begin + part.begin, .count = part.count};
}

// Calls `visit(stripe, host, owner)` for each stripe of this member and each other host.
template <typename Visit>
void HierarchicalEngine::ForEachMeeting(const Visit& visit) const {
  const RankRange stripes = layout_.StripesOf(host_, layout_.member());
  for (int stripe = stripes.begin; stripe < stripes.end; ++stripe) {
    for (int host = 0; host < layout_.host_count(); ++host) {
      if (host != host_) visit(stripe, host, layout_.OwnerOf(host, stripe));
    }
  }
}

// Starts to receive the partials of the other hosts.
void HierarchicalEngine::Receive(Chunk& chunk) {
  ForEachMeeting([&](int stripe, int host, int rank) {
    const Slice slice = CombinedOn(host_, chunk, stripe);
    if (slice.count == 0) return;
    for (size_t i = 0; i < partials_[host].size(); ++i) {
      std::byte* const to = chunk.At(first_partial_[host] + i, slice.begin, element());
      chunk.partials_on_link.push_back(
          link_->Receive(rank, Stream::kData, {to, slice.count * element()}));
    }
  });
}

// Puts this host's partials of this member's slice into the chunk's memory, and starts to send
// them. Starts to receive the other hosts' results into the array: no member of this host reads the
// array's chunk any more.
absl::Status HierarchicalEngine::Send(Chunk& chunk) {
  CollectiveRequest request;
  bool even = true;
  for (int member = 0; member < members_; ++member) {
    const Slice slice = layout_.MemberSlice(chunk.count, element(), member);
    request.inputs.push_back(
        std::span(chunk.data + slice.begin * element(), slice.count * element()));
    even &= slice.count == chunk.mine.count;
  }
  const auto partials =
      std::span(chunk.partials).subspan(first_partial_[host_], partials_[host_].size());
  DDP_RETURN_IF_ERROR(
      ReduceOnHost(std::move(request), chunk.mine.count, even, chunk.raw, partials));
  ForEachMeeting([&](int stripe, int host, int rank) {
    const Slice slice = CombinedOn(host, chunk, stripe);
    if (slice.count == 0) return;
    const size_t bytes = slice.count * element();
    for (size_t i = 0; i < partials.size(); ++i) {
      const std::byte* const from = chunk.At(first_partial_[host_] + i, slice.begin, element());
      chunk.partials_on_link.push_back(link_->Send(rank, Stream::kData, {from, bytes}));
    }
    if (scatters_) {
      std::byte* const to = chunk.data + slice.begin * element();
      chunk.results_on_link.push_back(link_->Receive(rank, Stream::kResults, {to, bytes}));
    }
  });
  return absl::OkStatus();
}

// Puts the result of what this member combines into the array, and starts to send it.
absl::Status HierarchicalEngine::Combine(Chunk& chunk) {
  DDP_RETURN_IF_ERROR(WaitAll(chunk.partials_on_link));
  const RankRange stripes = layout_.StripesOf(host_, layout_.member());
  for (int stripe = stripes.begin; stripe < stripes.end; ++stripe) {
    const Slice slice = CombinedOn(host_, chunk, stripe);
    std::vector<std::byte*> partials(partial_count_);
    for (int i = 0; i < partial_count_; ++i) partials[i] = chunk.At(i, slice.begin, element());
    combination_->Run(request_->reduction, request_->type, partials,
                      chunk.data + slice.begin * element(), slice.count);
  }
  if (!scatters_) return absl::OkStatus();
  ForEachMeeting([&](int stripe, int /*host*/, int rank) {
    const Slice mine = CombinedOn(host_, chunk, stripe);
    if (mine.count == 0) return;
    chunk.results_on_link.push_back(link_->Send(
        rank, Stream::kResults, {chunk.data + mine.begin * element(), mine.count * element()}));
  });
  return absl::OkStatus();
}

absl::Status HierarchicalEngine::Gather(Chunk& chunk) {
  DDP_RETURN_IF_ERROR(WaitAll(chunk.results_on_link));
  if (members_ == 1) return absl::OkStatus();
  CollectiveRequest request{.kind = Kind::kAllGather};
  for (int member = 0; member < members_; ++member) {
    const Slice slice = layout_.MemberSlice(chunk.count, element(), member);
    request.outputs.push_back(
        std::span(chunk.data + slice.begin * element(), slice.count * element()));
    request.elements = std::max<uint64_t>(request.elements, slice.count * element());
  }
  request.inputs = {request.outputs[layout_.member()]};
  return RunLocal(std::move(request));
}

}  // namespace ddp::internal
