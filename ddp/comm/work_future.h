#ifndef DDP_COMM_WORK_FUTURE_H_
#define DDP_COMM_WORK_FUTURE_H_

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Work;
}  // namespace c10d
namespace c10::ivalue {
struct Future;
}  // namespace c10::ivalue

namespace ddp::internal {

using WorkFuture = c10::intrusive_ptr<c10::ivalue::Future>;

// A future with the value `tensors` that is complete already.
WorkFuture CompleteFuture(std::vector<at::Tensor> tensors);

// Blocks until `work` is complete. Throws its error, and CommunicationError for one that was
// aborted.
void WaitForWork(c10d::Work& work);

// Returns the work's own future. A work without one (Gloo's reduce-scatter, some backends of
// programs) gets a thread that waits for it; the value is then `tensors`.
WorkFuture FutureOfWork(const c10::intrusive_ptr<c10d::Work>& work,
                        std::vector<at::Tensor> tensors);

// Completes with the value `tensors`, or with an error, when `wait` returns, or throws, in a thread
// of its own. The thread has the caller's modes (inference, no gradients), and ends with `wait`,
// whatever becomes of the future.
WorkFuture FutureOfThread(std::function<void()> wait, std::vector<at::Tensor> tensors);

// Completes with the value `tensors` when `future` is complete and `finish` has run; `finish` may
// be null. It runs in a thread of the backend, in the caller's modes and without gradients.
WorkFuture Then(const WorkFuture& future, std::function<void()> finish,
                std::vector<at::Tensor> tensors);

}  // namespace ddp::internal

#endif  // DDP_COMM_WORK_FUTURE_H_
