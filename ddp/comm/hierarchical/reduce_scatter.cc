// The reduce-scatter and the all-gather of HierarchicalEngine.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/status_macros.h"
#include "ddp/comm/hierarchical/hierarchical_engine.h"

namespace ddp::internal {
namespace {

using Kind = CollectiveRequest::Kind;
using Stream = HostLink::Stream;

constexpr size_t kLine = 64;

std::vector<std::byte*> PointersTo(std::vector<std::vector<std::byte>>& list) {
  std::vector<std::byte*> pointers;
  for (auto& bytes : list) pointers.push_back(bytes.data());
  return pointers;
}

}  // namespace

// The same elements of the parts of all ranks on their way.
struct HierarchicalEngine::ScatterChunk {
  size_t begin = 0;                          // bytes of a part
  size_t count = 0;                          // elements
  std::vector<std::byte> packed;             // the inputs, by member, and by client of the member
  std::vector<std::vector<std::byte>> own;   // this host's partials, by client of this member
  std::vector<std::vector<std::byte>> raw;   // the same by member of this host, before the sum
  std::vector<std::vector<std::byte>> come;  // the partials of this rank's part, of all hosts
  Transfers partials_on_link;
};

void HierarchicalEngine::FindClients() {
  for (int courier = layout_.local().begin; courier < layout_.local().end; ++courier) {
    std::vector<int>& clients = clients_.emplace_back(1, courier);
    for (int rank = 0; rank < layout_.ranks(); ++rank) {
      if (rank != courier && layout_.CourierOf(host_, rank) == courier) clients.push_back(rank);
    }
  }
}

// Returns the elements of a part in a chunk. All parts of a chunk have about chunk_bytes_.
size_t HierarchicalEngine::ScatterStep(size_t element) const {
  return std::max(chunk_bytes_ / layout_.ranks() / kLine * kLine, kLine) / element;
}

absl::Status HierarchicalEngine::ReduceScatter(Inputs inputs, std::span<std::byte> output) {
  const size_t step = ScatterStep(element());
  const size_t count = output.size() / element();
  std::vector<ScatterChunk> chunks(kChunksOnLink + 1 + kReceivesAhead);
  const auto chunk = [&](size_t number) -> ScatterChunk& { return chunks[number % chunks.size()]; };
  const Steps steps{.receive =
                        [&](size_t number) {
                          ScatterChunk& next = chunk(number);
                          next.begin = number * step * element();
                          next.count = std::min(step, count - number * step);
                          Receive(next);
                        },
                    .send = [&](size_t number) { return Send(inputs, chunk(number)); },
                    .finish = [&](size_t number) { return Combine(chunk(number), output.data()); }};
  return RunChunks((count + step - 1) / step, steps);
}

// Starts to receive the partials of this rank's part from its couriers.
void HierarchicalEngine::Receive(ScatterChunk& chunk) {
  chunk.come.resize(partial_count_);
  for (int host = 0; host < layout_.host_count(); ++host) {
    if (host == host_) continue;
    const int courier = layout_.CourierOf(host, layout_.rank());
    for (size_t i = 0; i < partials_[host].size(); ++i) {
      std::vector<std::byte>& to = chunk.come[first_partial_[host] + i];
      to.resize(chunk.count * element());
      chunk.partials_on_link.push_back(link_->Receive(courier, Stream::kData, to));
    }
  }
}

// Puts this host's partials of the parts of this member's clients into the chunk's memory, and
// starts to send them to the clients on other hosts.
absl::Status HierarchicalEngine::Send(Inputs inputs, ScatterChunk& chunk) {
  const std::vector<int>& clients = clients_[layout_.member()];
  const size_t bytes = chunk.count * element();
  chunk.packed.resize(layout_.ranks() * bytes);
  chunk.own.resize(partials_[host_].size());
  for (auto& own : chunk.own) own.resize(clients.size() * bytes);
  if (chunk.own.size() > 1) chunk.raw.resize(members_);
  for (auto& raw : chunk.raw) raw.resize(clients.size() * bytes);
  CollectiveRequest request;
  std::byte* to = chunk.packed.data();
  bool even = true;
  for (const std::vector<int>& theirs : clients_) {
    request.inputs.push_back(std::span(to, theirs.size() * bytes));
    even &= theirs.size() == clients.size();
    for (const int rank : theirs) {
      std::memcpy(to, inputs[rank].data() + chunk.begin, bytes);
      to += bytes;
    }
  }
  DDP_RETURN_IF_ERROR(ReduceOnHost(std::move(request), clients.size() * chunk.count, even,
                                   PointersTo(chunk.raw), PointersTo(chunk.own)));
  for (size_t client = 1; client < clients.size(); ++client) {
    for (const std::vector<std::byte>& own : chunk.own) {
      const std::span<const std::byte> part = std::span(own).subspan(client * bytes, bytes);
      chunk.partials_on_link.push_back(link_->Send(clients[client], Stream::kData, part));
    }
  }
  return absl::OkStatus();
}

absl::Status HierarchicalEngine::Combine(ScatterChunk& chunk, std::byte* output) {
  DDP_RETURN_IF_ERROR(WaitAll(chunk.partials_on_link));
  std::vector<std::byte*> partials = PointersTo(chunk.come);
  // The first client of a member is itself.
  const std::vector<std::byte*> own = PointersTo(chunk.own);
  std::copy(own.begin(), own.end(), partials.begin() + first_partial_[host_]);
  combination_->Run(request_->reduction, request_->type, partials, output + chunk.begin,
                    chunk.count);
  return absl::OkStatus();
}

absl::Status HierarchicalEngine::AllGather(std::span<const std::byte> input, Outputs outputs) {
  const std::span<std::byte> own = outputs[layout_.rank()];
  if (input.data() != own.data() && !input.empty()) {
    std::memcpy(own.data(), input.data(), input.size());
  }
  const std::vector<int>& clients = clients_[layout_.member()];
  const size_t step = ScatterStep(1);
  const auto bytes_of = [&](size_t number) { return std::min(step, input.size() - number * step); };
  std::vector<Transfers> chunks(kChunksOnLink + 1 + kReceivesAhead);
  const auto chunk = [&](size_t number) -> Transfers& { return chunks[number % chunks.size()]; };
  const Steps steps{
      .receive =
          [&](size_t number) {
            for (size_t client = 1; client < clients.size(); ++client) {
              const auto part = outputs[clients[client]].subspan(number * step, bytes_of(number));
              chunk(number).push_back(link_->Receive(clients[client], Stream::kData, part));
            }
          },
      .send =
          [&](size_t number) {
            for (int host = 0; host < layout_.host_count(); ++host) {
              if (host == host_) continue;
              const int courier = layout_.CourierOf(host, layout_.rank());
              const auto part = own.subspan(number * step, bytes_of(number));
              chunk(number).push_back(link_->Send(courier, Stream::kData, part));
            }
            return absl::OkStatus();
          },
      .finish = [&](size_t number) -> absl::Status {
        DDP_RETURN_IF_ERROR(WaitAll(chunk(number)));
        return GatherOnHost(outputs, number * step, bytes_of(number));
      }};
  return RunChunks((input.size() + step - 1) / step, steps);
}

// Copies what the members of this host have for their clients to each other. Every turn is a
// collective, in which each member gives the part of its next client.
absl::Status HierarchicalEngine::GatherOnHost(Outputs outputs, size_t begin, size_t bytes) {
  if (members_ == 1) return absl::OkStatus();
  size_t turns = 0;
  for (const std::vector<int>& clients : clients_) turns = std::max(turns, clients.size());
  for (size_t turn = 0; turn < turns; ++turn) {
    CollectiveRequest request{.kind = Kind::kAllGather, .elements = bytes};
    for (const std::vector<int>& clients : clients_) {
      request.outputs.push_back(turn < clients.size() ? outputs[clients[turn]].subspan(begin, bytes)
                                                      : std::span<std::byte>());
    }
    request.inputs = {request.outputs[layout_.member()]};
    DDP_RETURN_IF_ERROR(RunLocal(std::move(request)));
  }
  return absl::OkStatus();
}

}  // namespace ddp::internal
