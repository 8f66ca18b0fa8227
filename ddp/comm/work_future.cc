#include "ddp/comm/work_future.h"

#include <exception>
#include <string>
#include <utility>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/detached_thread.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"

namespace ddp::internal {
namespace {

c10::TypePtr TensorList() { return c10::ListType::create(c10::TensorType::get()); }

}  // namespace

WorkFuture NewFuture() { return c10::make_intrusive<c10::ivalue::Future>(TensorList()); }

void EndFuture(c10::ivalue::Future& future, const std::exception_ptr& error,
               std::vector<at::Tensor> tensors) {
  try {
    if (error) {
      future.setErrorIfNeeded(error);
    } else {
      future.markCompleted(c10::IValue(std::move(tensors)));
    }
  } catch (const std::exception& thrown) {  // of a callback that the program has added
    LOG(ERROR) << "a callback of a collective's future has thrown: " << thrown.what();
  }
}

WorkFuture CompleteFuture(std::vector<at::Tensor> tensors) {
  auto future = NewFuture();
  future->markCompleted(c10::IValue(std::move(tensors)));
  return future;
}

WorkFuture OwnFutureOf(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const std::exception&) {
    // LibTorch reports only by an exception that a work has no future.
    return nullptr;
  }
}

WorkFuture FutureOfWork(const c10::intrusive_ptr<c10d::Work>& work,
                        std::vector<at::Tensor> tensors) {
  if (WorkFuture future = OwnFutureOf(*work)) return future;
  auto future = NewFuture();
  const absl::Status started = StartDetachedThread(
      "ddp-work", [work = c10::intrusive_ptr<c10d::Work>(work), tensors = std::move(tensors),
                   future, modes = at::ThreadLocalState()]() mutable {
        const at::ThreadLocalStateGuard guard(modes);
        std::exception_ptr error;
        try {
          if (!work->wait()) throw CommunicationError("the backend has aborted it");
        } catch (...) {
          error = std::current_exception();
        }
        work.reset();  // before the future is complete
        EndFuture(*future, error, std::move(tensors));
      });
  if (!started.ok()) throw CommunicationError(std::string(started.message()));
  return future;
}

WorkFuture Then(const WorkFuture& future, std::function<void()> finish,
                std::vector<at::Tensor> tensors) {
  return future->then(
      [finish = std::move(finish), tensors = std::move(tensors),
       modes = at::ThreadLocalState()](c10::ivalue::Future& done) {
        (void)done.value();  // throws its error
        const at::ThreadLocalStateGuard guard(modes);
        const at::NoGradGuard no_grad;
        if (finish) finish();
        return c10::IValue(tensors);
      },
      TensorList());
}

}  // namespace ddp::internal
