#ifndef DDP_COMM_WORK_FUTURE_H_
#define DDP_COMM_WORK_FUTURE_H_

#include <exception>
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

// Returns a future that is complete, with the value `tensors`.
WorkFuture CompleteFuture(std::vector<at::Tensor> tensors);

// Returns a future of a list of tensors that is not complete. EndFuture() completes it: with
// `error`, or with `tensors` when that is null. It logs an exception of a callback.
WorkFuture NewFuture();
void EndFuture(c10::ivalue::Future& future, const std::exception_ptr& error,
               std::vector<at::Tensor> tensors);

// Returns the work's own future; null when it has none.
WorkFuture OwnFutureOf(c10d::Work& work);

// Returns the work's own future, with the backend's value. A work without a future (Gloo's
// reduce-scatter, some backends of programs) gets one, with the value `tensors`, and a thread that
// waits for it. The thread has the caller's modes (inference, no gradients). It is detached and
// ends with the work, even when no owner of the future is left.
WorkFuture FutureOfWork(const c10::intrusive_ptr<c10d::Work>& work,
                        std::vector<at::Tensor> tensors);

// Returns a future that gets the value `tensors` after `future` is complete and `finish` has run.
// `finish` may be null. An error of `future` or of `finish` becomes the result's error.
// `finish` runs in the caller's modes and without gradients, on the thread that completes `future`;
// when `future` is complete already, on the calling thread.
WorkFuture Then(const WorkFuture& future, std::function<void()> finish,
                std::vector<at::Tensor> tensors);

}  // namespace ddp::internal

#endif  // DDP_COMM_WORK_FUTURE_H_
