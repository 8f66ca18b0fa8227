#include "ddp/optim/peer_writer.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "absl/time/time.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/collective.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/engine_backend/engine_backend.h"
#include "ddp/comm/shared_memory/registered_memory.h"
#include "ddp/common/keep_forever.h"
#include "ddp/common/logging.h"
#include "ddp/process_group.h"

namespace ddp::internal {
namespace {

// Returns the memory that the ranks of `group` share; null when they share none, or there is one.
std::shared_ptr<HostGroup> SharedBy(ProcessGroup& group) {
  if (group.size() == 1) return nullptr;
  c10d::Backend* const backend = group.communicator().backend();
  return backend != nullptr ? OneHostGroupOf(*backend) : nullptr;
}

// Returns the place of `bytes` in the arena of this process, or PeerMemory::kElsewhere.
int64_t PlaceOf(const void* memory, size_t bytes) {
  const Arena& arena = Arena::OfProcess();
  if (memory == nullptr || !arena.Contains(memory, bytes)) return PeerMemory::kElsewhere;
  return static_cast<const std::byte*>(memory) - arena.base();
}

// Returns true when the elements of a tensor are those of its storage.
bool FillsItsStorage(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided &&
         tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg() &&
         tensor.storage_offset() == 0 && tensor.storage().nbytes() == tensor.nbytes();
}

// Memory of others, such as a mapped file, stays where it is.
bool IsAllocatorsOwn(const at::DataPtr& data) {
  const auto is_of = [&data](const at::Allocator& allocator) {
    return allocator.raw_deleter() != nullptr && data.get_deleter() == allocator.raw_deleter();
  };
  return data.get() == data.get_context() &&
         (is_of(*c10::GetCPUAllocator()) || is_of(*c10::GetDefaultCPUAllocator()));
}

constexpr int64_t kAlignment = 64;

int64_t RoundUp(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

void PeerWriter::Share() {
  if (SharedBy(group_) == nullptr) return;
  const at::NoGradGuard no_grad;
  if (!mark_.defined()) {
    mark_ = AllocateRegistered(1, at::kLong);
    mark_.zero_();
  }
  for (const ShardPlan::Bucket& bucket : parameters_.plan().buckets()) {
    std::vector<const at::Tensor*> moved;
    int64_t bytes = 0;
    for (const int parameter : bucket.parameters) {
      const at::Tensor& tensor = parameters_.tensors()[parameter];
      if (!tensor.requires_grad() || tensor.nbytes() == 0 || !FillsItsStorage(tensor) ||
          PlaceOf(tensor.const_data_ptr(), tensor.nbytes()) >= 0 ||
          !IsAllocatorsOwn(tensor.storage().data_ptr())) {
        continue;
      }
      moved.push_back(&tensor);
      bytes += RoundUp(static_cast<int64_t>(tensor.nbytes()));
    }
    if (moved.empty()) continue;
    const at::Tensor block = AllocateRegistered(bytes, at::kByte);
    auto* to = static_cast<std::byte*>(block.mutable_data_ptr());
    if (PlaceOf(to, bytes) < 0) {
      LOG(WARNING) << "the parameters of a ZeroRedundancyOptimizer are not in shared memory: the "
                      "arena has no room";
      return;
    }
    for (const at::Tensor* const tensor : moved) {
      if (PlaceOf(tensor->const_data_ptr(), tensor->nbytes()) >= 0) continue;  // an alias
      std::memcpy(to, tensor->const_data_ptr(), tensor->nbytes());
      tensor->storage().set_data_ptr_noswap(at::DataPtr(
          to, new at::Tensor(block), [](void* kept) { delete static_cast<at::Tensor*>(kept); },
          at::kCPU));
      to += RoundUp(static_cast<int64_t>(tensor->nbytes()));
    }
  }
}

bool PeerWriter::MustPublish() const {
  const std::shared_ptr<HostGroup> shared = SharedBy(group_);
  if (shared == nullptr) return false;
  const std::vector<at::Tensor>& tensors = parameters_.tensors();
  if (!published() || peers_->group() != shared || places_.size() != tensors.size()) return true;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (PlaceOf(tensors[i].const_data_ptr(), tensors[i].nbytes()) != places_[i]) return true;
  }
  return false;
}

void PeerWriter::Publish() {
  const std::shared_ptr<HostGroup> shared = SharedBy(group_);
  if (shared == nullptr) return;
  Forget();
  Share();
  const auto count = static_cast<int64_t>(parameters_.tensors().size());
  at::Tensor mine = at::empty({count + 1}, at::kLong);
  auto* const words = mine.mutable_data_ptr<int64_t>();
  words[0] =
      mark_.defined() ? PlaceOf(mark_.const_data_ptr(), sizeof(int64_t)) : PeerMemory::kElsewhere;
  std::vector<int64_t> bytes;
  for (const at::Tensor& tensor : parameters_.tensors()) {
    bytes.push_back(static_cast<int64_t>(tensor.nbytes()));
    places_.push_back(PlaceOf(tensor.const_data_ptr(), tensor.nbytes()));
    words[places_.size()] = FillsItsStorage(tensor) ? places_.back() : PeerMemory::kElsewhere;
  }
  peers_ = std::make_unique<PeerMemory>(shared, words[0]);
  at::Tensor all = at::empty({parameters_.ranks() * (count + 1)}, at::kLong);
  group_.all_gather(all, mine);
  std::vector<PeerMemory::Places> places;
  const auto* word = all.const_data_ptr<int64_t>();
  for (int rank = 0; rank < parameters_.ranks(); ++rank, word += count + 1) {
    places.push_back({.mark = word[0], .parameters = {word + 1, word + 1 + count}});
  }
  peers_->Connect(places, bytes);
}

void PeerWriter::Forget() {
  peers_.reset();
  places_.clear();
}

bool PeerWriter::Reaches(const ShardPlan::Bucket& bucket) const {
  return published() && std::all_of(bucket.parameters.begin(), bucket.parameters.end(),
                                    [this](int parameter) { return peers_->Reaches(parameter); });
}

Work PeerWriter::Write(const std::vector<int>& buckets) {
  peers_->Begin();
  bool alive = true;
  for (const int bucket : buckets) {
    for (const ShardPlan::Piece& piece : parameters_.plan().Pieces(bucket, parameters_.rank())) {
      const at::Tensor& tensor = parameters_.tensors()[piece.parameter];
      const auto element = static_cast<int64_t>(tensor.element_size());
      const auto* const values = static_cast<const std::byte*>(tensor.const_data_ptr());
      alive = alive && peers_->Write(piece.parameter, piece.begin * element,
                                     {values + piece.begin * element,
                                      static_cast<size_t>(piece.size() * element)});
    }
  }
  if (alive) return group_.barrier_async();
  // The group has ended. An operation that never completes finds out why.
  Collective described{.output = at::empty({1})};
  Communicator::Pending never = group_.communicator().StartOwn(
      described, "the values of a ZeroRedundancyOptimizer", [](c10d::Backend& backend) {
        const auto never = [] { return false; };
        return StartOwn(backend, {.advance = never, .may_advance = never});
      });
  group_.communicator().Wait(never);
  return {};
}

void PeerWriter::Complete() {
  if (published()) peers_->Complete();
}

bool PeerWriter::written() const { return published() && peers_->written(); }

void PeerWriter::Abandon(const std::vector<c10::Storage>& in_use) {
  if (published() && !peers_->Abandon(absl::Seconds(1))) LeaveArena(in_use);
}

// A stopped peer may go on at any time, and write into the arena: nothing may use the memory again.
void PeerWriter::LeaveArena(const std::vector<c10::Storage>& in_use) {
  KeepForever(std::move(mark_));
  for (const at::Tensor& tensor : parameters_.tensors()) {
    const c10::Storage& storage = tensor.storage();
    if (PlaceOf(storage.data(), storage.nbytes()) < 0) continue;
    at::DataPtr data = c10::GetDefaultCPUAllocator()->allocate(storage.nbytes());
    std::memcpy(data.get(), storage.data(), storage.nbytes());
    KeepForever(storage.set_data_ptr(std::move(data)));
  }
  // Parameters may have got other memory since the transfers began.
  for (const c10::Storage& storage : in_use) {
    if (PlaceOf(storage.data(), storage.nbytes()) >= 0) KeepForever(storage);
  }
}

}  // namespace ddp::internal
