#ifndef DDP_COMM_SHARED_MEMORY_IN_PLACE_CHANNEL_H_
#define DDP_COMM_SHARED_MEMORY_IN_PLACE_CHANNEL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/kernels/reduce.h"
#include "ddp/comm/shared_memory/reduction_steps.h"

namespace ddp::internal {

// Sums arrays that lie in the arenas of the members of a HostGroup, where they lie, pass by pass.
// Made for gradients: arrays become ready one by one, in another order on each member, and nobody
// waits before the end of the pass. Free of LibTorch.
//
// Large arrays. A member publishes the place of each array as soon as the array is ready. A member
// that finds an array published by all members takes pieces of it, until other members have taken
// the rest, and sums them in the memory of all members. It looks for such arrays whenever it
// publishes another one, and at the end. So the member that publishes an array last, which is
// behind, leaves it to those that are ahead: the sums slow down the fast members and not the slow
// ones, which all wait for.
//
// Small arrays. A member packs them into its block, and sums the blocks of all members at the end.
//
// End. A member arrives when it has published and packed everything, all pieces of all large arrays
// are taken, and those that it has taken are summed. The pass is complete when all have arrived.
// One wait, no matter how many arrays.
//
// Order of addition, bits: as CollectiveEngine. Each element is multiplied by the factor first.
//
// Blocks. The block of a member lies in its arena. It holds the member's words and its packed
// arrays. All members make their channels, tell each other the places of the blocks, and connect.
//
// Thread-compatible. Between Finish() and the end of the pass, Advance(), MayAdvance() and
// Abandon() may be called on any thread, and nothing else. MayAdvance() may be called later too.
class InPlaceChannel {
 public:
  struct Layout {
    struct Large {
      ElementType type = ElementType::kFloat;
      size_t count = 0;
    };
    std::vector<Large> large;
    // The elements of all small arrays of each type, one after the other: the packed arrays.
    size_t small_floats = 0;
    size_t small_doubles = 0;
  };

  // Makes this member's block. Errors: kResourceExhausted or others when the arena has no room.
  static absl::StatusOr<std::unique_ptr<InPlaceChannel>> Make(std::shared_ptr<HostGroup> group,
                                                              Layout layout);
  // The place of this member's block.
  int64_t place() const;
  // Gets the places of all members. Comes before the first pass. An error when a place is
  // impossible, or the members have different layouts.
  absl::Status Connect(std::span<const int64_t> places);
  // As Abandon().
  ~InPlaceChannel();
  InPlaceChannel(const InPlaceChannel&) = delete;
  InPlaceChannel& operator=(const InPlaceChannel&) = delete;

  // Begins a pass, after the last one is complete. A member multiplies the inputs of all members by
  // its own factor, in the pieces that it sums: `factor` is the same on all members.
  void Begin(double factor);

  // The member's array is ready at this place of its arena, and stays there until the pass is
  // complete. Sums other arrays, those that all members have published.
  void Publish(int array, uint64_t offset);
  // The member's array counts as zeros, and gets no result.
  void PublishZeros(int array);
  // The member's array is in no arena: it is left out on all members. See left_out().
  void PublishElsewhere(int array);

  // The member's packed arrays of this pass: floats, or doubles.
  float* small_floats() { return reinterpret_cast<float*>(OwnSmall()); }
  double* small_doubles() { return reinterpret_cast<double*>(OwnSmall() + doubles_at_); }

  // Everything is published and packed. From now on Advance() completes the pass.
  void Finish();
  // Sums what can be summed without a wait. Returns true when the pass is complete.
  bool Advance();
  // Returns true when Advance() has something to do. Takes no lock.
  bool MayAdvance() const;

  // ---- When the pass is complete.

  // Puts the sums of the packed arrays there, in the layout of small_floats(), small_doubles().
  void SumSmall(float* floats, double* doubles);
  // The large arrays that some member published elsewhere, in rising order: the same on all
  // members.
  const std::vector<int>& left_out() const { return left_out_; }

  // Gives up the pass, if there is one: ends the group, and waits until no other member writes into
  // the arrays of this one. Returns false when one still might after a second: the arrays' memory
  // must not be used again.
  bool Abandon();

 private:
  struct Block;
  using Memory = absl::InlinedVector<std::byte*, 16>;  // an array, by member; null: zeros
  InPlaceChannel(std::shared_ptr<HostGroup> group, Layout layout, std::shared_ptr<std::byte> block);

  void PublishWord(int array, uint64_t word);
  std::byte* OwnSmall() {
    in_pass_ = true;
    return SmallOf(member_);
  }
  std::atomic<uint64_t>& WordOf(int member, int array) const;
  std::atomic<uint64_t>& TakenOf(int array) const;
  std::byte* SmallOf(int member) const;
  bool AllPublished(int array) const;
  bool AllArrived() const;
  void Help(size_t look_ahead);
  void Sum(int array);
  int Take(std::atomic<uint64_t>& taken, int pieces) const;
  void SumPiece(const Memory& memory, ElementType type, const Slice& piece) const;

  const std::shared_ptr<HostGroup> group_;
  const int member_;
  const int size_;
  const Layout layout_;
  const std::shared_ptr<std::byte> block_;  // of this member
  const size_t words_at_;                   // in a block
  const size_t small_at_;                   // of the packed arrays in a block
  const size_t doubles_at_;                 // behind the floats
  const size_t small_bytes_;
  std::vector<Block*> blocks_;  // by member; null: not connected

  // Held in Advance() and Abandon(), which two threads may call at once. All other functions but
  // MayAdvance(), which reads atomics, are called before or after these in a pass.
  Mutex mutex_;

  std::atomic<uint64_t> pass_ = 0;
  double factor_ = 1;
  bool in_pass_ = false;  // this member has contributed something
  std::atomic<bool> arrived_ = false;
  std::atomic<int> awaited_ = -1;  // the first of waiting_; -1: none
  std::vector<int> waiting_;       // published by this member, not by all
  std::vector<int> left_out_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_SHARED_MEMORY_IN_PLACE_CHANNEL_H_
