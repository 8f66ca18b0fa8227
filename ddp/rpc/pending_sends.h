#ifndef DDP_RPC_PENDING_SENDS_H_
#define DDP_RPC_PENDING_SENDS_H_

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/ivalue.h>

#include "base/mutex.h"

namespace ddp::rpc::internal {

// The messages that this worker has sent and that have no answer yet, so that a failure of a worker
// can end them all: those of the program's calls, and those of LibTorch's backward engine. LibTorch
// itself waits for a connection's end or for the timeout of the message.
//
// Thread-safe. Owned by shared_ptr, because callbacks of LibTorch outlive the agent.
class PendingSends : public std::enable_shared_from_this<PendingSends> {
 public:
  using Future = c10::ivalue::Future;
  using FuturePtr = c10::intrusive_ptr<Future>;
  // A worker whose connection has broken, and how.
  struct Lost {
    int worker = -1;
    std::string text;
  };
  // The worker to which a message goes.
  struct Receiver {
    int worker = -1;
    std::string name;
  };
  // Returns the error that takes the place of `failed`'s error, of a message to `receiver`. Sets
  // `lost` when the connection is gone.
  using Translate = std::function<std::exception_ptr(const Receiver& receiver, Future& failed,
                                                     std::optional<Lost>* lost)>;

  explicit PendingSends(Translate translate) : translate_(std::move(translate)) {}

  // Sets the function that gets the first lost worker; empty: none. Thread: any, without a lock,
  // after the message's own future has the error.
  void OnLost(std::function<void(const Lost&)> on_lost) {
    MutexLock lock(mutex_);
    on_lost_ = std::move(on_lost);
  }

  // Returns the first worker that was found lost. LibTorch's engine tells of it as a text only.
  std::optional<Lost> lost() const {
    MutexLock lock(mutex_);
    return lost_;
  }

  // Calls `send`, and returns a future that ends with its future or with End(). `keep` lives until
  // all callbacks of the returned future have run.
  template <typename Send>
  FuturePtr Track(Receiver receiver, const Send& send, std::shared_ptr<void> keep = nullptr) {
    auto result = c10::make_intrusive<Future>(c10::AnyClassType::get());
    int64_t number = 0;
    std::exception_ptr error;
    {
      MutexLock lock(mutex_);
      error = error_;
      number = next_++;
      if (error == nullptr) pending_[number] = {.future = result, .keep = std::move(keep)};
    }
    if (error != nullptr) {
      result->setError(error);
      return result;
    }
    auto finish = [self = shared_from_this(), receiver = std::move(receiver),
                   number](Future& sent) {
      const Pending waiting = self->Take(number);
      if (waiting.future == nullptr) return;  // End() was first
      if (sent.hasError()) {
        std::optional<Lost> lost;
        const std::exception_ptr error = self->translate_(receiver, sent, &lost);
        const auto tell = lost.has_value() ? self->SetLost(*lost) : nullptr;
        waiting.future->setError(error);
        if (tell != nullptr) tell(*lost);
      } else {
        waiting.future->markCompleted(sent.constValue(), sent.storages());
      }
    };
    try {
      send()->addCallback(std::move(finish));
    } catch (...) {
      Take(number);
      throw;
    }
    return result;
  }

  // Gives `error` to all pending and all later messages.
  void End(std::exception_ptr error) {
    std::map<int64_t, Pending> ended;
    {
      MutexLock lock(mutex_);
      if (error_ == nullptr) error_ = error;
      ended.swap(pending_);
    }
    for (const auto& [number, pending] : ended) pending.future->setError(error);
  }

 private:
  struct Pending {
    FuturePtr future;
    std::shared_ptr<void> keep;
  };

  // Returns the function to call.
  std::function<void(const Lost&)> SetLost(const Lost& lost) {
    MutexLock lock(mutex_);
    if (lost_.has_value()) return nullptr;
    lost_ = lost;
    return on_lost_;
  }

  Pending Take(int64_t number) {
    MutexLock lock(mutex_);
    const auto found = pending_.find(number);
    if (found == pending_.end()) return {};
    Pending pending = std::move(found->second);
    pending_.erase(found);
    return pending;
  }

  const Translate translate_;
  mutable Mutex mutex_;
  std::function<void(const Lost&)> on_lost_ ABSL_GUARDED_BY(mutex_);
  std::optional<Lost> lost_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, Pending> pending_ ABSL_GUARDED_BY(mutex_);
  int64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::exception_ptr error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_PENDING_SENDS_H_
