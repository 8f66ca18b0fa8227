#ifndef DDP_REDUCER_PASS_PASS_PARTS_H_
#define DDP_REDUCER_PASS_PASS_PARTS_H_

namespace ddp::internal {

// The parts of a pass besides its buckets. A rank that has joined learns them from the other ranks
// only.
struct PassParts {
  bool rebuild_after = false;    // new buckets at the end
  bool used_map_after = false;   // the used parameters, after the buckets
  bool used_map_before = false;  // the same, before the buckets

  friend bool operator==(const PassParts&, const PassParts&) = default;
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_PASS_PASS_PARTS_H_
