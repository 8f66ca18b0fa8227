#include "ddp/comm/work_future.h"

#include <pthread.h>

#include <exception>
#include <thread>
#include <utility>

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "ddp/common/error.h"
#include "ddp/common/logging.h"

namespace ddp::internal {
namespace {

c10::TypePtr TensorList() { return c10::ListType::create(c10::TensorType::get()); }

}  // namespace

void WaitForWork(c10d::Work& work) {
  if (!work.wait()) throw CommunicationError("the backend has aborted it");
}

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
  return FutureOfThread([work] { WaitForWork(*work); }, std::move(tensors));
}

WorkFuture FutureOfThread(std::function<void()> wait, std::vector<at::Tensor> tensors) {
  auto future = NewFuture();
  std::thread([wait = std::move(wait), tensors = std::move(tensors), future,
               modes = at::ThreadLocalState()]() mutable {
    pthread_setname_np(pthread_self(), "ddp-work");
    const at::ThreadLocalStateGuard guard(modes);
    std::exception_ptr error;
    try {
      wait();
    } catch (...) {
      error = std::current_exception();
    }
    wait = nullptr;  // frees its captures before the future is complete
    EndFuture(*future, error, std::move(tensors));
  }).detach();
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
