#ifndef DDP_COMM_DEVICE_WATCH_H_
#define DDP_COMM_DEVICE_WATCH_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "ddp/comm/check/collective_log.h"
#include "ddp/comm/check/inquiry.h"
#include "ddp/comm/check/operation_name.h"
#include "ddp/comm/device_proof.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/common/membership.h"

namespace ddp::internal {

// Watches the operations that a communicator has given to a device's streams, until the device has
// completed them. The host goes on as soon as such an operation is enqueued, so no call of the
// program may wait for it. The thread "ddp-device" therefore does what a wait on the CPU does:
// - It asks the other ranks where they are when an operation takes long, and reports what it finds.
// - It reports an operation that has failed, or has taken longer than the timeout.
// - After a failure report it aborts the backend, so that the device, and a host that waits for the
//   device, can go on. Operations that complete within 200 ms of the report still count.
//
// The Communicator owns the watch. Thread-compatible.
class DeviceWatch {
 public:
  // An operation that the backend has started.
  struct Operation {
    c10::intrusive_ptr<c10d::Work> work;
    int64_t sequence = -1;  // in the log; -1: a message
    int peer = -1;          // of a message
    bool needs_all_ranks = false;
    OperationName what = "";
  };

  DeviceWatch(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<FailureMonitor> monitor,
              std::shared_ptr<CollectiveLog> log, const Membership& membership,
              absl::Duration timeout);

  // As End().
  ~DeviceWatch();
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  // Takes an operation that was started on the current stream of `device`.
  void Add(Operation operation, at::Device device);

  // Returns the proof of the work that `device`'s current stream has so far, and of the operations
  // so far.
  DeviceProof Mark(at::Device device);

  // Notes what the device has completed. Does not block.
  void Look();

  // Blocks until the device has completed `work`, or the backend is aborted. Returns true when the
  // device came first. Call it after a failure report.
  bool AwaitCompletion(c10d::Work& work) const;

  // Returns the operation that has failed first, if any.
  struct Failed {
    OperationName what;
    std::string error;
  };
  std::optional<Failed> failed() const;

  // Blocks until the device has completed the operations, or the backend is aborted. Returns true
  // when it was not: then it may be shut down.
  bool End();

 private:
  struct Entry {
    Operation operation;  // work null: a mark
    c10::Event event;     // the stream has come to the operation, or to the mark
    int64_t start_ns = 0;
    std::shared_ptr<std::atomic<DeviceOutcome>> proof;
  };

  void Run();
  std::optional<Inquiry::Awaited> Oldest(int64_t* start_ns, bool* waits_for_peers) const;
  // The end of an inquiry: this rank asked the others, another rank did, or the store failed.
  enum class Inquired { kByThisRank, kByAnother, kStoreFailed };
  Inquired Inquire(const Inquiry::Awaited& awaited, int64_t since_ns);
  bool IsOldest(const Inquiry::Awaited& awaited);
  void ReportError(const Inquiry::Awaited& awaited, const std::string& error, bool timed_out);
  void Abort();
  void Settle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool aborted() const;
  bool idle() const;
  bool done() const;

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::shared_ptr<FailureMonitor> monitor_;
  const std::shared_ptr<CollectiveLog> log_;
  const Membership self_;
  const absl::Duration timeout_;
  Inquiry inquiry_;  // of the thread

  mutable Mutex mutex_;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::optional<Failed> failed_ ABSL_GUARDED_BY(mutex_);
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<bool> ending_ = false;
  std::thread thread_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_DEVICE_WATCH_H_
