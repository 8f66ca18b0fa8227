#include "ddp/work.h"

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/work_future.h"
#include "ddp/error.h"
#include "ddp/work_state.h"

namespace ddp {
namespace {

using internal::Communicator;
using internal::CompleteFuture;
using internal::Then;

// The future that is complete when the tensors hold the result; null: they do.
const TensorFuture& LastFuture(const Work::State& state) {
  return state.finished ? state.finished : state.started;
}

void WaitFor(Work::State& state) {
  const TensorFuture& last = LastFuture(state);
  if (!last) return;
  const bool on_gpu = state.pending.tensor.is_cuda();
  if (!on_gpu && last->completed() && !last->hasError()) return;
  const std::shared_ptr<Communicator> communicator = state.communicator.lock();
  if (!communicator) {
    throw CommunicationError(absl::StrCat("rank ", state.rank, ": ", state.pending.what.ToString(),
                                          " was started before the process group was renewed, or ",
                                          "destroyed"));
  }
  if (!state.finished) return communicator->Wait(state.pending);
  communicator->WaitFuture(state.finished, state.tensors, state.pending.what);
}

}  // namespace

Work::Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

void Work::wait() {
  if (!state_) return;
  if (!std::exchange(state_->waited, true)) {
    try {
      WaitFor(*state_);
    } catch (const std::exception&) {
      state_->error = std::current_exception();
    }
    state_->pending.operation.reset();
    state_->communicator.reset();
  }
  if (state_->error) std::rethrow_exception(state_->error);
}

bool Work::completed() const {
  if (!state_ || state_->waited) return true;
  const TensorFuture& last = LastFuture(*state_);
  return !last || last->completed();
}

TensorFuture Work::future() const {
  if (!state_) return CompleteFuture({});
  if (state_->finished) return state_->finished;
  if (!state_->started) return CompleteFuture(state_->tensors);
  return Then(state_->started, nullptr, state_->tensors);
}

TensorFuture Work::then(std::function<c10::IValue(c10::ivalue::Future&)> callback,
                        c10::TypePtr type) const {
  return future()->then(std::move(callback), std::move(type));
}

}  // namespace ddp
