#ifndef DDP_REDUCER_REDUCER_GROUP_H_
#define DDP_REDUCER_REDUCER_GROUP_H_

#include <string>

#include <ATen/core/Tensor.h>

namespace ddp::internal {

class Communicator;

// The ranks over which a Reducer averages: the part of a process group that the Reducer needs.
// ProcessReducerGroup (ddp/process_group/process_reducer_group.h) implements it with a
// ProcessGroup. Thread-compatible.
class ReducerGroup {
 public:
  virtual ~ReducerGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Returns the device of the collectives' tensors.
  virtual at::Device device() const = 0;

  // Returns the current communicator. The group replaces it after a failure, between two passes.
  virtual Communicator& communicator() = 0;

  // Reports to all ranks that this rank cannot continue. Never throws.
  virtual void report_failure(const std::string& reason) = 0;
  // Returns true when some rank has failed since the communicator was made.
  virtual bool failed() const = 0;
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_REDUCER_GROUP_H_
