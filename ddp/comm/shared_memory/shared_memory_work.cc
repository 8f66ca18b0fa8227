#include "ddp/comm/shared_memory/shared_memory_work.h"

#include <exception>
#include <string>
#include <utility>

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include "base/clock.h"

namespace ddp::internal {
namespace {

std::exception_ptr ErrorOf(const std::string& text) {
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, text));
}

}  // namespace

SharedMemoryWork::SharedMemoryWork(int rank, c10d::OpType type,
                                   std::weak_ptr<CollectiveEngine> engine,
                                   std::vector<at::Tensor> results, bool hurries)
    : Work(rank, type),
      engine_(std::move(engine)),
      results_(std::move(results)),
      hurries_(hurries) {}

bool SharedMemoryWork::isCompleted() {
  if (done_.load(std::memory_order_acquire)) return true;
  if (const auto engine = engine_.lock()) engine->Poll();
  return done_.load(std::memory_order_acquire);
}

bool SharedMemoryWork::isSuccess() const {
  return done_.load(std::memory_order_acquire) && !failed_.load(std::memory_order_acquire);
}

std::exception_ptr SharedMemoryWork::exception() const {
  MutexLock lock(mutex_);
  return error_;
}

bool SharedMemoryWork::wait(std::chrono::milliseconds timeout) {
  const auto done = [this] { return done_.load(std::memory_order_acquire); };
  if (const auto engine = engine_.lock(); engine && !done()) {
    engine->Drive(done, timeout == kNoTimeout ? absl::InfiniteFuture()
                                              : MonotonicClock().Now() + absl::FromChrono(timeout));
  }
  if (!done()) {
    std::rethrow_exception(ErrorOf("Timed out: the wait for an operation in shared memory"));
  }
  if (failed_.load(std::memory_order_acquire)) std::rethrow_exception(exception());
  return true;
}

void SharedMemoryWork::abort() {
  if (const auto engine = engine_.lock()) engine->Abort();
}

c10::intrusive_ptr<c10::ivalue::Future> SharedMemoryWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::exception_ptr error;
  {
    MutexLock lock(mutex_);
    if (future_) return future_;
    future = future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    error = error_;
    // Complete() completes the future when it comes after this.
    if (!done_.load(std::memory_order_acquire)) {
      if (const auto engine = engine_.lock(); engine && hurries_) engine->Hurry();
      return future;
    }
  }
  if (error) {
    future->setErrorIfNeeded(error);
  } else {
    future->markCompleted(c10::IValue(results_));
  }
  return future;
}

void SharedMemoryWork::Complete(const absl::Status& status) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::exception_ptr error;
  if (!status.ok()) error = ErrorOf(std::string(status.message()));
  {
    MutexLock lock(mutex_);
    error_ = error;
    failed_.store(error != nullptr, std::memory_order_release);
    future = future_;
    done_.store(true, std::memory_order_release);
  }
  if (!future) return;
  if (error) {
    future->setErrorIfNeeded(error);
  } else {
    future->markCompleted(c10::IValue(results_));
  }
}

}  // namespace ddp::internal
