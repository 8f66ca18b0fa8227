#ifndef DDP_OPTIM_PEER_MEMORY_H_
#define DDP_OPTIM_PEER_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/time/time.h"
#include "ddp/comm/host_group/host_group.h"

namespace ddp::internal {

// The parameters of all members of a HostGroup, as far as they lie in the members' arenas. A member
// writes the values that it has computed into the parameters of the others. Free of LibTorch.
//
// Construction: every member makes its PeerMemory, then tells the others its places, then calls
// Connect(). From the telling on, a peer may write.
//
// A step:
// - A collective of the caller begins it. Every member then calls Begin().
// - Each member calls Write() with the values that it alone computes.
// - A barrier of the caller ends it. Every member then calls Complete().
// No member reads or writes what others write between Begin() and the barrier.
//
// Mark. Each member has a word in its arena. A peer that writes sets the word to the number of the
// step first. So a member knows whether a step that failed has changed its parameters: written().
//
// Failure. After an error anywhere in a step, a member calls Abandon() before it uses a parameter.
//
// Thread-compatible.
class PeerMemory {
 public:
  // Of a parameter that lies in no arena.
  static constexpr int64_t kElsewhere = -1;

  // The offsets in the arena of one member.
  struct Places {
    int64_t mark = kElsewhere;
    std::vector<int64_t> parameters;
  };

  // `mark`: the place of a word in this member's arena; or kElsewhere. Clears the word.
  PeerMemory(std::shared_ptr<HostGroup> group, int64_t mark);

  // `places`: of each member. `bytes`: of each parameter. When some member has no mark, no
  // parameter is reached.
  void Connect(const std::vector<Places>& places, const std::vector<int64_t>& bytes);

  const std::shared_ptr<HostGroup>& group() const { return group_; }

  // Returns true when the parameter lies in the arenas of all members. The same on all members.
  bool Reaches(int parameter) const {
    return static_cast<size_t>(parameter) < reached_.size() && reached_[parameter];
  }

  void Begin() { ++step_; }

  // Writes `values` into the parameter of every other member, from byte `begin` on. Requires
  // Reaches(). Returns false when the group has ended: some values may be missing then, and the
  // caller must not take part in the barrier.
  bool Write(int parameter, int64_t begin, std::span<const std::byte> values);

  void Complete() { complete_ = step_; }

  // Returns true when a peer may have written values of a step that is not complete.
  bool written() const;

  // Ends the group, and waits until no peer writes into this member's memory. Returns false when
  // one still might after `timeout`: the memory must not be used again.
  bool Abandon(absl::Duration timeout);

 private:
  std::byte* At(int member, int parameter) const {
    return memory_[static_cast<size_t>(member) * reached_.size() + parameter];
  }
  std::atomic<uint64_t>* FindMark(int member, int64_t place) const;
  void Mark();

  const std::shared_ptr<HostGroup> group_;
  std::atomic<uint64_t>* const own_mark_;      // null: none
  std::vector<std::atomic<uint64_t>*> marks_;  // by member
  std::vector<std::byte*> memory_;             // by member and parameter
  std::vector<bool> reached_;                  // by parameter
  uint64_t step_ = 0;
  uint64_t marked_ = 0;    // the last step in which this member has written
  uint64_t complete_ = 0;  // the last complete step
};

}  // namespace ddp::internal

#endif  // DDP_OPTIM_PEER_MEMORY_H_
