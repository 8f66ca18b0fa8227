#ifndef DDP_COMM_REPORTS_POSITION_SOURCE_H_
#define DDP_COMM_REPORTS_POSITION_SOURCE_H_

#include <cstdint>

#include "ddp/comm/reports/rank_position.h"

namespace ddp::internal {

// The interface to the object that knows this rank's position: a CollectiveLog. The thread
// "ddp-failure" calls Position() to answer a peer. Thread-safe.
class PositionSource {
 public:
  virtual ~PositionSource() = default;

  // Returns the number of collectives that this rank has launched so far in this incarnation.
  virtual int64_t launched() const = 0;
  virtual RankPosition Position() const = 0;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_REPORTS_POSITION_SOURCE_H_
