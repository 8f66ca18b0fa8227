// Collectives of HierarchicalEngine in which each rank has a part of its own.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/status_macros.h"
#include "ddp/comm/hierarchical/hierarchical_engine.h"
#include "ddp/comm/kernels/reduce.h"

namespace ddp::internal {
namespace {

using Kind = CollectiveRequest::Kind;
using Stream = HostLink::Stream;

constexpr size_t kLine = 64;

}  // namespace

// A reduce-scatter in progress.
struct HierarchicalEngine::PartsReduction {
  std::span<const std::span<const std::byte>> inputs;  // by rank
  std::byte* output = nullptr;
  ReduceKind kind = ReduceKind::kSum;
  ElementType type = ElementType::kFloat;
  double factor = 1;
  absl::Time deadline;
  size_t element = 1;  // bytes
  size_t step = 0;     // elements of a part in a chunk, at most
};

// The same elements of all parts on their way.
struct HierarchicalEngine::PartsChunk {
  size_t begin = 0;  // elements of a part
  size_t count = 0;
  std::vector<std::byte> packed;             // the inputs, by member, and by client of the member
  std::vector<std::vector<std::byte>> own;   // this host's partials, by client of this member
  std::vector<std::vector<std::byte>> raw;   // the same by member of this host, before the sum
  std::vector<std::vector<std::byte>> come;  // the partials of this rank's part, of all hosts
  Transfers partials_on_link;
};

// Returns the elements of a part in a chunk. All parts of a chunk together have about chunk_bytes_.
size_t HierarchicalEngine::StepOfParts(size_t element) const {
  const size_t bytes = chunk_bytes_ / layout_.ranks() / kLine * kLine;
  return std::max(bytes, kLine) / element;
}

absl::Status HierarchicalEngine::ReduceScatter(std::span<const std::span<const std::byte>> inputs,
                                               std::span<std::byte> output, ReduceKind kind,
                                               ElementType type, double factor,
                                               absl::Time deadline) {
  const size_t element = SizeOf(type);
  if (link_ == nullptr) {
    CollectiveRequest request{.kind = Kind::kReduceScatter,
                              .reduction = kind,
                              .type = type,
                              .factor = factor,
                              .elements = output.size() / element};
    request.inputs.assign(inputs.begin(), inputs.end());
    request.outputs = {output};
    return RunLocal(std::move(request), deadline);
  }
  const PartsReduction reduction{.inputs = inputs,
                                 .output = output.data(),
                                 .kind = kind,
                                 .type = type,
                                 .factor = factor,
                                 .deadline = deadline,
                                 .element = element,
                                 .step = StepOfParts(element)};
  const size_t count = output.size() / element;
  const size_t total = (count + reduction.step - 1) / reduction.step;
  std::vector<PartsChunk> chunks(kChunksOnLink + 1 + kReceivesAhead);
  const auto chunk = [&](size_t number) -> PartsChunk& { return chunks[number % chunks.size()]; };
  size_t received = 0;
  for (size_t i = 0; i < total + kChunksOnLink; ++i) {
    for (; received < std::min(total, i + 1 + kReceivesAhead); ++received) {
      PartsChunk& next = chunk(received);
      next.begin = received * reduction.step;
      next.count = std::min(reduction.step, count - next.begin);
      ReceivePartials(reduction, next);
    }
    if (i < total) {
      DDP_RETURN_IF_ERROR(ReducePartsOnHost(reduction, chunk(i)));
      SendPartials(reduction, chunk(i));
    }
    if (i >= kChunksOnLink) {
      DDP_RETURN_IF_ERROR(CombineParts(reduction, chunk(i - kChunksOnLink)));
    }
  }
  return absl::OkStatus();
}

// Starts to receive the partials of this rank's part from its couriers.
void HierarchicalEngine::ReceivePartials(const PartsReduction& reduction, PartsChunk& chunk) {
  const size_t bytes = chunk.count * reduction.element;
  chunk.come.resize(partial_count_);
  for (int host = 0; host < layout_.host_count(); ++host) {
    if (host == layout_.host()) continue;
    const int courier = layout_.CourierOf(host, layout_.rank());
    for (size_t i = 0; i < partials_[host].size(); ++i) {
      std::vector<std::byte>& to = chunk.come[first_partial_[host] + i];
      to.resize(reduction.step * reduction.element);
      chunk.partials_on_link.push_back(
          link_->Receive(courier, Stream::kData, std::span(to).first(bytes)));
    }
  }
}

// Puts this host's partials of the parts of this member's clients into the chunk's memory.
absl::Status HierarchicalEngine::ReducePartsOnHost(const PartsReduction& reduction,
                                                   PartsChunk& chunk) {
  const int members = layout_.local().size();
  const std::vector<RankRange>& partials = partials_[layout_.host()];
  const std::vector<int>& clients = clients_[layout_.member()];
  const size_t bytes = chunk.count * reduction.element;
  chunk.own.resize(partials.size());
  for (auto& own : chunk.own) own.resize(clients.size() * bytes);
  chunk.packed.resize(layout_.ranks() * bytes);
  CollectiveRequest request{.reduction = reduction.kind, .type = reduction.type};
  std::byte* to = chunk.packed.data();
  bool equal = true;
  for (const std::vector<int>& theirs : clients_) {
    request.inputs.push_back(std::span(to, theirs.size() * bytes));
    equal &= theirs.size() == clients.size();
    for (const int rank : theirs) {
      std::memcpy(to, reduction.inputs[rank].data() + chunk.begin * reduction.element, bytes);
      to += bytes;
    }
  }
  const size_t elements = clients.size() * chunk.count;
  if (members > 1 && partials.size() == 1) {
    request.kind = Kind::kReduceScatter;
    request.factor = reduction.factor;
    request.elements = equal ? elements : 0;
    request.outputs = {std::span(chunk.own.front())};
    return RunLocal(std::move(request), reduction.deadline);
  }
  std::vector<const std::byte*> of_members = {chunk.packed.data()};
  if (members > 1) {
    request.kind = Kind::kAllToAll;
    of_members.clear();
    chunk.raw.resize(members);
    for (auto& raw : chunk.raw) {
      raw.resize(clients.size() * bytes);
      request.outputs.push_back(std::span(raw));
      of_members.push_back(raw.data());
    }
    DDP_RETURN_IF_ERROR(RunLocal(std::move(request), reduction.deadline));
  }
  for (size_t i = 0; i < partials.size(); ++i) {
    const int first = partials[i].begin - layout_.local().begin;
    std::byte* const own = chunk.own[i].data();
    ReduceTree(reduction.kind, reduction.type,
               std::span(of_members).subspan(first, partials[i].size()), std::span(&own, 1),
               elements, reduction.factor);
  }
  return absl::OkStatus();
}

// Starts to send this host's partials to the clients on other hosts.
void HierarchicalEngine::SendPartials(const PartsReduction& reduction, PartsChunk& chunk) {
  const std::vector<int>& clients = clients_[layout_.member()];
  const size_t bytes = chunk.count * reduction.element;
  for (size_t client = 1; client < clients.size(); ++client) {
    for (const std::vector<std::byte>& own : chunk.own) {
      const std::span<const std::byte> part = std::span(own).subspan(client * bytes, bytes);
      chunk.partials_on_link.push_back(link_->Send(clients[client], Stream::kData, part));
    }
  }
}

absl::Status HierarchicalEngine::CombineParts(const PartsReduction& reduction, PartsChunk& chunk) {
  DDP_RETURN_IF_ERROR(WaitAll(chunk.partials_on_link, reduction.deadline));
  std::vector<std::byte*> partials;
  for (auto& come : chunk.come) partials.push_back(come.data());
  // The first client of a member is itself.
  for (size_t i = 0; i < chunk.own.size(); ++i) {
    partials[first_partial_[layout_.host()] + i] = chunk.own[i].data();
  }
  combination_->Run(reduction.kind, reduction.type, partials,
                    reduction.output + chunk.begin * reduction.element, chunk.count);
  return absl::OkStatus();
}

// ---- All-gather.

absl::Status HierarchicalEngine::AllGather(std::span<const std::byte> input,
                                           std::span<const std::span<std::byte>> outputs,
                                           absl::Time deadline) {
  const std::span<std::byte> own = outputs[layout_.rank()];
  if (input.data() != own.data() && !input.empty()) {
    std::memcpy(own.data(), input.data(), input.size());
  }
  const std::vector<int>& clients = clients_[layout_.member()];
  const size_t step = StepOfParts(1);
  const size_t total = (input.size() + step - 1) / step;
  const size_t on_link = link_ == nullptr ? 0 : kChunksOnLink;
  const auto bytes_of = [&](size_t number) { return std::min(step, input.size() - number * step); };
  std::vector<Transfers> transfers(on_link + 1 + kReceivesAhead);
  size_t received = 0;
  for (size_t i = 0; i < total + on_link; ++i) {
    for (; received < std::min(total, i + 1 + kReceivesAhead); ++received) {
      for (size_t client = 1; client < clients.size(); ++client) {
        const auto part = outputs[clients[client]].subspan(received * step, bytes_of(received));
        transfers[received % transfers.size()].push_back(
            link_->Receive(clients[client], Stream::kData, part));
      }
    }
    for (int host = 0; i < total && host < layout_.host_count(); ++host) {
      if (host == layout_.host()) continue;
      const int courier = layout_.CourierOf(host, layout_.rank());
      transfers[i % transfers.size()].push_back(
          link_->Send(courier, Stream::kData, own.subspan(i * step, bytes_of(i))));
    }
    if (i < on_link) continue;
    const size_t done = i - on_link;
    DDP_RETURN_IF_ERROR(WaitAll(transfers[done % transfers.size()], deadline));
    DDP_RETURN_IF_ERROR(GatherPartsOnHost(outputs, done * step, bytes_of(done), deadline));
  }
  return absl::OkStatus();
}

// Copies what the members of this host have for their clients to each other. Every turn is a
// collective, in which each member gives the part of its next client.
absl::Status HierarchicalEngine::GatherPartsOnHost(std::span<const std::span<std::byte>> outputs,
                                                   size_t begin, size_t bytes,
                                                   absl::Time deadline) {
  if (layout_.local().size() == 1) return absl::OkStatus();
  size_t turns = 0;
  for (const std::vector<int>& clients : clients_) turns = std::max(turns, clients.size());
  for (size_t turn = 0; turn < turns; ++turn) {
    CollectiveRequest request{.kind = Kind::kAllGather, .elements = bytes};
    for (const std::vector<int>& clients : clients_) {
      request.outputs.push_back(turn < clients.size() ? outputs[clients[turn]].subspan(begin, bytes)
                                                      : std::span<std::byte>());
    }
    request.inputs = {request.outputs[layout_.member()]};
    DDP_RETURN_IF_ERROR(RunLocal(std::move(request), deadline));
  }
  return absl::OkStatus();
}

}  // namespace ddp::internal
