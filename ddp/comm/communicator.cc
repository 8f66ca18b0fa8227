#include "ddp/comm/communicator.h"

#include <atomic>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "ddp/comm/failure_notice.h"
#include "ddp/error.h"
#include "ddp/logging.h"

namespace ddp {
namespace {

// Never frees `object`. It stays reachable from here, so that a leak checker sees the intention.
void KeepUntilExit(std::shared_ptr<void> object) {
  struct Kept {
    std::shared_ptr<void> object;
    Kept* next;
  };
  static std::atomic<Kept*> kept{nullptr};
  Kept* const entry = new Kept{std::move(object), nullptr};
  entry->next = kept.exchange(entry);
}

// How long the victim of a broken connection waits for the reason.
constexpr absl::Duration kExplanationTimeout = absl::Milliseconds(300);

// How much later than the peer that failed its victims end.
constexpr absl::Duration kHeadStart = absl::Milliseconds(200);

}  // namespace

struct Communicator::Operation {
  c10::intrusive_ptr<c10d::Work> work;
};

Communicator::Communicator(c10::intrusive_ptr<c10d::Backend> backend,
                           std::shared_ptr<FailureNotice> notice, const Options& options)
    : options_(options), notice_(std::move(notice)), backend_(std::move(backend)) {}

Communicator::~Communicator() {
  // Destroying a backend waits for its operations. One that a peer never joins would hold us here.
  if (retired_ || in_flight_ > 0) (void)backend_.release();
}

template <typename Start>
Communicator::Pending Communicator::StartOperation(at::Tensor tensor, std::string what,
                                                   Start start) {
  ThrowIfRetired();
  Pending pending{.operation = {}, .tensor = std::move(tensor), .what = std::move(what)};
  if (options_.size == 1) return pending;
  std::vector<at::Tensor> tensors = {pending.tensor};
  try {
    pending.operation = std::make_shared<Operation>(Operation{start(tensors)});
  } catch (const c10::Error& error) {
    Fail(pending, error.what_without_backtrace());
  } catch (const std::exception& error) {
    Fail(pending, error.what());
  }
  ++in_flight_;
  return pending;
}

Communicator::Pending Communicator::AllReduce(at::Tensor tensor, std::string what) {
  return StartOperation(std::move(tensor), std::move(what), [this](std::vector<at::Tensor>& t) {
    return backend_->allreduce(t, c10d::AllreduceOptions());
  });
}

Communicator::Pending Communicator::AllReduceMin(at::Tensor tensor, std::string what) {
  return StartOperation(std::move(tensor), std::move(what), [this](std::vector<at::Tensor>& t) {
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MIN;
    return backend_->allreduce(t, options);
  });
}

Communicator::Pending Communicator::Broadcast(at::Tensor tensor, int root, std::string what) {
  return StartOperation(std::move(tensor), std::move(what),
                        [this, root](std::vector<at::Tensor>& t) {
                          c10d::BroadcastOptions options;
                          options.rootRank = root;
                          return backend_->broadcast(t, options);
                        });
}

void Communicator::Wait(Pending& pending) {
  if (!pending.operation) return;  // a group of one
  ThrowIfRetired();
  if (pending.tensor.is_cuda()) return OrderStreams(pending);
  const MonotonicClock clock;
  const absl::Time start = clock.Now();
  const c10::intrusive_ptr<c10::ivalue::Future> future = pending.operation->work->getFuture();
  // The backend's own timeout is the same; the margin lets its more precise text win.
  const FailureNotice::WaitResult result =
      notice_->Wait(*future, options_.timeout + absl::Seconds(1));
  const std::string waited =
      absl::FormatDuration(absl::Trunc(clock.Now() - start, absl::Milliseconds(1)));
  if (result == FailureNotice::WaitResult::kTimedOut) {
    Fail(pending, absl::StrCat("not all ranks came within ", waited));
  }
  if (result == FailureNotice::WaitResult::kCompleted && !future->hasError()) {
    --in_flight_;
    pending.operation.reset();
    return;
  }
  if (result == FailureNotice::WaitResult::kPeerFailed) {
    notice_->YieldToCause(kHeadStart);
    Fail(pending, "");
  }
  // A peer that fails also closes its connections. Its own words say more than our error, and it,
  // not its victim, should be the first to end.
  if (notice_->AwaitFailure(kExplanationTimeout).has_value()) notice_->YieldToCause(kHeadStart);
  Fail(pending, absl::StrCat("after ", waited, ": ", future->tryRetrieveErrorMessage()));
}

// The host does not wait for NCCL, so it looks for news and goes on.
void Communicator::OrderStreams(Pending& pending) {
  if (notice_->failure().has_value()) Fail(pending, "");
  try {
    pending.operation->work->synchronize();
  } catch (const c10::Error& error) {
    Fail(pending, error.what_without_backtrace());
  }
  --in_flight_;
  pending.operation.reset();
}

void Communicator::Barrier(at::Device device) {
  const at::Tensor token = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device));
  Pending pending = AllReduce(token, "a barrier");
  Wait(pending);
  if (token.is_cuda()) (void)token.item();  // the host waits as well
}

void Communicator::Fail(Pending& pending, const std::string& reason) {
  retired_ = true;
  const std::string what = pending.what;
  KeepUntilExit(std::make_shared<Pending>(std::move(pending)));  // the backend may still use it
  const std::optional<FailureNotice::Failure> failure = notice_->failure();
  if (failure.has_value() && failure->rank != options_.rank) {
    throw PeerFailedError(failure->rank, absl::StrCat("rank ", options_.rank, ": stopped in ", what,
                                                      ", because rank ", failure->rank,
                                                      " failed: ", failure->reason));
  }
  const std::string message = absl::StrCat("rank ", options_.rank, ": ", what, " failed: ", reason);
  notice_->Report(message);
  throw CommunicationError(message);
}

void Communicator::ThrowIfRetired() const {
  if (!retired_) return;
  const std::optional<FailureNotice::Failure> failure = notice_->failure();
  const std::string why = failure.has_value() ? failure->reason : "an operation failed";
  throw CommunicationError(
      absl::StrCat("rank ", options_.rank, ": the process group cannot be used any more: ", why));
}

}  // namespace ddp
