#include "ddp/work.h"

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/work_future.h"
#include "ddp/common/error.h"
#include "ddp/process_group/work_state.h"

namespace ddp {
namespace {

using internal::Communicator;
using internal::CompleteFuture;
using internal::Then;

void WaitFor(Work::State& state) {
  if (!state.future) return;
  // On a stream the future may be complete while the current stream has not waited yet.
  if (!state.pending.on_stream && state.future->completed() && !state.future->hasError()) return;
  const std::shared_ptr<Communicator> communicator = state.communicator.lock();
  if (!communicator) {
    throw CommunicationError(absl::StrCat("rank ", state.rank, ": ", state.pending.what.ToString(),
                                          " was started before the process group was renewed, or ",
                                          "destroyed"));
  }
  communicator->Wait(state.pending);
}

}  // namespace

Work::Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

void Work::wait() {
  if (!state_) return;
  // On a stream each call counts: the current stream may be another one.
  if (!std::exchange(state_->waited, true) || (state_->pending.on_stream && !state_->error)) {
    try {
      WaitFor(*state_);
    } catch (const std::exception&) {
      state_->error = std::current_exception();
    }
    if (!state_->pending.on_stream || state_->error) {
      state_->pending.operation.reset();
      state_->communicator.reset();
    }
  }
  if (state_->error) std::rethrow_exception(state_->error);
}

bool Work::completed() const {
  if (!state_ || !state_->future) return true;
  const bool complete = Communicator::IsComplete(state_->pending);  // hurries a message
  if (state_->pending.on_stream) return complete;
  return state_->waited || state_->future->completed();
}

TensorFuture Work::future() const {
  if (!state_) return CompleteFuture({});
  if (!state_->future) return CompleteFuture(state_->tensors);
  if (state_->value_is_tensors) return state_->future;
  return Then(state_->future, nullptr, state_->tensors);
}

TensorFuture Work::then(std::function<c10::IValue(c10::ivalue::Future&)> callback,
                        c10::TypePtr type) const {
  return future()->then(std::move(callback), std::move(type));
}

}  // namespace ddp
