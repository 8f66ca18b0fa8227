#ifndef DDP_PROCESS_GROUP_WORK_STATE_H_
#define DDP_PROCESS_GROUP_WORK_STATE_H_

#include <exception>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm/communicator.h"
#include "ddp/work.h"

namespace ddp {

// One operation, shared by the copies of its Work.
struct Work::State {
  int rank = 0;
  std::weak_ptr<internal::Communicator> communicator;
  internal::Communicator::Pending pending;
  TensorFuture future;              // of the whole operation; null: complete from the start
  std::vector<at::Tensor> tensors;  // the program's tensors that the operation writes
  bool value_is_tensors = false;    // the future's value is a list of `tensors`
  bool waited = false;
  std::exception_ptr error;  // thrown by the first wait()
};

}  // namespace ddp

#endif  // DDP_PROCESS_GROUP_WORK_STATE_H_
