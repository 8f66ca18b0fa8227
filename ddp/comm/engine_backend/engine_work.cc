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

EngineWork::EngineWork(int rank, Operation operation, std::weak_ptr<RankEngine> engine)
    : Work(rank, operation.type),
      engine_(std::move(engine)),
      results_(std::move(operation.results)),
      future_(
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))),
      inputs_(std::move(operation.inputs)),
      finish_(std::move(operation.finish)) {}

bool EngineWork::isCompleted() {
  if (done()) return true;
  if (const auto engine = engine_.lock()) engine->Poll();
  return done();
}

bool EngineWork::isSuccess() const { return done() && !future_->hasError(); }

std::exception_ptr EngineWork::exception() const {
  return done() && future_->hasError() ? future_->exception_ptr() : nullptr;
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
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  return true;
}

void EngineWork::abort() {
  if (const auto engine = engine_.lock()) engine->Abort();
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
  if (status.ok()) {
    future_->markCompleted(results_);
  } else {
    future_->setError(ErrorOf(status));
  }
}

}  // namespace ddp::internal
