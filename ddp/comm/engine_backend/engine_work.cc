#include "ddp/comm/engine_backend/engine_work.h"

#include <exception>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "base/clock.h"
#include "ddp/comm/shared_memory/tensor_reduction.h"

namespace ddp::internal {
namespace {

std::exception_ptr ErrorOf(const std::string& text) {
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, text));
}

}  // namespace

std::span<const std::byte> Batch::In(const at::Tensor& tensor) {
  kept.push_back(tensor.contiguous());
  return BytesOf(kept.back());
}

std::span<std::byte> Batch::Out(const at::Tensor& tensor, bool with_contents) {
  kept.push_back(DenseOut(tensor, with_contents));
  return BytesOf(kept.back());
}

at::Tensor Batch::DenseOut(const at::Tensor& tensor, bool with_contents) {
  if (tensor.is_contiguous()) return tensor;
  at::Tensor dense =
      with_contents ? tensor.contiguous() : at::empty(tensor.sizes(), tensor.options());
  after.emplace_back([tensor, dense] { tensor.copy_(dense); });
  return dense;
}

EngineWork::EngineWork(int rank, Batch batch, size_t operations, std::weak_ptr<RankEngine> engine,
                       bool hurries)
    : Work(rank, batch.type),
      engine_(std::move(engine)),
      results_(std::move(batch.results)),
      hurries_(hurries),
      after_(std::move(batch.after)),
      kept_(std::move(batch.kept)),
      missing_(operations) {
  if (operations == 0) EndAll();
}

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
  if (!done()) std::rethrow_exception(ErrorOf("Timed out: the wait for an operation"));
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
    // EndAll() completes the future when it comes after this.
    if (!done()) {
      if (const auto engine = engine_.lock(); engine && hurries_) engine->Hurry();
      return future;
    }
  }
  Complete(*future, error);
  return future;
}

void EngineWork::EndOne(const absl::Status& status) {
  if (!status.ok()) {
    MutexLock lock(mutex_);
    status_.Update(status);
  }
  if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) EndAll();
}

void EngineWork::EndAll() {
  absl::Status status;
  {
    MutexLock lock(mutex_);
    status = status_;
  }
  if (status.ok() && !after_.empty()) {
    const at::NoGradGuard no_grad;
    try {
      for (const auto& after : after_) after();
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    }
  }
  after_.clear();
  kept_.clear();
  const std::exception_ptr error = status.ok() ? nullptr : ErrorOf(std::string(status.message()));
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
