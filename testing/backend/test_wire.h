// A HostLink for tests, whose ranks are threads.
#ifndef DDP_TESTING_BACKEND_TEST_WIRE_H_
#define DDP_TESTING_BACKEND_TEST_WIRE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "ddp/comm/hierarchical/host_link.h"
#include "ddp/comm/hierarchical/tree_partials.h"
#include "gtest/gtest.h"

namespace ddp::testing {

using ::ddp::internal::HostLink;
using ::ddp::internal::RankRange;

// The network between the ranks. Thread-safe.
class Wire {
 public:
  // A stream of messages from one rank to another, of collectives with one fingerprint.
  struct Route {
    int from = 0;
    int to = 0;
    HostLink::Stream stream = HostLink::Stream::kData;
    uint32_t fingerprint = 0;
    friend auto operator<=>(const Route&, const Route&) = default;
  };

  // Returns the number of the next message of a route, for its sender or its receiver.
  size_t Number(bool sends, const Route& route) {
    MutexLock lock(mutex_);
    return numbers_[{sends, route}]++;
  }

  void Put(const Route& route, size_t number, std::span<const std::byte> data) {
    MutexLock lock(mutex_);
    messages_[route][number].assign(data.begin(), data.end());
    sent_[route.from] += data.size();
    ++messages_sent_;
    changed_.NotifyAll();
  }

  absl::Status Take(const Route& route, size_t number, std::span<std::byte> data,
                    absl::Duration timeout) {
    const MonotonicClock clock;
    const absl::Time deadline = clock.Now() + timeout;
    MutexLock lock(mutex_);
    auto& messages = messages_[route];
    while (!messages.contains(number)) {
      if (closed_) return absl::UnavailableError("the wire is cut");
      if (clock.Now() >= deadline) return absl::DeadlineExceededError("the wire is silent");
      (void)changed_.WaitFor(mutex_, deadline - clock.Now());
    }
    const std::vector<std::byte> message = std::move(messages[number]);
    messages.erase(number);
    EXPECT_EQ(message.size(), data.size()) << "from " << route.from << " to " << route.to;
    if (!data.empty()) {
      std::memcpy(data.data(), message.data(), std::min(message.size(), data.size()));
    }
    return absl::OkStatus();
  }

  void Close() {
    MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }

  // Blocks until the wire is closed.
  void AwaitClosed() {
    MutexLock lock(mutex_);
    while (!closed_) (void)changed_.WaitFor(mutex_, absl::InfiniteDuration());
  }
  bool closed() {
    MutexLock lock(mutex_);
    return closed_;
  }

  // Returns the bytes that the ranks of `host` have sent so far.
  size_t SentBy(RankRange host) {
    MutexLock lock(mutex_);
    size_t bytes = 0;
    for (int rank = host.begin; rank < host.end; ++rank) bytes += sent_[rank];
    return bytes;
  }
  size_t messages_sent() {
    MutexLock lock(mutex_);
    return messages_sent_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::pair<bool, Route>, size_t> numbers_ ABSL_GUARDED_BY(mutex_);
  std::map<Route, std::map<size_t, std::vector<std::byte>>> messages_ ABSL_GUARDED_BY(mutex_);
  std::map<int, size_t> sent_ ABSL_GUARDED_BY(mutex_);
  size_t messages_sent_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Sends at once, so that a Send() never waits for its Wait().
class WireLink : public HostLink {
 public:
  WireLink(Wire* wire, int rank) : wire_(wire), rank_(rank) {}

  void Enter(uint32_t fingerprint) override { fingerprint_ = fingerprint; }

  std::unique_ptr<Transfer> Send(int rank, Stream stream,
                                 std::span<const std::byte> data) override {
    const Wire::Route route{
        .from = rank_, .to = rank, .stream = stream, .fingerprint = fingerprint_};
    wire_->Put(route, wire_->Number(true, route), data);
    return std::make_unique<Message>([](absl::Duration) { return absl::OkStatus(); });
  }
  std::unique_ptr<Transfer> Receive(int rank, Stream stream, std::span<std::byte> data) override {
    const Wire::Route route{
        .from = rank, .to = rank_, .stream = stream, .fingerprint = fingerprint_};
    return std::make_unique<Message>(
        [wire = wire_, route, data, number = wire_->Number(false, route)](absl::Duration timeout) {
          return wire->Take(route, number, data, timeout);
        });
  }
  void End() override { wire_->Close(); }

 private:
  struct Message : Transfer {
    using Waiter = std::function<absl::Status(absl::Duration timeout)>;
    explicit Message(Waiter wait) : wait(std::move(wait)) {}
    absl::Status Wait(absl::Duration timeout) override { return wait(timeout); }
    const Waiter wait;
  };

  Wire* const wire_;
  const int rank_;
  uint32_t fingerprint_ = 0;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_BACKEND_TEST_WIRE_H_
