// The all-reduce and the reduce-scatter of HierarchicalEngine.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/status_macros.h"
#include "ddp/comm/hierarchical/hierarchical_engine.h"
#include "ddp/comm/kernels/reduce.h"
#include "ddp/comm/shared_memory/reduction_steps.h"

namespace ddp::internal {
namespace {

using Kind = CollectiveRequest::Kind;
using Stream = HostLink::Stream;

constexpr size_t kLine = 64;

// An all-reduced array has at least as many chunks, where they are longer than kShortestChunk: the
// link is idle before the first one and after the last one.
constexpr size_t kChunksOfArray = 8;

}  // namespace

// Elements of all ranks' parts on their way.
struct HierarchicalEngine::Chunk {
  std::byte* data = nullptr;                 // the parts, in the order of places
  std::vector<Slice> parts;                  // by place
  size_t element = 1;                        // bytes
  std::vector<std::byte> packed;             // reduce-scatter: is `data`
  std::vector<std::vector<std::byte>> own;   // this host's partials of this member's clients
  std::vector<std::vector<std::byte>> raw;   // the same by member of this host, before the sum
  std::vector<std::vector<std::byte>> come;  // the partials of this rank's part, of all hosts
  Transfers partials_on_link;
  Transfers results_on_link;

  std::span<std::byte> Part(int place) const { return Region({place, place + 1}); }
  std::span<std::byte> Region(RankRange places) const {
    const size_t begin = parts[places.begin].begin;
    const Slice& last = parts[places.end - 1];
    return {data + begin * element, (last.begin + last.count - begin) * element};
  }
};

HierarchicalEngine::Chunk& HierarchicalEngine::ChunkOf(size_t number) {
  constexpr size_t kInProgress = kChunksOnLink + 1 + 1 + kReceivesAhead;
  while (chunks_.size() < kInProgress) chunks_.push_back(std::make_shared<Chunk>());
  Chunk& chunk = *chunks_[number % kInProgress];
  chunk.element = element();
  return chunk;
}

// Nobody writes into the caller's memory, or reads the chunks, when their transfers are gone.
absl::Status HierarchicalEngine::EndChunks(absl::Status status) {
  for (const auto& chunk : chunks_) {
    chunk->partials_on_link.clear();
    chunk->results_on_link.clear();
  }
  return status;
}

absl::Status HierarchicalEngine::AllReduce(std::span<std::byte> data) {
  const int ranks = layout_.ranks();
  const size_t bytes = std::clamp(data.size() / kChunksOfArray / kLine * kLine,
                                  std::min(kShortestChunk, chunk_bytes_), chunk_bytes_);
  const size_t step = bytes / element();
  const size_t count = data.size() / element();
  const Steps steps{
      .receive =
          [&](size_t number) {
            Chunk& next = ChunkOf(number);
            next.data = data.data() + number * bytes;
            next.parts.clear();
            for (int place = 0; place < ranks; ++place) {
              next.parts.push_back(
                  SliceOf(std::min(step, count - number * step), element(), place, ranks));
            }
            Receive(next);
          },
      .send = [&](size_t number) -> absl::Status {
        Chunk& chunk = ChunkOf(number);
        DDP_RETURN_IF_ERROR(Send(chunk));
        // No member of this host reads the array's chunk any more.
        ForEachClient([&](int place, int rank) {
          const std::span<std::byte> part = chunk.Part(place);
          if (part.empty()) return;
          chunk.results_on_link.push_back(link_->Receive(rank, Stream::kResults, part));
        });
        return absl::OkStatus();
      },
      .finish = [&](size_t number) -> absl::Status {
        Chunk& chunk = ChunkOf(number);
        const std::span<std::byte> mine = chunk.Part(place_);
        DDP_RETURN_IF_ERROR(Combine(chunk, mine));
        ForEachCourier([&](int /*host*/, int rank) {
          if (mine.empty()) return;
          chunk.results_on_link.push_back(link_->Send(rank, Stream::kResults, mine));
        });
        return absl::OkStatus();
      },
      .gather = [&](size_t number) { return Gather(ChunkOf(number)); }};
  return EndChunks(RunChunks((count + step - 1) / step, steps));
}

absl::Status HierarchicalEngine::ReduceScatter(Inputs inputs, std::span<std::byte> output) {
  const size_t step = BytesOfPart() / element();
  const size_t count = output.size() / element();
  const auto elements_of = [&](size_t number) { return std::min(step, count - number * step); };
  const Steps steps{
      .receive =
          [&](size_t number) {
            Chunk& next = ChunkOf(number);
            next.parts.clear();
            for (int place = 0; place < layout_.ranks(); ++place) {
              const size_t elements = elements_of(number);
              next.parts.push_back({.begin = place * elements, .count = elements});
            }
            Receive(next);
          },
      .send =
          [&](size_t number) {
            Chunk& chunk = ChunkOf(number);
            const size_t bytes = elements_of(number) * element();
            chunk.packed.resize(layout_.ranks() * bytes);
            chunk.data = chunk.packed.data();
            for (int place = 0; place < layout_.ranks(); ++place) {
              std::memcpy(chunk.Part(place).data(),
                          inputs[ranks_[place]].data() + number * step * element(), bytes);
            }
            return Send(chunk);
          },
      .finish =
          [&](size_t number) {
            return Combine(ChunkOf(number), output.subspan(number * step * element(),
                                                           elements_of(number) * element()));
          }};
  return EndChunks(RunChunks((count + step - 1) / step, steps));
}

// Starts to receive the partials of this rank's part from its couriers.
void HierarchicalEngine::Receive(Chunk& chunk) {
  const size_t bytes = chunk.parts[place_].count * element();
  chunk.come.resize(partial_count_);
  ForEachCourier([&](int host, int rank) {
    for (size_t i = 0; i < partials_[host].size() && bytes > 0; ++i) {
      std::vector<std::byte>& to = chunk.come[first_partial_[host] + i];
      to.resize(bytes);
      chunk.partials_on_link.push_back(link_->Receive(rank, Stream::kData, to));
    }
  });
}

// Puts this host's partials of the parts of this member's clients into the chunk's memory, and
// starts to send them to the clients on other hosts.
absl::Status HierarchicalEngine::Send(Chunk& chunk) {
  const std::span<std::byte> mine = chunk.Region(clients_[layout_.member()]);
  DDP_RETURN_IF_ERROR(ReduceOnHost(chunk, mine.size()));
  ForEachClient([&](int place, int rank) {
    const std::span<std::byte> part = chunk.Part(place);
    for (const std::vector<std::byte>& own : chunk.own) {
      if (part.empty()) continue;
      const std::byte* const from = own.data() + (part.data() - mine.data());
      chunk.partials_on_link.push_back(link_->Send(rank, Stream::kData, {from, part.size()}));
    }
  });
  return absl::OkStatus();
}

// Puts this host's partials into chunk.own: `bytes` of each.
absl::Status HierarchicalEngine::ReduceOnHost(Chunk& chunk, size_t bytes) {
  const std::vector<RankRange>& ranges = partials_[host_];
  chunk.own.resize(ranges.size());
  for (auto& own : chunk.own) own.resize(bytes);
  CollectiveRequest request;
  bool even = true;
  for (const RankRange clients : clients_) {
    request.inputs.push_back(chunk.Region(clients));
    even &= request.inputs.back().size() == bytes;
  }
  const size_t count = bytes / element();
  if (members_ > 1 && ranges.size() == 1) {
    request.kind = Kind::kReduceScatter;
    request.reduction = request_->reduction;
    request.type = request_->type;
    request.elements = even ? count : 0;
    request.outputs = {chunk.own.front()};
    return RunLocal(std::move(request));
  }
  std::vector<const std::byte*> inputs = {request.inputs.front().data()};
  if (members_ > 1) {
    request.kind = Kind::kAllToAll;
    chunk.raw.resize(members_);
    inputs.clear();
    for (std::vector<std::byte>& raw : chunk.raw) {
      raw.resize(bytes);
      request.outputs.push_back(raw);
      inputs.push_back(raw.data());
    }
    DDP_RETURN_IF_ERROR(RunLocal(std::move(request)));
  }
  for (size_t i = 0; i < ranges.size(); ++i) {
    const int first = ranges[i].begin - layout_.local().begin;
    std::byte* const partial = chunk.own[i].data();
    ReduceTree(request_->reduction, request_->type,
               std::span(inputs).subspan(first, ranges[i].size()), std::span(&partial, 1), count);
  }
  return absl::OkStatus();
}

// Waits for the partials of this rank's part, and combines them.
absl::Status HierarchicalEngine::Combine(Chunk& chunk, std::span<std::byte> output) {
  DDP_RETURN_IF_ERROR(WaitAll(chunk.partials_on_link));
  std::vector<std::byte*> partials;
  for (std::vector<std::byte>& come : chunk.come) partials.push_back(come.data());
  const ptrdiff_t offset =
      chunk.Part(place_).data() - chunk.Region(clients_[layout_.member()]).data();
  for (size_t i = 0; i < chunk.own.size(); ++i) {
    partials[first_partial_[host_] + i] = chunk.own[i].data() + offset;
  }
  combination_->Run(request_->reduction, request_->type, partials, output.data(),
                    output.size() / element());
  return absl::OkStatus();
}

// Waits for the results that other hosts send, and copies those of the members to each other.
absl::Status HierarchicalEngine::Gather(Chunk& chunk) {
  DDP_RETURN_IF_ERROR(WaitAll(chunk.results_on_link));
  if (members_ == 1) return absl::OkStatus();
  CollectiveRequest request{.kind = Kind::kAllGather};
  for (const RankRange clients : clients_) {
    request.outputs.push_back(chunk.Region(clients));
    request.elements = std::max<uint64_t>(request.elements, request.outputs.back().size());
  }
  request.inputs = {request.outputs[layout_.member()]};
  return RunLocal(std::move(request));
}

}  // namespace ddp::internal
