#include "ddp/comm/hierarchical/hierarchical_engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>

#include <xxhash.h>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"

namespace ddp::internal {
namespace {

using Kind = CollectiveRequest::Kind;
using Stream = HostLink::Stream;

// Of the messages of a long array.
constexpr size_t kMessageBytes = size_t{256} << 10;
constexpr size_t kLongestChunk = size_t{4} << 20;
constexpr size_t kLine = 64;

template <typename T>
std::span<std::byte> BytesOf(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

void Copy(std::span<const std::byte> from, std::span<std::byte> to) {
  if (from.data() != to.data() && !from.empty()) std::memcpy(to.data(), from.data(), from.size());
}

}  // namespace

HierarchicalEngine::HierarchicalEngine(HostLayout layout, CollectiveEngine* local, HostLink* link,
                                       const Options& options)
    : layout_(std::move(layout)),
      host_(layout_.host()),
      members_(layout_.local().size()),
      local_(local),
      link_(link),
      chunk_bytes_(options.chunk_bytes) {
  std::vector<RankRange> all;
  const int hosts = layout_.host_count();
  for (int host = 0; host < hosts; ++host) {
    partials_.push_back(options.deterministic ? TreePartials(layout_.hosts()[host], layout_.ranks())
                                              : std::vector<RankRange>{{host, host + 1}});
    first_partial_.push_back(static_cast<int>(all.size()));
    all.insert(all.end(), partials_.back().begin(), partials_.back().end());
  }
  partial_count_ = static_cast<int>(all.size());
  if (!options.deterministic) partials_[host_] = {layout_.local()};
  combination_ =
      std::make_unique<TreeCombination>(all, options.deterministic ? layout_.ranks() : hosts);
  if (chunk_bytes_ == 0) {
    chunk_bytes_ = std::clamp(layout_.ranks() * kMessageBytes, kShortestChunk, kLongestChunk);
  }
  FindClients();
}

// The courier of a rank stands at the same fraction of its host.
void HierarchicalEngine::FindClients() {
  const auto is_before = [this](int a, int b) {
    const RankRange& of_a = layout_.hosts()[layout_.HostOf(a)];
    const RankRange& of_b = layout_.hosts()[layout_.HostOf(b)];
    const int left = (a - of_a.begin) * of_b.size();
    const int right = (b - of_b.begin) * of_a.size();
    return left != right ? left < right : a < b;
  };
  ranks_.resize(layout_.ranks());
  std::iota(ranks_.begin(), ranks_.end(), 0);
  std::sort(ranks_.begin(), ranks_.end(), is_before);
  clients_.resize(members_);
  for (int place = 0; place < layout_.ranks(); ++place) {
    const int member = layout_.CourierOf(host_, ranks_[place]) - layout_.local().begin;
    if (ranks_[place] == layout_.rank()) place_ = place;
    if (clients_[member].size() == 0) clients_[member] = {place, place};
    ++clients_[member].end;
  }
}

absl::Status HierarchicalEngine::Run(const CollectiveRequest& request, absl::Time deadline) {
  request_ = &request;
  deadline_ = deadline;
  const CollectiveKey key = KeyOf(request);
  static_assert(std::has_unique_object_representations_v<CollectiveKey>);
  const auto fingerprint = static_cast<uint32_t>(XXH3_64bits(&key, sizeof(key)));
  const bool tagged = request.tag.has_value();
  if (!tagged || request.kind == Kind::kBarrier) {
    link_->Enter(tagged ? fingerprint : 0);
    DDP_RETURN_IF_ERROR(Agree(key));
  }
  link_->Enter(fingerprint);
  return RunKind(request);
}

absl::Status HierarchicalEngine::RunKind(const CollectiveRequest& request) {
  const auto first = [](const auto& list) {
    return list.empty() ? typename std::decay_t<decltype(list)>::value_type() : list.front();
  };
  switch (request.kind) {
    case Kind::kBarrier:  // the agreement has waited for all ranks
      return absl::OkStatus();
    case Kind::kAllReduce:
      return AllReduce(first(request.outputs));
    case Kind::kBroadcast: {
      const std::span<const std::byte> input = first(request.inputs);
      const std::span<std::byte> root(const_cast<std::byte*>(input.data()), input.size());
      return Broadcast(request.inputs.empty() ? first(request.outputs) : root, request.root);
    }
    case Kind::kAllGather:
      return AllGather(first(request.inputs), request.outputs);
    case Kind::kReduceScatter:
      return ReduceScatter(request.inputs, first(request.outputs));
    case Kind::kAllToAll:
      return AllToAll(request.inputs, request.outputs);
    case Kind::kAllGatherSized:
      return AllGatherSized(first(request.inputs));
  }
  return absl::UnimplementedError("an unknown collective");
}

// ---- Steps that all collectives use.

absl::Duration HierarchicalEngine::Left() const { return deadline_ - MonotonicClock().Now(); }

// Runs a step of the collective among the members of this host. With the tag of the collective,
// members that differ wait.
absl::Status HierarchicalEngine::RunLocal(CollectiveRequest request) {
  struct Completion {
    std::atomic<bool> done = false;
    absl::Status status;
  };
  const auto completion = std::make_shared<Completion>();
  request.tag = request_->tag;
  local_->Start(std::move(request), Left(), [completion](const absl::Status& status) {
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

absl::Status HierarchicalEngine::WaitAll(Transfers& transfers) const {
  for (auto& transfer : transfers) DDP_RETURN_IF_ERROR(transfer->Wait(Left()));
  transfers.clear();
  return absl::OkStatus();
}

absl::Status HierarchicalEngine::RunChunks(size_t total, const Steps& steps) {
  size_t received = 0;
  const size_t gather_after = kChunksOnLink + (steps.gather ? 1 : 0);
  for (size_t i = 0; i < total + gather_after; ++i) {
    for (; received < std::min(total, i + 1 + kReceivesAhead); ++received) steps.receive(received);
    if (i < total) DDP_RETURN_IF_ERROR(steps.send(i));
    if (i >= kChunksOnLink && i - kChunksOnLink < total) {
      DDP_RETURN_IF_ERROR(steps.finish(i - kChunksOnLink));
    }
    if (steps.gather && i >= gather_after) DDP_RETURN_IF_ERROR(steps.gather(i - gather_after));
  }
  return absl::OkStatus();
}

// ---- Agreement.

// Waits for all ranks, and names the first one whose key is not that of rank 0; the same on all
// ranks.
absl::Status HierarchicalEngine::Agree(const CollectiveKey& mine) {
  std::vector<CollectiveKey> keys(layout_.ranks(), mine);
  DDP_RETURN_IF_ERROR(GatherValues(keys));
  for (int rank = 1; rank < layout_.ranks(); ++rank) {
    if (keys[rank] == keys.front()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " has started another collective than rank 0, or one of ",
                     "another size or type"));
  }
  return absl::OkStatus();
}

// Puts each rank's own value into the `values` of all ranks.
template <typename T>
absl::Status HierarchicalEngine::GatherValues(std::vector<T>& values) {
  std::vector<std::span<std::byte>> bytes;
  for (T& value : values) bytes.push_back(BytesOf(value));
  return AllGather(bytes[layout_.rank()], bytes);
}

// ---- Broadcast.

absl::Status HierarchicalEngine::BroadcastOnHost(std::span<std::byte> data, int member) {
  if (members_ == 1) return absl::OkStatus();
  CollectiveRequest request{.kind = Kind::kBroadcast, .root = member, .elements = data.size()};
  if (layout_.member() == member) {
    request.inputs = {data};
  } else {
    request.outputs = {data};
  }
  return RunLocal(std::move(request));
}

absl::Status HierarchicalEngine::Broadcast(std::span<std::byte> data, int root) {
  const int root_host = layout_.HostOf(root);
  const bool from_here = root_host == host_;
  // Other hosts pass the pieces on as they come.
  std::vector<std::span<std::byte>> pieces;
  for (size_t offset = 0; offset < data.size(); offset += chunk_bytes_) {
    pieces.push_back(data.subspan(offset, std::min(chunk_bytes_, data.size() - offset)));
  }
  Transfers transfers;
  for (const std::span<std::byte> piece : pieces) {
    if (layout_.rank() == root) {
      for (int host = 0; host < layout_.host_count(); ++host) {
        if (host == root_host) continue;
        transfers.push_back(link_->Send(layout_.hosts()[host].begin, Stream::kData, piece));
      }
    } else if (!from_here && layout_.member() == 0) {
      transfers.push_back(link_->Receive(root, Stream::kData, piece));
    }
  }
  if (from_here) {
    DDP_RETURN_IF_ERROR(BroadcastOnHost(data, root - layout_.local().begin));
    return WaitAll(transfers);
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (layout_.member() == 0) DDP_RETURN_IF_ERROR(transfers[i]->Wait(Left()));
    DDP_RETURN_IF_ERROR(BroadcastOnHost(pieces[i], 0));
  }
  return absl::OkStatus();
}

// ---- All-gather.

size_t HierarchicalEngine::BytesOfPart() const {
  return std::max(chunk_bytes_ / layout_.ranks() / kLine * kLine, kLine);
}

absl::Status HierarchicalEngine::AllGather(std::span<const std::byte> input, Outputs outputs) {
  const std::span<std::byte> own = outputs[layout_.rank()];
  Copy(input, own);
  const size_t step = BytesOfPart();
  std::vector<Transfers> pieces((input.size() + step - 1) / step);
  const auto piece_of = [&](size_t number, std::span<std::byte> part) {
    return part.subspan(number * step, std::min(step, part.size() - number * step));
  };
  for (size_t n = 0; n < pieces.size(); ++n) {
    ForEachClient([&](int /*place*/, int rank) {
      pieces[n].push_back(link_->Receive(rank, Stream::kData, piece_of(n, outputs[rank])));
    });
    ForEachCourier([&](int /*host*/, int rank) {
      pieces[n].push_back(link_->Send(rank, Stream::kData, piece_of(n, own)));
    });
  }
  for (size_t n = 0; n < pieces.size(); ++n) {
    DDP_RETURN_IF_ERROR(WaitAll(pieces[n]));
    DDP_RETURN_IF_ERROR(GatherOnHost(outputs, n * step, piece_of(n, own).size()));
  }
  return absl::OkStatus();
}

// Copies what the members of this host have for their clients to each other. Every turn is a
// collective, in which each member gives the part of its next client.
absl::Status HierarchicalEngine::GatherOnHost(Outputs outputs, size_t begin, size_t bytes) {
  if (members_ == 1) return absl::OkStatus();
  int turns = 0;
  for (const RankRange clients : clients_) turns = std::max(turns, clients.size());
  for (int turn = 0; turn < turns; ++turn) {
    CollectiveRequest request{.kind = Kind::kAllGather, .elements = bytes};
    for (const RankRange clients : clients_) {
      request.outputs.push_back(turn < clients.size()
                                    ? outputs[ranks_[clients.begin + turn]].subspan(begin, bytes)
                                    : std::span<std::byte>());
    }
    request.inputs = {request.outputs[layout_.member()]};
    DDP_RETURN_IF_ERROR(RunLocal(std::move(request)));
  }
  return absl::OkStatus();
}

// ---- From each rank to each.

// Copies input number n to rank n, into its output of this rank's number. The sizes fit.
absl::Status HierarchicalEngine::Exchange(Inputs inputs, Outputs outputs) {
  Transfers transfers;
  const int ranks = layout_.ranks();
  for (int step = 1; step < ranks; ++step) {
    const int from = (layout_.rank() + ranks - step) % ranks;
    if (layout_.HostOf(from) == host_ || outputs[from].empty()) continue;
    transfers.push_back(link_->Receive(from, Stream::kData, outputs[from]));
  }
  for (int step = 1; step < ranks; ++step) {
    const int to = (layout_.rank() + step) % ranks;
    if (layout_.HostOf(to) == host_ || inputs[to].empty()) continue;
    transfers.push_back(link_->Send(to, Stream::kData, inputs[to]));
  }
  if (members_ == 1) {
    Copy(inputs[layout_.rank()], outputs[layout_.rank()]);
  } else {
    CollectiveRequest request{.kind = Kind::kAllToAll};
    for (int rank = layout_.local().begin; rank < layout_.local().end; ++rank) {
      request.inputs.push_back(inputs[rank]);
      request.outputs.push_back(outputs[rank]);
    }
    DDP_RETURN_IF_ERROR(RunLocal(std::move(request)));
  }
  return WaitAll(transfers);
}

// Compares the sizes that all ranks send and receive first: Gloo would end the process.
absl::Status HierarchicalEngine::AllToAll(Inputs inputs, Outputs outputs) {
  const int ranks = layout_.ranks();
  struct Sizes {
    size_t sent, received;
  };
  std::vector<Sizes> sizes(static_cast<size_t>(ranks) * ranks);  // of each rank: by the other one
  const auto row = [&](int rank) { return std::span(sizes).subspan(rank * ranks, ranks); };
  std::vector<std::span<std::byte>> rows;
  for (int rank = 0; rank < ranks; ++rank) {
    rows.push_back(std::as_writable_bytes(row(rank)));
    row(layout_.rank())[rank] = {.sent = inputs[rank].size(), .received = outputs[rank].size()};
  }
  DDP_RETURN_IF_ERROR(AllGather(rows[layout_.rank()], rows));
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      const size_t gives = row(from)[to].sent;
      const size_t takes = row(to)[from].received;
      if (gives == takes) continue;
      return absl::InvalidArgumentError(absl::StrCat("rank ", from, " gives rank ", to, " ", gives,
                                                     " bytes, and rank ", to, " takes ", takes));
    }
  }
  return Exchange(inputs, outputs);
}

absl::Status HierarchicalEngine::AllGatherSized(std::span<const std::byte> input) {
  std::vector<size_t> sizes(layout_.ranks());
  sizes[layout_.rank()] = input.size();
  DDP_RETURN_IF_ERROR(GatherValues(sizes));
  return Exchange(std::vector(layout_.ranks(), input), request_->on_sizes(sizes));
}

}  // namespace ddp::internal
