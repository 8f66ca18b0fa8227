#include "ddp/reducer/buckets/in_place_reduction.h"
#include "ddp/comm/engine_backend/engine_backend.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/common/keep_forever.h"
#include "ddp/common/logging.h"
#include "ddp/reducer/arena/arena_allocator.h"
#include "ddp/reducer/arena/gradient_block.h"
#include "ddp/reducer/buckets/gradient_check.h"
#include "ddp/reducer/buckets/gradient_context.h"

namespace ddp::internal {
namespace {

// A number that no other pass of this process has: see Arena::Claim().
uint64_t NextClaim() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

bool HasLayoutOf(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.layout() == at::kStrided && gradient.is_cpu() &&
         gradient.scalar_type() == parameter.scalar_type() &&
         gradient.strides() == parameter.strides() && gradient.sizes() == parameter.sizes() &&
         !gradient.is_conj() && !gradient.is_neg();
}

}  // namespace

// ---- Making.

bool InPlaceReduction::Fits(const Setup& setup) {
  for (size_t i = 0; i < setup.parameters.size(); ++i) {
    const at::Tensor& parameter = setup.parameters[i];
    const at::ScalarType type = c10::toRealValueType(parameter.scalar_type());
    const bool dense = parameter.is_cpu() && parameter.is_non_overlapping_and_dense() &&
                       (type == at::kFloat || type == at::kDouble);
    if (!setup.sparse[i] && !dense) return false;
  }
  return true;
}

absl::Status InPlaceReduction::Ensure(Demand& demand, const Setup& setup, const Options& options) {
  Arena::DemandOptions wanted{.capacity_bytes = static_cast<size_t>(options.arena_bytes)};
  for (size_t i = 0; i < setup.parameters.size(); ++i) {
    if (!setup.sparse[i]) wanted.gradient_bytes.push_back(setup.parameters[i].nbytes());
  }
  if (demand.held != nullptr && demand.bytes == wanted.gradient_bytes) return absl::OkStatus();
  demand.held.reset();
  DDP_ASSIGN_OR_RETURN(ArenaDemand added, Arena::OfProcess().AddDemand(wanted));
  if (!InstallArenaAllocator()) {
    return absl::FailedPreconditionError("the program has a CPU allocator of its own");
  }
  demand.bytes = std::move(wanted.gradient_bytes);
  demand.held = std::make_shared<ArenaDemand>(std::move(added));
  return absl::OkStatus();
}

std::unique_ptr<InPlaceReduction> InPlaceReduction::Make(Setup& setup, const Options& options,
                                                         Demand& demand) {
  c10d::Backend* const backend = setup.communicator().backend();
  if (!setup.collective || backend == nullptr || !Fits(setup)) return nullptr;
  const std::shared_ptr<HostGroup> group = OneHostGroupOf(*backend);
  if (group == nullptr) return nullptr;
  std::unique_ptr<InPlaceReduction> made;
  const auto number = static_cast<int64_t>(group->NextNumber());
  absl::StatusOr<int64_t> place = -1;
  if (absl::Status demanded = Ensure(demand, setup, options); demanded.ok()) {
    made.reset(new InPlaceReduction(setup, options, demand.held));
    made->number_ = number;
    place = made->MakeChannel(group);
  } else {
    place = std::move(demanded);
  }
  std::vector<int64_t> places;
  if (!Agree(setup.communicator(), place, demand.told, places)) {
    demand.held.reset();
    return nullptr;
  }
  const absl::Status connected = made->channel_->Connect(places);
  TORCH_CHECK(connected.ok(), connected.message());
  return made;
}

// Gives `places` the place of each rank's channel. Returns false when a rank has none.
bool InPlaceReduction::Agree(Communicator& communicator, const absl::StatusOr<int64_t>& mine,
                             std::string& told, std::vector<int64_t>& places) {
  constexpr int64_t kNone = -1;
  const int rank = communicator.backend()->getRank();
  places.assign(communicator.size(), std::numeric_limits<int64_t>::max());
  places[rank] = mine.ok() ? *mine : kNone;
  const at::Tensor lowest = at::from_blob(places.data(), {communicator.size()}, at::kLong);
  Communicator::Pending pending =
      communicator.AllReduceMin(lowest, "the agreement to reduce gradients in place");
  communicator.Wait(pending);
  const auto refuses = std::find(places.begin(), places.end(), kNone);
  if (refuses - places.begin() == rank && told != mine.status().message()) {
    told = std::string(mine.status().message());
    LOG(WARNING) << "rank " << rank << " cannot reduce gradients in place, so all ranks use flat "
                 << "buckets (reduce_in_place = false gives the same): " << told;
  }
  return refuses == places.end();
}

GradientBuckets::Factory InPlaceReduction::MakerOf(Options options) {
  return [options, demand = Demand()](Setup setup) mutable -> std::unique_ptr<GradientBuckets> {
    if (auto in_place = Make(setup, options, demand)) return in_place;
    return std::make_unique<FlatBuckets>(std::move(setup), options.flat);
  };
}

InPlaceReduction::InPlaceReduction(Setup setup, Options options,
                                   std::shared_ptr<ArenaDemand> demand)
    : GradientBuckets(setup),
      options_(std::move(options)),
      demand_(std::move(demand)),
      slots_(parameter_count()),
      zeroed_(count()) {
  bool any_sparse = false;
  for (int b = 0; b < count(); ++b) {
    for (const int index : members(b)) {
      const at::Tensor& tensor = parameter(index);
      Slot& slot = slots_[index];
      slot.sparse = sparse(index);
      any_sparse |= slot.sparse;
      if (slot.sparse) continue;
      slot.is_double = c10::toRealValueType(tensor.scalar_type()) == at::kDouble;
      slot.count = tensor.numel() * (tensor.is_complex() ? 2 : 1);
      if (tensor.nbytes() >= Arena::kSmallestBlock) {
        slot.large = static_cast<int>(large_.size());
        large_.push_back(index);
        layout_.large.push_back(
            {.type = slot.is_double ? ElementType::kDouble : ElementType::kFloat,
             .count = static_cast<size_t>(slot.count)});
      } else {
        size_t& packed = slot.is_double ? layout_.small_doubles : layout_.small_floats;
        slot.offset = static_cast<int64_t>(packed);
        packed += static_cast<size_t>(slot.count);
      }
    }
  }
  floats_.resize(layout_.small_floats);
  doubles_.resize(layout_.small_doubles);
  if (!any_sparse) return;
  sparse_buckets_ =
      std::make_unique<FlatBuckets>(std::move(setup), FlatBuckets::Options{.lazy = true});
}

absl::StatusOr<int64_t> InPlaceReduction::MakeChannel(std::shared_ptr<HostGroup> group) {
  absl::StatusOr<std::unique_ptr<InPlaceChannel>> channel =
      InPlaceChannel::Make(std::move(group), layout_);
  if (!channel.ok()) return channel.status();
  channel_ = *std::move(channel);
  return channel_->place();
}

InPlaceReduction::~InPlaceReduction() {
  OnBackward(/*begins=*/false);
  Abandon();
}

std::string InPlaceReduction::strategy() const {
  const auto sparse =
      std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.sparse; });
  std::string text =
      absl::StrCat("in place: ", large_.size(), " gradients where they lie, ",
                   slots_.size() - large_.size() - sparse, " packed, ", sparse, " sparse");
  if (counts_.copied > 0) {
    absl::StrAppend(&text, "; in the last pass ", counts_.copied, " were copied into the arena");
  }
  if (counts_.left_out > 0) {
    absl::StrAppend(&text, "; in the last pass ", counts_.left_out,
                    " found no room in the arena: raise arena_bytes");
  }
  return text;
}

void InPlaceReduction::OnBackward(bool begins) {
  if (std::exchange(armed_, begins) == begins) return;
  if (begins) {
    ArmArenaAllocator();
  } else {
    DisarmArenaAllocator();
  }
}

// Other ranks may still write into this rank's gradients until the channel has let go of them.
void InPlaceReduction::Abandon() {
  if (channel_ == nullptr || channel_->Abandon()) return;
  // A stopped rank may go on at any time.
  for (Slot& slot : slots_) {
    if (slot.memory.defined()) KeepForever(std::pair(slot.memory, slot.storage));
  }
}

// ---- A pass.

void InPlaceReduction::set_factor(double factor) {
  factor_ = factor;
  if (sparse_buckets_) sparse_buckets_->set_factor(factor);
  channel_->Begin(factor);
  claim_ = NextClaim();
  counts_ = {};
  sums_.reset();
  complete_ = false;
}

// Returns memory of the arena in the shape and strides of a parameter; undefined when there is no
// room.
at::Tensor InPlaceReduction::AllocateBlock(int index) const {
  const at::Tensor& like = parameter(index);
  Arena& arena = Arena::OfProcess();
  void* const block = arena.Allocate(like.nbytes());
  if (block == nullptr) return {};
  return at::from_blob(
      block, like.sizes(), like.strides(),
      [&arena, demand = demand_](void* memory) { arena.Free(memory); }, like.options());
}

void InPlaceReduction::PublishLarge(int index, const at::Tensor& gradient,
                                    const at::Tensor& input) {
  Slot& slot = slots_[index];
  Arena& arena = Arena::OfProcess();
  slot.in_place = false;
  // Without an input the gradient may be one of an earlier pass, which must stay when no rank uses
  // the parameter in this one.
  if (input.defined() && gradient.defined() && !gradient.requires_grad() && !shared(index) &&
      HasLayoutOf(gradient, parameter(index))) {
    const std::optional<uint64_t> block = SoleBlockOf(arena, gradient, input);
    if (block.has_value() && arena.Claim(*block, claim_)) {
      ++counts_.in_place;
      slot.in_place = true;
      slot.memory = gradient;
      slot.storage = gradient.storage();
      channel_->Publish(slot.large, *block);
      return;
    }
  }
  const at::NoGradGuard no_grad;
  ++counts_.copied;
  slot.memory = AllocateBlock(index);
  const bool shared = slot.memory.defined();
  if (!shared) {
    const at::Tensor& like = parameter(index);
    slot.memory = at::empty_strided(like.sizes(), like.strides(), like.options());
  }
  if (gradient.defined()) {
    slot.memory.copy_(gradient.detach());
  } else {
    slot.memory.zero_();
  }
  if (!shared) return channel_->PublishElsewhere(slot.large);
  const auto* const begin = static_cast<const std::byte*>(slot.memory.const_data_ptr());
  channel_->Publish(slot.large, static_cast<uint64_t>(begin - arena.base()));
}

// Returns the small parameter's part of packed memory as a tensor.
at::Tensor InPlaceReduction::SmallView(int index, void* memory) const {
  const at::Tensor& like = parameter(index);
  return at::from_blob(memory, like.sizes(), like.strides(), like.options());
}

void InPlaceReduction::PackSmall(int index, const at::Tensor& gradient) {
  const Slot& slot = slots_[index];
  void* const packed = slot.is_double ? static_cast<void*>(channel_->small_doubles() + slot.offset)
                                      : static_cast<void*>(channel_->small_floats() + slot.offset);
  const size_t bytes = static_cast<size_t>(slot.count) * (slot.is_double ? 8 : 4);
  if (bytes == 0) return;
  if (!gradient.defined()) {
    std::memset(packed, 0, bytes);
  } else if (HasLayoutOf(gradient, parameter(index))) {
    std::memcpy(packed, gradient.const_data_ptr(), bytes);
  } else {
    const at::NoGradGuard no_grad;
    SmallView(index, packed).copy_(gradient.detach());
  }
}

void InPlaceReduction::CopyIn(int index, const at::Tensor& input) {
  const Slot& slot = slots_[index];
  if (slot.sparse) return sparse_buckets_->CopyIn(index, input);
  const at::Tensor& gradient = GradientOf(parameter(index));
  if (gradient.defined()) CheckDenseGradient(gradient, parameter(index));
  if (slot.large < 0) return PackSmall(index, gradient);
  PublishLarge(index, gradient, input);
}

void InPlaceReduction::Zero(int b) {
  if (sparse(members(b).front())) return sparse_buckets_->Zero(b);
  zeroed_[b] = 1;
}

void InPlaceReduction::Launch(int b) {
  if (sparse(members(b).front())) return sparse_buckets_->Launch(b);
  if (!std::exchange(zeroed_[b], 0)) return;
  for (const int index : members(b)) {
    Slot& slot = slots_[index];
    slot.memory.reset();
    slot.in_place = false;
    if (slot.large < 0) {
      PackSmall(index, {});
    } else {
      channel_->PublishZeros(slot.large);
    }
  }
}

void InPlaceReduction::Wait(int b) {
  if (sparse(members(b).front())) sparse_buckets_->Wait(b);
  if (!complete_) Complete();
}

// The peers sum into a gradient in place, so the program must not find it in `.grad` meanwhile: a
// zero_grad() would reach into the sums of all ranks.
void InPlaceReduction::Hold() {
  for (const int index : large_) {
    const Slot& slot = slots_[index];
    const bool is_sum = slot.in_place && GradientOf(parameter(index)).is_same(slot.memory);
    if (is_sum) SetGradientOf(parameter(index), {});
  }
  Start();
}

void InPlaceReduction::Start() {
  channel_->Finish();
  // Two models of a group have different numbers, and so shapes that differ in a comparison.
  Collective described{
      .output = at::empty({1, 1}).expand({std::max<int64_t>(1, parameter_count()), number_ + 1})};
  sums_ = communicator().StartOwn(
      described, {"the reduction of the gradients in place (reduce_in_place), of model", number_},
      [channel = channel_](c10d::Backend& backend) {
        return StartOwn(backend, {.advance = [channel] { return channel->Advance(); },
                                  .may_advance = [channel] { return channel->MayAdvance(); }});
      });
}

void InPlaceReduction::Complete() {
  if (!sums_.has_value()) Start();
  communicator().Wait(*sums_);
  sums_.reset();
  channel_->SumSmall(floats_.data(), doubles_.data());
  complete_ = true;
  counts_.left_out = static_cast<int>(channel_->left_out().size());
  counts_.copied -= std::min(counts_.copied, counts_.left_out);
  if (counts_.left_out == 0) return;
  if (!std::exchange(warned_, true)) {
    LOG(WARNING) << counts_.left_out << " gradients found no room in the arena of this rank or of "
                 << "another one, and have an all-reduce each: raise arena_bytes";
  }
  SumLeftOut();
}

// The gradients for which some rank's arena had no room.
void InPlaceReduction::SumLeftOut() {
  const at::NoGradGuard no_grad;
  for (const int large : channel_->left_out()) {
    const int index = large_[large];
    Slot& slot = slots_[index];
    at::Tensor memory = slot.memory;
    if (!memory.defined()) {
      memory = at::empty_strided(parameter(index).sizes(), parameter(index).strides(),
                                 parameter(index).options());
      memory.zero_();
    }
    const at::Tensor flat =
        at::from_blob(memory.mutable_data_ptr(), {slot.count},
                      memory.options().dtype(slot.is_double ? at::kDouble : at::kFloat));
    flat.mul_(factor_);
    Communicator::Pending sum =
        communicator().AllReduce(flat, {"the all-reduce of gradient", index});
    communicator().Wait(sum);
  }
}

at::Tensor InPlaceReduction::HookBuffer(int b) {
  LOG(FATAL) << "a comm hook needs flat buckets, and bucket " << b << " is in place";
  return {};
}

void InPlaceReduction::CopyOutLarge(int index) {
  Slot& slot = slots_[index];
  const at::Tensor& gradient = GradientOf(parameter(index));
  if (slot.in_place && !slot.memory.storage().is_alias_of(slot.storage)) {
    const at::Tensor& like = parameter(index);  // the program has set the gradient's data
    slot.memory =
        at::empty({0}, like.options()).set_(slot.storage, 0, like.sizes(), like.strides());
  }
  if (gradient.is_same(slot.memory)) return;
  if (!gradient.defined()) {
    SetGradientOf(parameter(index), slot.memory);
  } else if (gradient.requires_grad()) {
    SetGradientOf(parameter(index), slot.memory.clone());
  } else {
    gradient.copy_(slot.memory);
  }
}

void InPlaceReduction::CopyOutSmall(int index) {
  const Slot& slot = slots_[index];
  void* const packed = slot.is_double ? static_cast<void*>(doubles_.data() + slot.offset)
                                      : static_cast<void*>(floats_.data() + slot.offset);
  const at::Tensor& gradient = GradientOf(parameter(index));
  if (gradient.defined() && !gradient.requires_grad() && HasLayoutOf(gradient, parameter(index))) {
    if (slot.count == 0) return;
    std::memcpy(gradient.mutable_data_ptr(), packed,
                static_cast<size_t>(slot.count) * (slot.is_double ? 8 : 4));
    return;
  }
  const at::Tensor view = SmallView(index, packed);
  if (!gradient.defined() || gradient.requires_grad()) {
    SetGradientOf(parameter(index), view.clone());
  } else {
    gradient.copy_(view);
  }
}

int InPlaceReduction::CopyOut(int b, const at::Tensor& result, const uint8_t* untouched) {
  if (sparse(members(b).front())) return sparse_buckets_->CopyOut(b, result, untouched);
  const at::NoGradGuard no_grad;
  for (const int index : members(b)) {
    if (untouched != nullptr && untouched[index]) continue;
    if (slots_[index].large >= 0) {
      CopyOutLarge(index);
    } else {
      CopyOutSmall(index);
    }
  }
  Discard(b);
  return -1;
}

void InPlaceReduction::Discard(int b) {
  if (sparse(members(b).front())) return sparse_buckets_->Discard(b);
  zeroed_[b] = 0;
  for (const int index : members(b)) {
    slots_[index].memory.reset();
    slots_[index].storage = {};
  }
}

}  // namespace ddp::internal
