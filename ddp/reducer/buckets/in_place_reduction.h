#ifndef DDP_REDUCER_BUCKETS_IN_PLACE_REDUCTION_H_
#define DDP_REDUCER_BUCKETS_IN_PLACE_REDUCTION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm/arena/arena.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/shared_memory/in_place_channel.h"
#include "ddp/reducer/buckets/flat_buckets.h"
#include "ddp/reducer/buckets/gradient_buckets.h"

namespace ddp::internal {

// Averages gradients where they lie, over ranks of one host that share memory: no flat tensor and
// no copy. See InPlaceChannel for the protocol.
//
// Large gradients (16 KiB and more). While a backward runs, LibTorch's allocator serves tensors of
// their sizes from the arena that all ranks of the host see (ArenaAllocator). CopyIn() publishes
// such a gradient, and sums slices of gradients that all ranks have published. A gradient that does
// not fill an arena block alone (SoleBlockOf), or of a parameter of several models, is copied into
// one. A gradient for which the arena has no room is summed by an all-reduce of its own at the end.
//
// Small gradients. CopyIn() packs them into the rank's block.
//
// A sparse gradient goes through FlatBuckets.
//
// Launch() starts nothing: the reduction goes on from the first CopyIn() on. The first Wait() of a
// pass completes it for all buckets. Every launched bucket of the pass must be launched before.
//
// A comm hook needs a flat tensor: the Reducer makes FlatBuckets when a hook is registered.
// Gradients that are in place are changed by other ranks from CopyIn() on until the end of the
// pass.
//
// The bits are those of FlatBuckets on the same backend.
class InPlaceReduction final : public GradientBuckets {
 public:
  struct Options {
    int64_t arena_bytes = 0;  // the most memory of the arena for this model; 0: twice its gradients
    FlatBuckets::Options flat = {};
  };

  // Returns a factory of these buckets where they are possible on all ranks, else of FlatBuckets.
  // They are possible when the communicator is one of SharedMemoryBackend and all dense parameters
  // are of float or double (also complex) on the CPU without gaps. Then a call of the factory with
  // Setup::collective is a collective: the ranks agree, and the lowest one that cannot says why.
  // The buckets of one factory share the arena's memory for the model's gradients.
  static Factory MakerOf(Options options);

  ~InPlaceReduction() override;

  // Says of the gradients of the last pass how many lay in place, were copied into the arena, or
  // found no room there.
  std::string strategy() const override;
  void OnBackward(bool begins) override;
  void Abandon() override;
  bool lazy() const override { return false; }
  void set_factor(double factor) override;
  void CopyIn(int parameter, const at::Tensor& input) override;
  void FinishCopyIn(int /*bucket*/) override {}
  void Zero(int bucket) override;
  void Launch(int bucket) override;
  void Hold() override;
  void Wait(int bucket) override;
  at::Tensor HookBuffer(int bucket) override;
  int CopyOut(int bucket, const at::Tensor& result, const uint8_t* untouched) override;
  void Discard(int bucket) override;

 private:
  struct Slot {
    bool sparse = false;
    bool is_double = false;
    int large = -1;         // index in the channel; -1: small
    int64_t offset = 0;     // of a small one among those of its type, in real numbers
    int64_t count = 0;      // in real numbers
    bool in_place = false;  // in this pass: `memory` is the gradient itself
    at::Tensor memory;      // large, in this pass: where the sum is; undefined: zeros
    // In this pass, of a gradient in place: where the sum is, even when the program gives the
    // gradient another storage.
    c10::Storage storage;
  };
  struct Counts {
    int in_place = 0;
    int copied = 0;    // into the arena
    int left_out = 0;  // without room in some rank's arena
  };

  // The arena's memory for the gradients of a model, as long as their sizes stay.
  struct Demand {
    std::vector<size_t> bytes;
    std::shared_ptr<ArenaDemand> held;
    std::string told;  // the last refusal of this rank
  };

  InPlaceReduction(Setup setup, Options options, std::shared_ptr<ArenaDemand> demand);

  // Returns null when the layout cannot be reduced in place, or a rank cannot.
  static std::unique_ptr<InPlaceReduction> Make(Setup& setup, const Options& options,
                                                Demand& demand);
  static absl::Status Ensure(Demand& demand, const Setup& setup, const Options& options);
  static bool Fits(const Setup& setup);
  static bool Agree(Communicator& communicator, const absl::StatusOr<int64_t>& mine,
                    std::string& told, std::vector<int64_t>& places);
  absl::StatusOr<int64_t> MakeChannel(std::shared_ptr<HostGroup> group);
  at::Tensor AllocateBlock(int index) const;
  void PublishLarge(int index, const at::Tensor& gradient, const at::Tensor& input);
  void PackSmall(int index, const at::Tensor& gradient);
  void Start();
  void Complete();
  void SumLeftOut();
  void CopyOutLarge(int index);
  void CopyOutSmall(int index);
  at::Tensor SmallView(int index, void* memory) const;

  const Options options_;
  const std::shared_ptr<ArenaDemand> demand_;
  std::unique_ptr<FlatBuckets> sparse_buckets_;  // null: no gradient is sparse
  InPlaceChannel::Layout layout_;
  std::shared_ptr<InPlaceChannel> channel_;  // also of the operation that completes a pass
  int64_t number_ = 0;                       // of this reduction in the group of the host
  std::vector<Slot> slots_;                  // by parameter
  std::vector<int> large_;                   // parameters, by index in the channel
  std::vector<float> floats_;                // the sums of the small ones
  std::vector<double> doubles_;
  std::vector<uint8_t> zeroed_;  // by bucket, from Zero() to Launch()
  double factor_ = 1;
  uint64_t claim_ = 0;                         // of the pass: see Arena::Claim()
  Counts counts_;                              // of the pass
  std::optional<Communicator::Pending> sums_;  // started, and not waited for
  bool armed_ = false;
  bool warned_ = false;
  bool complete_ = true;  // of the pass
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_IN_PLACE_REDUCTION_H_
