// Length: a second file would compile LibTorch's headers once more, which takes 15 s.

#include "ddp/optim/sharded_parameters.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <span>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <torch/optim/optimizer.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/collective.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/shared_memory/registered_memory.h"
#include "ddp/comm/shared_memory/shared_memory_backend.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/optim/peer_memory.h"
#include "ddp/process_group.h"

namespace ddp::internal {
namespace {

// Returns elements of a tensor without gaps as one row, in the order of its memory. As
// FlatView().narrow(), with one call of LibTorch less: models have thousands of parameters.
at::Tensor FlatPart(const at::Tensor& dense, const ShardPlan::Piece& piece) {
  return dense.detach().as_strided({piece.size()}, {1}, dense.storage_offset() + piece.begin);
}

// Returns the memory that the ranks of `group` share; null when they share none, or there is one.
std::shared_ptr<HostGroup> SharedBy(ProcessGroup& group) {
  if (group.size() == 1) return nullptr;
  c10d::Backend* const backend = group.communicator().backend();
  return backend != nullptr && IsSharedMemory(*backend) ? HostGroupOf(*backend) : nullptr;
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

at::Tensor FlatView(const at::Tensor& dense) {
  return dense.detach().as_strided({dense.numel()}, {1});
}

ShardedParameters::ShardedParameters(ShardPlan::Options options, int rank)
    : options_(options), rank_(rank), plan_(options) {}

ShardedParameters::~ShardedParameters() {
  if (peers_ == nullptr || transfers_.empty()) return;
  try {
    FinishTransfer();
  } catch (const std::exception& error) {  // the group has ended, and peers have stopped
    LOG(WARNING) << "parameters of a ZeroRedundancyOptimizer have old and new values: "
                 << MessageOf(error);
  }
}

ShardedParameters::Form ShardedParameters::FormOf(const at::Tensor& tensor) {
  return {.type = tensor.scalar_type(),
          .device = tensor.device(),
          .sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec()};
}

ShardPlan::Tensor ShardedParameters::Property(const at::Tensor& tensor) {
  const std::string kind =
      absl::StrCat(toString(tensor.scalar_type()), tensor.device().str(), tensor.requires_grad());
  return {.elements = tensor.numel(),
          .element_bytes = static_cast<int64_t>(tensor.element_size()),
          .kind = kinds_.emplace(kind, static_cast<int>(kinds_.size())).first->second,
          .flat = tensor.is_non_overlapping_and_dense() && !tensor.is_complex()};
}

std::vector<size_t> ShardedParameters::Add(const std::vector<std::vector<at::Tensor>>& groups) {
  const size_t old_buckets = plan_.buckets().size();
  std::vector<std::vector<ShardPlan::Tensor>> properties;
  for (const std::vector<at::Tensor>& group : groups) {
    properties.emplace_back();
    for (const at::Tensor& tensor : group) {
      tensors_.push_back(tensor);
      groups_.push_back(group_count_);
      forms_.push_back(FormOf(tensor));
      properties.back().push_back(Property(tensor));
    }
    ++group_count_;
  }
  plan_.Add(properties);
  std::vector<Mine> added;
  for (size_t b = old_buckets; b < plan_.buckets().size(); ++b) {
    for (const ShardPlan::Piece& piece : plan_.Pieces(static_cast<int>(b), rank_)) {
      Mine mine{.bucket = static_cast<int>(b), .piece = piece, .group = groups_[piece.parameter]};
      mine.view = ViewOf(mine);
      added.push_back(std::move(mine));
    }
  }
  // The order of the parameters: an optimizer takes them in the order of its groups.
  std::stable_sort(added.begin(), added.end(), [](const Mine& a, const Mine& b) {
    return a.piece.parameter < b.piece.parameter;
  });
  std::vector<size_t> numbers;
  for (Mine& mine : added) {
    numbers.push_back(mine_.size());
    mine_.push_back(std::move(mine));
  }
  return numbers;
}

at::Tensor ShardedParameters::ViewOf(const Mine& mine) const {
  const at::Tensor& tensor = tensors_[mine.piece.parameter];
  if (plan_.buckets()[mine.bucket].owner >= 0) return tensor.detach();
  return FlatPart(tensor, mine.piece);
}

bool ShardedParameters::HasGroups(
    const std::vector<torch::optim::OptimizerParamGroup>& groups) const {
  if (static_cast<int>(groups.size()) != group_count_) return false;
  size_t number = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const at::Tensor& tensor : groups[g].params()) {
      if (number == tensors_.size() || groups_[number] != static_cast<int>(g) ||
          !tensors_[number].is_same(tensor)) {
        return false;
      }
      ++number;
    }
  }
  return number == tensors_.size();
}

bool ShardedParameters::Form::Fits(const at::Tensor& tensor) const {
  return tensor.scalar_type() == type && tensor.device() == device && tensor.sizes() == sizes &&
         tensor.strides() == strides;
}

int ShardedParameters::FindChanged() const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!forms_[i].Fits(tensors_[i])) return static_cast<int>(i);
  }
  return -1;
}

int ShardedParameters::FindUnusableGradient() const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& gradient = tensors_[i].grad();
    if (!gradient.defined()) continue;
    if (gradient.layout() != at::kStrided || gradient.sizes() != tensors_[i].sizes() ||
        gradient.scalar_type() != tensors_[i].scalar_type() ||
        gradient.device() != tensors_[i].device()) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

void ShardedParameters::FollowMemory() {
  for (Mine& mine : mine_) {
    const at::Tensor& tensor = tensors_[mine.piece.parameter];
    const auto* const memory = static_cast<const std::byte*>(tensor.const_data_ptr());
    const auto begin = mine.piece.begin * static_cast<int64_t>(tensor.element_size());
    if (memory + begin != mine.view.const_data_ptr()) mine.view.set_data(ViewOf(mine));
  }
}

at::Tensor ShardedParameters::GradientOf(int bucket, const ShardPlan::Piece& piece) const {
  const at::Tensor& tensor = tensors_[piece.parameter];
  const at::Tensor& gradient = tensor.grad();
  if (!gradient.defined()) return {};
  if (plan_.buckets()[bucket].owner >= 0) return gradient.detach();
  if (gradient.strides() == tensor.strides()) return FlatPart(gradient, piece);
  return FlatPart(at::empty_like(tensor).copy_(gradient), piece);  // in another memory order
}

std::vector<at::Tensor> ShardedParameters::GradientsOf(int bucket, int rank) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const ShardPlan::Piece& piece : plan_.Pieces(bucket, rank)) {
    gradients.push_back(GradientOf(bucket, piece));
  }
  return gradients;
}

void ShardedParameters::TakeGradients() {
  const at::NoGradGuard no_grad;
  for (Mine& mine : mine_) mine.view.mutable_grad() = GradientOf(mine.bucket, mine.piece);
}

void ShardedParameters::TakeGradients(const std::vector<at::Tensor>& instead) {
  for (size_t i = 0; i < mine_.size(); ++i) mine_[i].view.mutable_grad() = instead[i];
}

void ShardedParameters::DropGradients() {
  for (Mine& mine : mine_) mine.view.mutable_grad().reset();
}

std::vector<bool> ShardedParameters::BucketsWithGradients() const {
  std::vector<bool> with;
  for (const ShardPlan::Bucket& bucket : plan_.buckets()) {
    with.push_back(
        std::any_of(bucket.parameters.begin(), bucket.parameters.end(),
                    [this](int parameter) { return tensors_[parameter].grad().defined(); }));
  }
  return with;
}

void ShardedParameters::StartTransfer(ProcessGroup& group, const std::vector<bool>& sent) {
  if (options_.ranks == 1) return;
  const at::NoGradGuard no_grad;
  try {
    StartCollectives(group, sent);
    if (peers_ != nullptr) WriteToPeers(group, sent);
  } catch (...) {
    AbandonPeers();
    DropTransfers();  // those that have been started may complete: this is no complete step
    throw;
  }
}

void ShardedParameters::StartCollectives(ProcessGroup& group, const std::vector<bool>& sent) {
  for (size_t b = 0; b < plan_.buckets().size(); ++b) {
    const ShardPlan::Bucket& bucket = plan_.buckets()[b];
    if (!sent[b] || bucket.elements == 0 || ReachesPeers(bucket)) continue;
    const at::TensorOptions options = tensors_[bucket.parameters.front()].options();
    const bool even = bucket.owner < 0;
    Transfer transfer = TransferOf(b);
    transfer.values = at::empty({even ? options_.ranks * bucket.part : bucket.part},
                                options.requires_grad(false));
    const int64_t begin = even ? rank_ * bucket.part : 0;  // of this rank's part
    for (const Mine& mine : mine_) {
      if (mine.bucket != transfer.bucket) continue;
      at::Tensor to = transfer.values.narrow(0, begin + mine.piece.offset, mine.piece.size());
      to.view(mine.view.sizes()).copy_(mine.view);
    }
    transfer.works = Send(group, bucket, transfer.values);
    transfers_.push_back(std::move(transfer));
  }
}

ShardedParameters::Transfer ShardedParameters::TransferOf(size_t bucket) const {
  Transfer transfer{.bucket = static_cast<int>(bucket)};
  for (const int parameter : plan_.buckets()[bucket].parameters) {
    const at::Tensor& tensor = tensors_[parameter];
    transfer.memory.push_back({.storage = tensor.storage(), .data = tensor.const_data_ptr()});
  }
  return transfer;
}

std::vector<Work> ShardedParameters::Send(ProcessGroup& group, const ShardPlan::Bucket& bucket,
                                          const at::Tensor& values) const {
  if (bucket.owner >= 0) return {group.broadcast_async(values, bucket.owner)};
  std::vector<Work> works;
  if (group.backend() == "gloo" && options_.ranks == 2) {
    // LibTorch's Gloo copies all values once more in an all-gather, and none in a broadcast.
    for (int rank = 0; rank < options_.ranks; ++rank) {
      const at::Tensor part = values.narrow(0, rank * bucket.part, bucket.part);
      works.push_back(group.broadcast_async(part, rank));
    }
    return works;
  }
  const at::Tensor mine = values.narrow(0, rank_ * bucket.part, bucket.part);
  works.push_back(group.all_gather_async(values, mine));
  return works;
}

int ShardedParameters::FinishTransfer() {
  const at::NoGradGuard no_grad;
  std::vector<Transfer> transfers = std::move(transfers_);
  transfers_.clear();
  int changed = -1;
  for (Transfer& transfer : transfers) {
    try {
      for (Work& work : transfer.works) work.wait();
    } catch (...) {
      transfers_ = std::move(transfers);
      AbandonPeers();
      DropTransfers();
      throw;
    }
    const int parameter = Write(transfer);
    if (changed < 0) changed = parameter;
  }
  if (peers_ != nullptr) peers_->Complete();
  return changed;
}

int ShardedParameters::Write(const Transfer& transfer) {
  const ShardPlan::Bucket& bucket = plan_.buckets()[transfer.bucket];
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const int parameter = bucket.parameters[i];
    if (tensors_[parameter].const_data_ptr() != transfer.memory[i].data) return parameter;
    // As a write by LibTorch: autograd refuses to use older values that it has saved.
    if (!transfer.values.defined()) tensors_[parameter].unsafeGetTensorImpl()->bump_version();
  }
  if (!transfer.values.defined()) return -1;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (rank == rank_) continue;
    for (const ShardPlan::Piece& piece : plan_.Pieces(transfer.bucket, rank)) {
      const at::Tensor& tensor = tensors_[piece.parameter];
      if (bucket.owner >= 0) {
        const at::Tensor from = transfer.values.narrow(0, piece.offset, piece.size());
        tensor.detach().copy_(from.view(tensor.sizes()));
      } else {
        const int64_t start = rank * bucket.part + piece.offset;
        FlatView(tensor)
            .narrow(0, piece.begin, piece.size())
            .copy_(transfer.values.narrow(0, start, piece.size()));
      }
    }
  }
  return -1;
}

// ---- Memory that the other ranks see.

void ShardedParameters::Share(ProcessGroup& group) {
  if (SharedBy(group) == nullptr) return;
  const at::NoGradGuard no_grad;
  if (!mark_.defined()) {
    mark_ = AllocateRegistered(1, at::kLong);
    mark_.zero_();
  }
  for (const ShardPlan::Bucket& bucket : plan_.buckets()) {
    std::vector<const at::Tensor*> moved;
    int64_t bytes = 0;
    for (const int parameter : bucket.parameters) {
      const at::Tensor& tensor = tensors_[parameter];
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

bool ShardedParameters::MustPublish(ProcessGroup& group) const {
  const std::shared_ptr<HostGroup> shared = SharedBy(group);
  if (shared == nullptr) return false;
  if (peers_ == nullptr || peers_->group() != shared || places_.size() != tensors_.size()) {
    return true;
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (PlaceOf(tensors_[i].const_data_ptr(), tensors_[i].nbytes()) != places_[i]) return true;
  }
  return false;
}

void ShardedParameters::Publish(ProcessGroup& group) {
  const std::shared_ptr<HostGroup> shared = SharedBy(group);
  if (shared == nullptr) return;
  ForgetPeers();
  Share(group);
  const auto count = static_cast<int64_t>(tensors_.size());
  at::Tensor mine = at::empty({count + 1}, at::kLong);
  auto* const words = mine.mutable_data_ptr<int64_t>();
  words[0] =
      mark_.defined() ? PlaceOf(mark_.const_data_ptr(), sizeof(int64_t)) : PeerMemory::kElsewhere;
  std::vector<int64_t> bytes;
  for (const at::Tensor& tensor : tensors_) {
    bytes.push_back(static_cast<int64_t>(tensor.nbytes()));
    places_.push_back(PlaceOf(tensor.const_data_ptr(), tensor.nbytes()));
    words[places_.size()] = FillsItsStorage(tensor) ? places_.back() : PeerMemory::kElsewhere;
  }
  peers_ = std::make_unique<PeerMemory>(shared, words[0]);
  at::Tensor all = at::empty({options_.ranks * (count + 1)}, at::kLong);
  group.all_gather(all, mine);
  std::vector<PeerMemory::Places> places;
  const auto* word = all.const_data_ptr<int64_t>();
  for (int rank = 0; rank < options_.ranks; ++rank, word += count + 1) {
    places.push_back({.mark = word[0], .parameters = {word + 1, word + 1 + count}});
  }
  peers_->Connect(places, bytes);
}

bool ShardedParameters::ReachesPeers(const ShardPlan::Bucket& bucket) const {
  return peers_ != nullptr &&
         std::all_of(bucket.parameters.begin(), bucket.parameters.end(),
                     [this](int parameter) { return peers_->Reaches(parameter); });
}

// Writes this rank's part of the buckets into the parameters of all ranks. A barrier tells that all
// ranks have done so.
void ShardedParameters::WriteToPeers(ProcessGroup& group, const std::vector<bool>& sent) {
  const size_t first = transfers_.size();
  for (size_t b = 0; b < plan_.buckets().size(); ++b) {
    const ShardPlan::Bucket& bucket = plan_.buckets()[b];
    if (!sent[b] || bucket.elements == 0 || !ReachesPeers(bucket)) continue;
    transfers_.push_back(TransferOf(b));
  }
  if (transfers_.size() == first) return;
  peers_->Begin();
  bool alive = true;
  for (size_t t = first; alive && t < transfers_.size(); ++t) {
    for (const ShardPlan::Piece& piece : plan_.Pieces(transfers_[t].bucket, rank_)) {
      const at::Tensor& tensor = tensors_[piece.parameter];
      const auto element = static_cast<int64_t>(tensor.element_size());
      const auto* const values = static_cast<const std::byte*>(tensor.const_data_ptr());
      alive = alive && peers_->Write(piece.parameter, piece.begin * element,
                                     {values + piece.begin * element,
                                      static_cast<size_t>(piece.size() * element)});
    }
  }
  if (alive) {
    transfers_[first].works.push_back(group.barrier_async());
    return;
  }
  // The group has ended. An operation that never completes finds out why.
  Collective described{.output = at::empty({1})};
  Communicator::Pending never = group.communicator().StartOwn(
      described, "the values of a ZeroRedundancyOptimizer", [](c10d::Backend& backend) {
        return StartAside(backend,
                          {.advance = [] { return false; }, .may_advance = [] { return false; }});
      });
  group.communicator().Wait(never);
}

bool ShardedParameters::written_by_peers() const { return peers_ != nullptr && peers_->written(); }

void ShardedParameters::AbandonPeers() {
  if (peers_ == nullptr || peers_->Abandon(absl::Seconds(1))) return;
  LeaveArena();
}

void ShardedParameters::ForgetPeers() {
  peers_.reset();
  places_.clear();
}

// A stopped peer may go on at any time, and write into the arena: nothing may use the memory again.
void ShardedParameters::LeaveArena() {
  struct Kept {
    Mutex mutex;
    std::vector<at::Tensor> marks ABSL_GUARDED_BY(mutex);
    std::vector<at::DataPtr> memory ABSL_GUARDED_BY(mutex);
    std::vector<c10::Storage> storages ABSL_GUARDED_BY(mutex);
  };
  static auto* const kept = new Kept;
  const MutexLock lock(kept->mutex);
  kept->marks.push_back(std::move(mark_));
  for (const at::Tensor& tensor : tensors_) {
    const c10::Storage& storage = tensor.storage();
    if (PlaceOf(storage.data(), storage.nbytes()) < 0) continue;
    at::DataPtr data = c10::GetDefaultCPUAllocator()->allocate(storage.nbytes());
    std::memcpy(data.get(), storage.data(), storage.nbytes());
    kept->memory.push_back(storage.set_data_ptr(std::move(data)));
  }
  // Parameters may have got other memory since the transfers began.
  for (const Transfer& transfer : transfers_) {
    for (const Memory& memory : transfer.memory) {
      const c10::Storage& storage = memory.storage;
      if (PlaceOf(storage.data(), storage.nbytes()) >= 0) kept->storages.push_back(storage);
    }
  }
}

}  // namespace ddp::internal
