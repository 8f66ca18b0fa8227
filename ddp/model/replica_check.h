#ifndef DDP_MODEL_REPLICA_CHECK_H_
#define DDP_MODEL_REPLICA_CHECK_H_

#include <cstdint>
#include <vector>

#include "ddp/model/model_view.h"

namespace ddp::internal {

class Communicator;

// Compares the parameters of all ranks, bit by bit through their XXH3 hashes, in the first
// synchronized forward and in every `every`-th one after it. See
// DistributedDataParallelOptions::check_parameters_every. Thread-compatible.
class ReplicaCheck {
 public:
  explicit ReplicaCheck(int64_t every) : every_(every) {}  // 0: never

  // Counts a synchronized forward, and returns true when the parameters are due in it. All ranks
  // count the same forwards since the last Restart().
  bool Due() { return every_ > 0 && forwards_++ % every_ == 0; }

  // Makes the next forward the first one again.
  void Restart() { forwards_ = 0; }

  // Compares `parameters`. One all-reduce of 32 bytes; when it finds a difference, an all-gather of
  // one hash for each parameter. Then throws ReductionError on all ranks. `forward` is the number
  // of this rank's forward, for the message. Throws as Communicator::Wait().
  static void Compare(const std::vector<NamedTensor>& parameters, int64_t forward,
                      Communicator& communicator);

 private:
  const int64_t every_;
  int64_t forwards_ = 0;
};

}  // namespace ddp::internal

#endif  // DDP_MODEL_REPLICA_CHECK_H_
