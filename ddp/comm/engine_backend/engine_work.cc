#include "ddp/comm/engine_backend/engine_work.h"

#include <exception>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include "base/clock.h"
#include "ddp/comm/backend/operation_fault.h"

namespace ddp::internal {
namespace {

std::exception_ptr ErrorOf(const absl::Status& status) {
  const c10::SourceLocation here = {__func__, __FILE__, __LINE__};
  const std::string text(status.message());
  if (absl::IsAborted(status)) return std::make_exception_ptr(PeerAbortedError(here, text));
  if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) {
    return std::make_exception_ptr(c10::DistNetworkError(here, text));
  }
  return std::make_exception_ptr(c10::DistBackendError(here, text));
}

}  // namespace

EngineWork::EngineWork(int rank, Operation operation, std::weak_ptr<RankEngine> engine,
                       bool hurries)
    : Work(rank, operation.type),
      engine_(std::move(engine)),
      results_(std::move(operation.results)),
      hurries_(hurries),
      inputs_(std::move(operation.inputs)),
      finish_(std::move(operation.finish)) {}

bool EngineWork::isCompleted() {
  if (done()) return true;
  if (const auto engine = engine_.lock()) engine->Poll();
  return done();
}

bool EngineWork::isSuccess() const { return done() && !failed_.load(std::memory_order_acquire); }

std::exception_ptr EngineWork::exception() const {
  MutexLock lock(mutex_);
  return error_;
}

bool EngineWork::wait(std::chrono::milliseconds timeout) {
  if (const auto engine = engine_.lock(); engine && !done()) {
    engine->Drive([this] { return done(); },
                  timeout == kNoTimeout ? absl::InfiniteFuture()
                                        : MonotonicClock().Now() + absl::FromChrono(timeout));
  }
  if (!done()) {
    std::rethrow_exception(
        ErrorOf(absl::DeadlineExceededError("Timed out: the wait for an operation")));
  }
  if (failed_.load(std::memory_order_acquire)) std::rethrow_exception(exception());
  return true;
}

void EngineWork::abort() {
  if (const auto engine = engine_.lock()) engine->Abort();
}

c10::intrusive_ptr<c10::ivalue::Future> EngineWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::exception_ptr error;
  {
    MutexLock lock(mutex_);
    if (future_) return future_;
    future = future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    error = error_;
    // End() completes the future when it comes after this.
    if (!done()) {
      if (const auto engine = engine_.lock(); engine && hurries_) engine->Hurry();
      return future;
    }
  }
  Complete(*future, error);
  return future;
}

void EngineWork::End(absl::Status status) {
  if (status.ok() && finish_) {
    const at::NoGradGuard no_grad;
    try {
      finish_();
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    }
  }
  finish_ = nullptr;
  inputs_.clear();
  const std::exception_ptr error = status.ok() ? nullptr : ErrorOf(status);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    MutexLock lock(mutex_);
    error_ = error;
    failed_.store(error != nullptr, std::memory_order_release);
    future = future_;
    done_.store(true, std::memory_order_release);
  }
  if (future) Complete(*future, error);
}

void EngineWork::Complete(c10::ivalue::Future& future, const std::exception_ptr& error) const {
  if (error) {
    future.setErrorIfNeeded(error);
  } else {
    future.markCompleted(c10::IValue(results_));
  }
}

}  // namespace ddp::internal
