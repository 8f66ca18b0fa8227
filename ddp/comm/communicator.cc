#include "ddp/comm/communicator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/peer_wait.h"
#include "ddp/comm/collective_check.h"
#include "ddp/comm/collective_log.h"
#include "ddp/comm/failure_notice.h"
#include "ddp/error.h"
#include "ddp/logging.h"

namespace ddp {

struct Communicator::Operation {
  int64_t incarnation = 0;
  c10::intrusive_ptr<c10d::Work> work;
  Future future;
  at::Tensor tensor;
  std::vector<at::Tensor> more_tensors;
  int64_t sequence = -1;         // in the log; -1: not of this backend
  bool needs_all_ranks = false;  // completes only when every rank has launched it
};

namespace {

// How long the victim of a broken connection waits for the reason.
constexpr absl::Duration kExplanationTimeout = absl::Milliseconds(300);

// How much later than the peer that failed its victims end.
constexpr absl::Duration kHeadStart = absl::Milliseconds(200);

// How long a rank waits before it asks the others where they are, the first time and at most.
constexpr absl::Duration kFirstPatience = absl::Seconds(1);
constexpr absl::Duration kLongestPatience = absl::Seconds(30);

// When a rank that has asked looks at the answers, each counted from the look before.
constexpr absl::Duration kAnswerLooks[] = {absl::Milliseconds(50), absl::Milliseconds(200),
                                           absl::Milliseconds(750)};

constexpr const char* kOperationNames[] = {"all-reduce (sum)", "all-reduce (minimum)",
                                           "all-reduce (maximum)", "broadcast"};

// Backends that could not be destroyed when their communicator was, because an operation was still
// at work, with what that works on. Reachable until the process ends, for leak checkers too.
class AbandonedBackends {
 public:
  struct Entry {
    c10::intrusive_ptr<c10d::Backend> backend;
    std::vector<Communicator::Future> futures;
    std::vector<std::shared_ptr<void>> operations;
    bool for_good = false;
  };

  static AbandonedBackends& Instance() {
    static auto* const instance = new AbandonedBackends();
    return *instance;
  }

  void Add(Entry entry) {
    MutexLock lock(mutex_);
    entries_.push_back(std::move(entry));
  }

  // Frees those whose operations have come to an end meanwhile.
  void Sweep() {
    std::vector<Entry> ended;  // destroyed without the lock: it joins the backend's threads
    MutexLock lock(mutex_);
    const auto is_over = [](const Entry& entry) {
      return !entry.for_good && std::all_of(entry.futures.begin(), entry.futures.end(),
                                            [](const auto& future) { return future->completed(); });
    };
    const auto over = std::partition(entries_.begin(), entries_.end(),
                                     [&](const Entry& entry) { return !is_over(entry); });
    std::move(over, entries_.end(), std::back_inserter(ended));
    entries_.erase(over, entries_.end());
  }

 private:
  Mutex mutex_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

Communicator::Future CompleteFuture(const at::Tensor& tensor) {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor}));
  return future;
}

// As the backend is to see it: no backend sums complex numbers.
at::Tensor OnTheWire(const at::Tensor& tensor) {
  const bool complex = tensor.layout() == at::kStrided && tensor.is_complex();
  return complex ? at::view_as_real(tensor) : tensor;
}

// Whether the text of a backend's error is about a connection, as opposed to the tensor.
bool IsConnectionError(const std::string& text) {
  return absl::StrContains(text, "gloo/transport") || absl::StrContains(text, "Connection ") ||
         absl::StrContains(text, "Broken pipe") || absl::StrContains(text, "Socket ");
}

bool WantsRegisteredMemory() {
  const char* disabled = std::getenv("DDP_DISABLE_COMM_MEM");
  return disabled != nullptr && std::strcmp(disabled, "0") == 0;
}

}  // namespace

Communicator::Communicator(c10::intrusive_ptr<c10d::Backend> backend,
                           std::shared_ptr<FailureNotice> notice, const Options& options,
                           std::unique_ptr<CollectiveCheck> check)
    : options_(options),
      notice_(std::move(notice)),
      backend_(std::move(backend)),
      check_(std::move(check)),
      log_(options.size > 1 ? std::make_shared<CollectiveLog>() : nullptr),
      inquiry_(notice_, log_,
               {.rank = options.rank,
                .size = options.size,
                .incarnation = options.incarnation,
                .local_begin = options.local_begin,
                .local_end = options.local_end,
                .store_is_rank_0 = options.store_is_rank_0}),
      retired_(options.size > 1 && !backend_) {
  if (notice_) notice_->SetLog(log_);
  AbandonedBackends::Instance().Sweep();
}

// Destroying a backend waits for its operations. One that a peer never joins would hold us here.
Communicator::~Communicator() {
  if (!backend_) return;
  AbandonedBackends::Entry entry;
  bool on_gpu = false;
  for (std::shared_ptr<Operation>& operation : in_flight_) {
    if (!operation->future->completed()) entry.futures.push_back(operation->future);
    on_gpu |= operation->tensor.defined() && operation->tensor.is_cuda();
    entry.operations.push_back(std::move(operation));
  }
  if (retired_ && on_gpu) {
    // NCCL's futures say nothing about its kernels, which would block the GPU.
    entry.for_good = true;
    try {
      backend_->abort();
    } catch (const std::exception& error) {
      LOG(WARNING) << "rank " << options_.rank << ": could not abort NCCL: " << error.what();
    }
  }
  if (entry.futures.empty() && !entry.for_good) return;
  entry.backend = std::move(backend_);
  AbandonedBackends::Instance().Add(std::move(entry));
}

std::shared_ptr<Communicator::Operation> Communicator::NewOperation() {
  ForgetComplete();
  std::shared_ptr<Operation> operation;
  if (!spare_.empty()) {
    operation = std::move(spare_.back());
    spare_.pop_back();
  } else {
    operation = std::make_shared<Operation>();
  }
  operation->incarnation = options_.incarnation;
  return operation;
}

// Operations complete in about the order in which they started, so this looks at few.
void Communicator::ForgetComplete() {
  size_t count = 0;
  while (count < in_flight_.size() && in_flight_[count]->future->completed() &&
         !in_flight_[count]->future->hasError()) {
    std::shared_ptr<Operation>& operation = in_flight_[count++];
    if (operation.use_count() > 1) continue;  // somebody has not waited for it yet
    *operation = Operation();
    spare_.push_back(std::move(operation));
  }
  if (count == 0) return;
  in_flight_.erase(in_flight_.begin(), in_flight_.begin() + static_cast<int64_t>(count));
  if (log_ == nullptr) return;
  if (in_flight_.empty()) {
    log_->SetCompleteBefore(log_->launched());
  } else if (in_flight_.front()->sequence >= 0) {
    log_->SetCompleteBefore(in_flight_.front()->sequence);
  }
}

bool Communicator::AnOperationFailed() const {
  return std::any_of(in_flight_.begin(), in_flight_.end(),
                     [](const auto& operation) { return operation->future->hasError(); });
}

c10::intrusive_ptr<c10d::Work> Communicator::Launch(Kind kind, std::vector<at::Tensor>& tensors,
                                                    int root) {
  if (kind == Kind::kBroadcast) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return backend_->broadcast(tensors, options);
  }
  c10d::AllreduceOptions options;
  if (kind == Kind::kMin) options.reduceOp = c10d::ReduceOp::MIN;
  if (kind == Kind::kMax) options.reduceOp = c10d::ReduceOp::MAX;
  const bool sparse_on_gpu = tensors[0].is_sparse() && tensors[0].is_cuda();
  return sparse_on_gpu ? backend_->allreduce_sparse(tensors, options)
                       : backend_->allreduce(tensors, options);
}

void Communicator::CheckAcrossRanks(Kind kind, const at::Tensor& tensor, int root,
                                    const OperationName& what) {
  CollectiveFingerprint mine{.operation = kOperationNames[static_cast<int>(kind)],
                             .what = what.ToString(),
                             .dtype = c10::toString(tensor.scalar_type()),
                             .shape = tensor.sizes().vec(),
                             .layout = c10::str(tensor.layout()),
                             .device = c10::DeviceTypeName(tensor.device().type(), true),
                             .root = root};
  CollectiveCheck::Result result;
  try {
    result = check_->Run(mine);
  } catch (const std::exception& error) {
    Fail(what, absl::StrCat("its comparison across the ranks failed: ", error.what()));
  }
  if (result.peer_failed) {
    (void)notice_->AwaitFailure(absl::Seconds(1));  // our own thread may be a moment behind
    Fail(what, "a peer failed");
  }
  if (result.error.empty()) return;
  retired_ = true;
  notice_->MarkRaised();
  notice_->Report(result.error);
  throw CommunicationError(result.error);
}

// Gives the collective its number and, where the backend has tags, its tag.
int64_t Communicator::Record(Kind kind, const at::Tensor& tensor, int root,
                             const OperationName& what) {
  const bool sparse = tensor.layout() != at::kStrided;
  const int64_t elements = tensor.numel();
  const uint32_t tag =
      log_->Add({.operation = kOperationNames[static_cast<int>(kind)],
                 .dtype = c10::toString(tensor.scalar_type()),
                 .elements = elements,
                 // Ranks may have different numbers of entries in a sparse tensor.
                 .bytes = sparse ? 0 : elements * static_cast<int64_t>(tensor.element_size()),
                 .root = root,
                 .sparse = sparse,
                 .what = what});
  if (options_.set_tag != nullptr) options_.set_tag(*backend_, tag);
  return log_->launched() - 1;
}

Communicator::Pending Communicator::Start(Kind kind, at::Tensor tensor, int root,
                                          OperationName what) {
  ThrowIfUnusable(what);
  Pending pending{.operation = {}, .tensor = std::move(tensor), .what = std::move(what)};
  if (options_.size == 1) return pending;
  if (check_) CheckAcrossRanks(kind, pending.tensor, root, pending.what);
  if (pending.tensor.layout() == at::kStrided && pending.tensor.numel() == 0) return pending;
  try {
    std::vector<at::Tensor> tensors = {OnTheWire(pending.tensor)};
    std::shared_ptr<Operation> operation = NewOperation();
    operation->tensor = pending.tensor;
    operation->sequence = Record(kind, pending.tensor, root, pending.what);
    operation->needs_all_ranks = kind != Kind::kBroadcast;
    operation->work = Launch(kind, tensors, root);
    operation->future = operation->work->getFuture();
    in_flight_.push_back(operation);
    pending.operation = std::move(operation);
  } catch (const c10::Error& error) {
    FailBroken(pending.what, error.what_without_backtrace());
  } catch (const std::exception& error) {
    FailBroken(pending.what, error.what());
  }
  return pending;
}

Communicator::Pending Communicator::AllReduce(at::Tensor tensor, OperationName what) {
  return Start(Kind::kSum, std::move(tensor), -1, std::move(what));
}

Communicator::Pending Communicator::AllReduceMin(at::Tensor tensor, OperationName what) {
  return Start(Kind::kMin, std::move(tensor), -1, std::move(what));
}

Communicator::Pending Communicator::AllReduceMax(at::Tensor tensor, OperationName what) {
  return Start(Kind::kMax, std::move(tensor), -1, std::move(what));
}

Communicator::Pending Communicator::Broadcast(at::Tensor tensor, int root, OperationName what) {
  return Start(Kind::kBroadcast, std::move(tensor), root, std::move(what));
}

Communicator::Future Communicator::AllReduceAsync(at::Tensor tensor, OperationName what) {
  const Pending pending = Start(Kind::kSum, std::move(tensor), -1, std::move(what));
  if (!pending.operation) return CompleteFuture(pending.tensor);
  const Future& future = pending.operation->future;
  if (!pending.tensor.is_complex() && !pending.tensor.is_sparse()) return future;
  // The backend's value is its own view of the tensor.
  return future->then(
      [tensor = pending.tensor](c10::ivalue::Future& sum) {
        (void)sum.value();  // throws its error
        return c10::IValue(std::vector<at::Tensor>{tensor});
      },
      c10::ListType::create(c10::TensorType::get()));
}

void Communicator::Wait(Pending& pending) {
  if (!pending.operation) return;  // complete from the start
  if (retired_ || pending.operation->incarnation != options_.incarnation) {
    retired_ = retired_ || notice_->failed();
    pending.operation.reset();
    ThrowIfUnusable(pending.what);
    throw CommunicationError(absl::StrCat("rank ", options_.rank, ": ", pending.what.ToString(),
                                          " was started before the process group was renewed"));
  }
  if (pending.tensor.is_cuda()) return OrderStreams(pending);
  WaitFuture(pending.operation->future, {}, pending.what);
  pending.operation.reset();
  ForgetComplete();
}

// The collective that this rank waits for: its oldest one that is not complete.
Inquiry::Awaited Communicator::Awaited(const OperationName& what) {
  ForgetComplete();
  for (const std::shared_ptr<Operation>& operation : in_flight_) {
    if (operation->sequence < 0) continue;
    if (operation->future->completed() && !operation->future->hasError()) continue;
    return {.sequence = operation->sequence,
            .needs_all_ranks = operation->needs_all_ranks,
            .what = what.ToString()};
  }
  // Nothing of this backend: no rank can be missing in it.
  return {.sequence = -1, .needs_all_ranks = false, .what = what.ToString()};
}

// Asks the other ranks where they are, and reports what is wrong with them. Returns when the future
// is complete, a failure is known, or the answers say nothing. A store that fails is no failure.
void Communicator::Inquire(const Future& future, const OperationName& what, int64_t since_ns) {
  try {
    if (!inquiry_.Ask(since_ns)) return;
    for (const absl::Duration look : kAnswerLooks) {
      if (notice_->Wait(*future, look) != FailureNotice::WaitResult::kTimedOut) return;
      const bool all = inquiry_.ReadAnswers();
      const std::optional<FailureNotice::Failure> failure = inquiry_.Judge(Awaited(what));
      if (failure.has_value()) notice_->ReportFound(*failure);
      if (all || failure.has_value()) return;
    }
  } catch (const std::exception& error) {
    LOG(WARNING) << "rank " << options_.rank
                 << ": could not ask the other ranks where they are: " << error.what();
  }
}

// For the message of a timeout.
std::string Communicator::LateRanks(const OperationName& what) {
  try {
    if (!inquiry_.Ask(MonotonicNanoseconds())) return std::string();
    for (const absl::Duration look : kAnswerLooks) {
      if (notice_->AwaitFailure(look).has_value() || inquiry_.ReadAnswers()) break;
    }
    return inquiry_.DescribeLate(Awaited(what));
  } catch (const std::exception&) {
    return std::string();  // the timeout itself is the error
  }
}

// Until the future is complete (true), a failure is known, or the time is over.
FailureNotice::WaitResult Communicator::Await(const Future& future, const OperationName& what) {
  const PeerWaitScope scope;
  const MonotonicClock clock;
  // The backend's own timeout is the same; the margin lets its more precise text win.
  const absl::Time deadline = clock.Now() + options_.timeout + absl::Seconds(1);
  absl::Duration patience = kFirstPatience;
  while (true) {
    const int64_t since_ns = MonotonicNanoseconds();
    const FailureNotice::WaitResult result =
        notice_->Wait(*future, std::min(patience, deadline - clock.Now()));
    if (result != FailureNotice::WaitResult::kTimedOut || clock.Now() >= deadline) return result;
    if (log_ != nullptr) Inquire(future, what, since_ns);
    patience = std::min(2 * patience, kLongestPatience);
  }
}

void Communicator::WaitFuture(const Future& future, std::vector<at::Tensor> keep_alive,
                              OperationName what) {
  if (retired_) ThrowIfUnusable(what);
  const MonotonicClock clock;
  const absl::Time start = clock.Now();
  const FailureNotice::WaitResult result = Await(future, what);
  const absl::Time news_at = clock.Now();
  // A peer that failed after it was through with this operation has sent what we wait for; the news
  // may be faster. Nobody may miss a step that others have made: the next operation hears of it.
  const bool completed = result == FailureNotice::WaitResult::kCompleted ||
                         (result == FailureNotice::WaitResult::kPeerFailed &&
                          notice_->AwaitCompletion(*future, kHeadStart));
  if (completed && !future->hasError()) {
    future->wait();  // orders the current streams behind it; nothing to do on the CPU
    return;
  }
  const std::string waited =
      absl::FormatDuration(absl::Trunc(clock.Now() - start, absl::Milliseconds(1)));
  if (!completed) {
    std::shared_ptr<Operation> given_up = NewOperation();
    given_up->future = future;
    given_up->more_tensors = std::move(keep_alive);
    in_flight_.push_back(std::move(given_up));
  }
  if (result == FailureNotice::WaitResult::kTimedOut) {
    Fail(what, absl::StrCat("not all ranks came within ", waited, LateRanks(what)));
  }
  if (result == FailureNotice::WaitResult::kPeerFailed) {
    notice_->YieldToCause(kHeadStart - (clock.Now() - news_at));
    Fail(what, "a peer failed");
  }
  const std::string error = internal::WithoutStackTrace(future->tryRetrieveErrorMessage());
  if (!AnOperationFailed()) {
    retired_ = true;
    notice_->MarkRaised();
    const std::string message =
        absl::StrCat("rank ", options_.rank, ": ", what.ToString(), " failed: ", error);
    notice_->Report(message);
    throw ReductionError(message);
  }
  FailBroken(what, absl::StrCat("after ", waited, ": ", error));
}

// An operation failed with `reason`. A rank that fails also closes its connections, so the error of
// this rank may be a consequence: the cause is looked for first.
void Communicator::FailBroken(const OperationName& what, const std::string& reason) {
  retired_ = true;
  if (log_ == nullptr || !IsConnectionError(reason)) {
    if (notice_->AwaitFailure(kExplanationTimeout).has_value()) notice_->YieldToCause(kHeadStart);
    Fail(what, reason);
  }
  if (absl::StrContains(reason, "Timed out")) Fail(what, absl::StrCat(reason, LateRanks(what)));
  Inquiry::Awaited awaited = Awaited(what);
  if (awaited.sequence < 0) awaited.sequence = log_->launched() - 1;  // it could not be started
  const std::optional<FailureNotice::Failure> cause = inquiry_.Explain(awaited, reason);
  if (cause.has_value()) {
    if (cause->rank == options_.rank) Fail(what, cause->reason);
    notice_->ReportFound(*cause);
  }
  // The rank at fault should be the first to end. The others must hear of it before this rank ends,
  // which may be the one that serves the store.
  notice_->YieldToCause(kHeadStart);
  Fail(what, reason);
}

// The host does not wait for NCCL, so it looks for news and goes on.
void Communicator::OrderStreams(Pending& pending) {
  if (notice_->failed()) Fail(pending.what, "a peer failed");
  try {
    pending.operation->work->synchronize();
  } catch (const c10::Error& error) {
    Fail(pending.what, error.what_without_backtrace());
  }
  pending.operation.reset();
  ForgetComplete();
}

void Communicator::Barrier(at::Device device) {
  const at::Tensor token = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device));
  Pending pending = AllReduce(token, "a barrier");
  Wait(pending);
  if (token.is_cuda()) (void)token.item();  // the host waits as well
}

void Communicator::BeginBarrier(at::Device device, OperationName what) {
  const at::Tensor token = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device));
  barrier_ = AllReduce(token, std::move(what));
}

void Communicator::EndBarrier() {
  if (!barrier_.operation) return;
  Pending barrier = std::exchange(barrier_, {});
  Wait(barrier);
}

at::Tensor Communicator::AllocateBuffer(int64_t count, const at::TensorOptions& options) {
  static const bool registered = WantsRegisteredMemory();
  if (registered && backend_ && options.device().is_cuda() &&
      backend_->supportsTensorAlloc(options.device().index())) {
    return backend_->allocateTensor(count, options).zero_();
  }
  return at::zeros({count}, options);
}

void Communicator::Fail(const OperationName& what, const std::string& reason) {
  retired_ = true;
  notice_->MarkRaised();
  const std::optional<FailureNotice::Failure> failure = notice_->failure();
  if (failure.has_value() && failure->rank < 0) {
    throw CommunicationError(absl::StrCat("rank ", options_.rank, ": stopped in ", what.ToString(),
                                          ": ", failure->reason));
  }
  if (failure.has_value() && failure->rank != options_.rank) {
    throw PeerFailedError(failure->rank, absl::StrCat("rank ", options_.rank, ": stopped in ",
                                                      what.ToString(), ", because rank ",
                                                      failure->rank, " failed: ", failure->reason));
  }
  const std::string message =
      absl::StrCat("rank ", options_.rank, ": ", what.ToString(),
                   " failed: ", failure.has_value() ? failure->reason : reason);
  notice_->Report(message);
  throw CommunicationError(message);
}

void Communicator::ThrowIfUnusable(const OperationName& what) {
  if (!retired_ && !notice_->failed()) return;
  // News that this rank has not thrown for yet reads as if it had come a moment later. It may have
  // been thrown elsewhere: ProcessGroup::ensure_usable() and report_failure() know no communicator.
  if (!retired_ && !notice_->gone().has_value() && !notice_->MarkRaised()) Fail(what, "");
  retired_ = true;
  const std::optional<FailureNotice::Failure> gone = notice_->gone();
  if (gone.has_value()) {
    throw PeerFailedError(gone->rank,
                          absl::StrCat("rank ", options_.rank,
                                       ": the process group cannot be used any more, because rank ",
                                       gone->rank, " is gone: ", gone->reason));
  }
  notice_->MarkRaised();
  const std::optional<FailureNotice::Failure> failure = notice_->failure();
  const std::string message =
      absl::StrCat("rank ", options_.rank,
                   ": the process group cannot be used any more, until all ranks renew it (the ",
                   "next synchronized forward does, or ProcessGroup::renew()): ",
                   failure.has_value() ? failure->ToString() : std::string("an operation failed"));
  if (failure.has_value() && failure->rank >= 0 && failure->rank != options_.rank) {
    throw PeerFailedError(failure->rank, message);
  }
  throw CommunicationError(message);
}

}  // namespace ddp
