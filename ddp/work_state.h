#ifndef DDP_WORK_STATE_H_
#define DDP_WORK_STATE_H_

#include <exception>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm/communicator.h"
#include "ddp/work.h"

namespace ddp {

// What a Work refers to, and how it stands.
struct Work::State {
  int rank = 0;
  std::weak_ptr<internal::Communicator> communicator;
  internal::Communicator::Pending pending;
  TensorFuture started;             // the backend's; null: complete from the start
  TensorFuture finished;            // with what the library does after it; null: it does nothing
  std::vector<at::Tensor> tensors;  // that it writes
  bool waited = false;
  std::exception_ptr error;  // of the first wait()
};

}  // namespace ddp

#endif  // DDP_WORK_STATE_H_
