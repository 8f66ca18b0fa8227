// Free of LibTorch.
#ifndef DDP_COMMON_MEMBERSHIP_H_
#define DDP_COMMON_MEMBERSHIP_H_

#include <cstdint>

namespace ddp::internal {

// The place of this rank in one incarnation of a group. A group replaces the value when it begins
// another incarnation. ProcessGroup::renew() keeps rank and size; the classes of ddp/comm/reports
// also accept others. A value; 0 <= rank < size holds.
struct Membership {
  int rank = 0;
  int size = 1;
  int64_t incarnation = 0;
  int local_rank = 0;  // index of this rank on its host, and of its GPU
  // The ranks whose processes run on this host: [local_begin, local_end). Empty when unknown.
  int local_begin = 0;
  int local_end = 0;
  // True when the process of rank 0 serves the store. A lost store then means that rank 0 is gone.
  bool store_is_rank_0 = false;

  bool IsOnThisHost(int other) const { return other >= local_begin && other < local_end; }
  bool IsOneHost() const { return local_end - local_begin == size; }

  // Sets local_begin and local_end for a host with `local_size` ranks; 0 means unknown. Reads rank,
  // size and local_rank. Assumes that the launcher numbers the ranks of one host consecutively.
  // Leaves the range empty when it would not lie within [0, size).
  void SetLocalRanks(int local_size) {
    const int begin = local_size == size ? 0 : rank - local_rank;
    const bool known = local_size > 0 && begin >= 0 && begin + local_size <= size;
    local_begin = known ? begin : 0;
    local_end = known ? begin + local_size : 0;
  }

  // Returns the membership of the same ranks in the next incarnation.
  Membership Next() const {
    Membership next = *this;
    ++next.incarnation;
    return next;
  }

  friend bool operator==(const Membership&, const Membership&) = default;
};

}  // namespace ddp::internal

#endif  // DDP_COMMON_MEMBERSHIP_H_
