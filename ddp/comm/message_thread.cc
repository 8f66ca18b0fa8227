#include "ddp/comm/message_thread.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <string>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/detached_thread.h"
#include "ddp/common/error.h"

namespace ddp::internal {
namespace {

// A wait needs some time to find that its message has arrived.
constexpr absl::Duration kShortestTurn = absl::Milliseconds(1);

}  // namespace

WorkFuture MessageThread::Add(std::list<Part> parts, const at::Tensor& tensor) {
  const auto message = std::make_shared<Message>(
      Message{.parts = std::move(parts), .tensor = tensor, .future = NewFuture()});
  MutexLock lock(mutex_);
  messages_.push_back(message);
  if (running_) return message->future;
  const absl::Status started =
      StartDetachedThread("ddp-messages", [self = shared_from_this()] { self->Run(); });
  if (!started.ok()) {
    messages_.pop_back();
    throw CommunicationError(std::string(started.message()));
  }
  running_ = true;
  return message->future;
}

bool MessageThread::Hurry(const WorkFuture& future) {
  MutexLock lock(mutex_);
  if (messages_.size() < 2) return false;
  const auto wanted = std::find_if(
      messages_.begin(), messages_.end(),
      [&](const std::shared_ptr<Message>& message) { return message->future == future; });
  const bool found = wanted != messages_.end();
  if (wanted == messages_.begin()) return false;
  if (MonotonicNanoseconds() - turn_ns_ < absl::ToInt64Nanoseconds(kShortestTurn)) return true;
  // The last one comes first: so each gets its turn.
  messages_.splice(messages_.begin(), messages_, found ? wanted : std::prev(messages_.end()));
  turned_ = true;
  if (const auto work = std::exchange(awaited_, nullptr)) work->abort();
  return !found;
}

void MessageThread::Run() {
  while (true) {
    std::shared_ptr<Message> message;
    {
      MutexLock lock(mutex_);
      running_ = !messages_.empty();
      if (!running_) return;
      message = messages_.front();
    }
    std::exception_ptr error;
    try {
      if (!Await(*message)) continue;
    } catch (...) {
      error = std::current_exception();
    }
    {
      MutexLock lock(mutex_);
      std::erase(messages_, message);
    }
    message->parts.clear();  // frees its captures before the future is complete
    EndFuture(*message->future, error, {message->tensor});
  }
}

// Waits for the parts of a message. Returns false when it is another message's turn.
bool MessageThread::Await(Message& message) {
  for (; !message.parts.empty(); message.parts.pop_front()) {
    const Part& part = message.parts.front();
    {
      MutexLock lock(mutex_);
      if (messages_.front().get() != &message) return false;
      turned_ = false;
      awaited_ = part.work;
      turn_ns_ = MonotonicNanoseconds();
    }
    const bool arrived = part.work->wait();
    {
      MutexLock lock(mutex_);
      awaited_ = nullptr;
      if (!arrived && turned_) return false;
    }
    if (!arrived) throw CommunicationError("the backend has aborted it");
    if (part.check) part.check();
  }
  return true;
}

}  // namespace ddp::internal
