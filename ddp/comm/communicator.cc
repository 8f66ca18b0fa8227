// Length: every collective starts and ends by the same rules about unfinished operations.

#include "ddp/comm/communicator.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "ddp/comm/abandoned_backends.h"
#include "ddp/comm/backend/operation_fault.h"
#include "ddp/comm/check/collective_check.h"
#include "ddp/comm/check/collective_log.h"
#include "ddp/comm/collective.h"
#include "ddp/comm/completion_wait.h"
#include "ddp/comm/device_watch.h"
#include "ddp/comm/group_error.h"
#include "ddp/comm/last_passes.h"
#include "ddp/comm/message_thread.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/comm/work_future.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/common/peer_wait.h"
#include "ddp/health/group_failure.h"
#include "ddp/health/group_health.h"

namespace ddp::internal {

struct Communicator::Operation {
  int64_t incarnation = 0;
  int64_t start_ns = 0;
  c10::intrusive_ptr<c10d::Work> work;
  Future future;
  Future message;  // of a message: without AfterIt::finish
  std::shared_ptr<MessageThread> message_thread;
  at::Tensor tensor;
  std::vector<at::Tensor> more_tensors;
  int64_t sequence = -1;    // in the log; -1: no collective of this backend
  int peer = -1;            // of a message; -1: no message
  bool has_finish = false;  // the future includes AfterIt::finish
  OperationName what = "";
  bool needs_all_ranks = false;  // completes only when every rank has launched it
};

namespace {

// How long a rank whose operation failed waits for a peer's failure report.
constexpr absl::Duration kExplanationTimeout = absl::Milliseconds(300);
// The same after a peer has aborted the group: the report is on its way, on a busy host for long.
constexpr absl::Duration kExplanationOfAbortTimeout = absl::Seconds(5);
// The same for the watch of a device: see Inquiry::Explain().
constexpr absl::Duration kExplanationOfWatchTimeout = absl::Seconds(10);

// How much longer than the peer that failed the other ranks wait before they throw.
constexpr absl::Duration kHeadStart = absl::Milliseconds(200);

// A start that waits for the backend's threads looks this often without a pause, then once in this
// time.
constexpr int kQuickLooks = 1000;
constexpr absl::Duration kSettledLook = absl::Microseconds(100);

// How long a message has its turn while a caller waits for what follows from one of several.
constexpr absl::Duration kMessageTurn = absl::Milliseconds(2);

// How long a rank waits before it asks the others for their positions: at first, and at most.
constexpr absl::Duration kFirstPatience = absl::Seconds(1);
constexpr absl::Duration kLongestPatience = absl::Seconds(30);

// Time without a question after the store has failed. A question to a store that is away blocks for
// seconds. The others then wait for this rank and ask too: every step would take these seconds. All
// communicators of a process have the same store.
constexpr absl::Duration kPauseAfterStoreFailure = absl::Minutes(1);
std::atomic<int64_t> ask_again_ns = 0;  // monotonic

c10::intrusive_ptr<c10d::Work> Launch(const Collective& collective, c10d::Backend& backend,
                                      const BackendTraits& traits) {
  if (traits.launch_mutex == nullptr) return collective.Launch(backend, traits);
  MutexLock lock(*traits.launch_mutex);
  return collective.Launch(backend, traits);
}

bool WantsRegisteredMemory() {
  const char* disabled = std::getenv("DDP_DISABLE_COMM_MEM");
  return disabled != nullptr && std::strcmp(disabled, "0") == 0;
}

}  // namespace

Communicator::Communicator(c10::intrusive_ptr<c10d::Backend> backend,
                           std::shared_ptr<FailureMonitor> monitor, const Options& options,
                           std::unique_ptr<CollectiveCheck> check)
    : options_(options),
      monitor_(std::move(monitor)),
      wait_(monitor_, backend.get(), options.traits),
      backend_(std::move(backend)),
      check_(std::move(check)),
      log_(options.membership.size > 1 ? std::make_shared<CollectiveLog>() : nullptr),
      inquiry_(monitor_, log_, options.membership),
      point_to_point_(backend_, options.traits.set_tag != nullptr),
      retired_(options.membership.size > 1 && !backend_) {
  monitor_->SetPositionSource(log_);
  FreeEndedBackends();
}

// The destructor of a backend blocks until its operations have ended. A peer may never join one, so
// a backend with unfinished operations is not destroyed here.
Communicator::~Communicator() {
  if (!backend_) return;
  if (options_.traits.abort != nullptr && options_.traits.abort(*backend_)) return;
  AbandonedBackend entry;
  std::move(messages_.begin(), messages_.end(), std::back_inserter(in_flight_));
  for (std::shared_ptr<Operation>& operation : in_flight_) {
    if (!operation->future->completed()) entry.futures.push_back(operation->future);
    entry.operations.push_back(std::move(operation));
  }
  if (device_watch_) entry.for_good = !ShutDown();
  // A peer that was stopped in the middle of a write may go on at any time.
  entry.for_good |= options_.traits.abort != nullptr;
  if (entry.futures.empty() && !entry.for_good) return;
  entry.end_operations = options_.traits.end_operations;
  entry.backend = std::move(backend_);
  Abandon(std::move(entry));
}

// Ends a backend whose operations run on streams. The destructor of NCCL's backend would abort the
// operations in progress. Returns false when the backend had to be aborted: its futures say nothing
// about its kernels, which would block the device.
bool Communicator::ShutDown() {
  if (!device_watch_->End()) return false;
  try {
    backend_->shutdown();
  } catch (const std::exception& error) {
    LOG(WARNING) << "rank " << options_.membership.rank << ": the end of the backend "
                 << options_.traits.name << ": " << MessageOf(error);
  }
  return true;
}

void Communicator::RetireForNext() {
  Retire();
  if (device_watch_) device_watch_->End();
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
  operation->incarnation = options_.membership.incarnation;
  operation->start_ns = MonotonicNanoseconds();
  return operation;
}

// Forgets operations that have completed without an error. Collectives complete in about the order
// in which they started, so the loop ends early. A message may stay unfinished for any time.
void Communicator::ForgetComplete() {
  std::erase_if(messages_, [](const auto& message) {
    return message->future->completed() && !message->future->hasError();
  });
  size_t count = 0;
  while (count < in_flight_.size() && in_flight_[count]->future->completed() &&
         !in_flight_[count]->future->hasError()) {
    std::shared_ptr<Operation>& operation = in_flight_[count++];
    if (operation.use_count() > 1) continue;  // a caller still holds its Pending
    *operation = Operation();
    spare_.push_back(std::move(operation));
  }
  if (count == 0) return;
  in_flight_.erase(in_flight_.begin(), in_flight_.begin() + static_cast<int64_t>(count));
  if (log_ == nullptr) return;
  if (device_watch_) return;  // it knows what the device has completed
  if (in_flight_.empty()) {
    log_->SetCompleteBefore(log_->launched());
  } else if (in_flight_.front()->sequence >= 0) {
    log_->SetCompleteBefore(in_flight_.front()->sequence);
  }
}

// Returns an operation with an error among those not forgotten, or null.
const Communicator::Operation* Communicator::FailedOperation() const {
  for (const auto* list : {&in_flight_, &messages_}) {
    const auto failed = std::find_if(list->begin(), list->end(), [](const auto& operation) {
      return operation->future->hasError();
    });
    if (failed != list->end()) return failed->get();
  }
  return nullptr;
}

// Throws the error of an operation that the watch has found. The watch looks for the cause.
void Communicator::FailIfWatched() {
  const std::optional<DeviceWatch::Failed> failed = device_watch_->failed();
  if (!failed.has_value()) return;
  (void)monitor_->AwaitFailure(kExplanationOfWatchTimeout);
  Fail(failed->what, failed->error);
}

// Throws the error of an earlier operation for which no caller has waited.
void Communicator::ThrowForgottenError() {
  ForgetComplete();
  if (device_watch_) {
    device_watch_->Look();
    FailIfWatched();
  }
  if (const Operation* failed = FailedOperation()) FailOperation(*failed, /*watched=*/false);
}

void Communicator::FailOperation(const Operation& operation, bool watched) {
  FailBroken(operation.future, operation.what, TextOf(operation.future->exception_ptr()),
             FaultOfOperation(operation, watched));
}

// Gloo's error for a peer that is late has the type of a broken connection. The time tells them
// apart when this rank has `watched` the operation, and so knows when it failed.
OperationFault Communicator::FaultOfOperation(const Operation& operation, bool watched) const {
  const OperationFault fault = FaultOf(operation.future->exception_ptr());
  const auto age = absl::Nanoseconds(MonotonicNanoseconds() - operation.start_ns);
  const bool late = watched && fault == OperationFault::kConnection && age >= options_.timeout;
  return late ? OperationFault::kLate : fault;
}

void Communicator::CheckAcrossRanks(const Collective& collective, const OperationName& what) {
  const at::Tensor& tensor = collective.agreed();
  CollectiveRecord mine{.operation = collective.Name(),
                        .what = what.ToString(),
                        .dtype = c10::toString(tensor.scalar_type()),
                        .layout = c10::str(tensor.layout()),
                        .device = c10::DeviceTypeName(tensor.device().type(), true),
                        .root = collective.root};
  if (collective.sizes_agree()) mine.shape = c10::str(tensor.sizes());
  CollectiveCheck::Result result;
  try {
    result = check_->Run(mine);
  } catch (const std::exception& error) {
    Fail(what, absl::StrCat("its comparison across the ranks failed: ", error.what()));
  }
  if (result.peer_failed) {
    (void)monitor_->AwaitFailure(absl::Seconds(1));  // this rank's thread may not have read it yet
    Fail(what, "a peer failed");
  }
  if (!result.error.empty()) FailOwn(GroupError::Kind::kCommunication, result.error);
}

// Gives the collective its number and, where the backend has tags, its tag.
int64_t Communicator::Record(const Collective& collective, const OperationName& what) {
  const at::Tensor& tensor = collective.agreed();
  const bool sparse = tensor.layout() != at::kStrided;
  const int64_t elements = collective.sizes_agree() ? tensor.numel() : 0;
  const uint32_t tag =
      log_->Add({.operation = collective.Name(),
                 .dtype = c10::toString(tensor.scalar_type()),
                 .elements = elements,
                 // A sparse tensor may have a different number of entries on every rank.
                 .bytes = sparse ? 0 : elements * static_cast<int64_t>(tensor.element_size()),
                 .root = collective.root,
                 .sparse = sparse,
                 .what = what});
  if (options_.traits.set_tag != nullptr) options_.traits.set_tag(*backend_, tag);
  return log_->launched() - 1;
}

// Starts an operation by `launch`, which sets its work and its future, and adds it to `list`. An
// exception retires this communicator; the caller gets a CommunicationError that names `what`.
template <typename Launch>
std::shared_ptr<Communicator::Operation> Communicator::Begin(
    const at::Tensor& tensor, const OperationName& what, AfterIt after,
    std::vector<std::shared_ptr<Operation>>& list, const Launch& launch) {
  std::shared_ptr<Operation> operation = NewOperation();
  operation->tensor = tensor;
  operation->what = what;
  try {
    const at::NoGradGuard no_grad;
    launch(*operation);
    if (after.finish) {
      operation->has_finish = true;
      operation->future =
          Then(operation->future, std::move(after.finish), std::move(after.results));
    }
    Watch(*operation);
  } catch (const std::exception&) {
    const std::exception_ptr error = std::current_exception();
    FailBroken(nullptr, what, TextOf(error), FaultOf(error));
  }
  list.push_back(operation);
  return operation;
}

Communicator::Pending Communicator::Start(const Collective& collective, OperationName what,
                                          AfterIt after) {
  ThrowIfUnusable(what);
  ThrowForgottenError();
  Pending pending{.operation = {},
                  .tensor = collective.output,
                  .what = std::move(what),
                  .on_stream = options_.traits.RunsOnStream(collective.output.device())};
  if (options_.membership.size == 1) {
    collective.CopyInGroupOfOne();
    if (after.finish) after.finish();
    return pending;
  }
  if (check_) CheckAcrossRanks(collective, pending.what);
  if (collective.IsEmpty()) {
    if (after.finish) after.finish();
    return pending;
  }
  pending.operation =
      BeginCollective(collective, pending.what, std::move(after),
                      [&](auto& backend) { return Launch(collective, backend, options_.traits); });
  return pending;
}

// Waits for the collectives in progress, when one of them or `next` must run alone: see
// BackendTraits::settled.
void Communicator::AwaitSparse(const Collective& next, const OperationName& what) {
  const bool sparse = next.output.is_sparse();
  const bool alone = std::exchange(after_sparse_, sparse) || sparse;
  if (!alone || options_.traits.settled == nullptr) return;
  while (!in_flight_.empty()) {
    const std::shared_ptr<Operation> first = in_flight_.front();
    WaitFuture(first->future, {}, first->what);
    ForgetComplete();
  }
  AwaitSettled(what);
}

// The backend's threads leave a complete collective within microseconds, unless a continuation
// holds them, or a collective that the program has started on its own backend.
void Communicator::AwaitSettled(const OperationName& what) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + options_.timeout;
  for (int look = 0; !options_.traits.settled(*backend_); ++look) {
    if (look < kQuickLooks) {
      std::this_thread::yield();
      continue;
    }
    if (monitor_->AwaitFailure(kSettledLook).has_value()) Fail(what, "a peer failed");
    if (clock.Now() < deadline) continue;
    Fail(what, absl::StrCat("it must be alone on the backend, whose threads were busy with other "
                            "collectives for ",
                            absl::FormatDuration(options_.timeout)));
  }
}

Communicator::Pending Communicator::StartOwn(const Collective& described, OperationName what,
                                             const OwnLaunch& launch) {
  ThrowIfUnusable(what);
  ThrowForgottenError();
  if (check_) CheckAcrossRanks(described, what);
  std::shared_ptr<Operation> operation = BeginCollective(described, what, {}, launch);
  return {.operation = std::move(operation), .tensor = described.output, .what = std::move(what)};
}

std::shared_ptr<Communicator::Operation> Communicator::BeginCollective(const Collective& collective,
                                                                       const OperationName& what,
                                                                       AfterIt after,
                                                                       const OwnLaunch& launch) {
  AwaitSparse(collective, what);
  return Begin(collective.output, what, std::move(after), in_flight_, [&](Operation& operation) {
    if (collective.input.defined()) operation.more_tensors = {collective.input};
    operation.sequence = Record(collective, what);
    operation.needs_all_ranks = collective.needs_all_ranks();
    operation.work = launch(*backend_);
    operation.future = FutureOfWork(operation.work, {collective.output});
  });
}

void Communicator::Watch(const Operation& operation) {
  const at::Device device = operation.tensor.device();
  if (!operation.work || !options_.traits.RunsOnStream(device)) return;
  if (!device_watch_) {
    device_watch_ = std::make_unique<DeviceWatch>(backend_, monitor_, log_, options_.membership,
                                                  options_.timeout);
  }
  device_watch_->Add({.work = operation.work,
                      .sequence = operation.sequence,
                      .peer = operation.peer,
                      .needs_all_ranks = operation.needs_all_ranks,
                      .what = operation.what},
                     device);
}

Communicator::Pending Communicator::StartMessage(bool send, at::Tensor tensor, int peer, int tag,
                                                 OperationName what, AfterIt after) {
  ThrowIfUnusable(what);
  ThrowForgottenError();
  const bool on_stream = options_.traits.RunsOnStream(tensor.device());
  auto operation = Begin(tensor, what, std::move(after), messages_, [&](Operation& started) {
    auto message =
        send ? point_to_point_.Send(tensor, peer, tag) : point_to_point_.Receive(tensor, peer, tag);
    started.peer = peer;
    started.work = std::move(message.work);
    started.future = started.message = std::move(message.future);
    started.message_thread = point_to_point_.thread();
  });
  return {.operation = std::move(operation),
          .tensor = std::move(tensor),
          .what = std::move(what),
          .on_stream = on_stream};
}

Communicator::Pending Communicator::AllReduce(at::Tensor tensor, OperationName what) {
  return Start({.output = std::move(tensor)}, std::move(what), {});
}

Communicator::Pending Communicator::AllReduceMin(at::Tensor tensor, OperationName what) {
  return Start({.op = ReduceOp::kMin, .output = std::move(tensor)}, std::move(what), {});
}

Communicator::Pending Communicator::AllReduceMax(at::Tensor tensor, OperationName what) {
  return Start({.op = ReduceOp::kMax, .output = std::move(tensor)}, std::move(what), {});
}

Communicator::Pending Communicator::Broadcast(at::Tensor tensor, int root, OperationName what) {
  return Start({.kind = Collective::Kind::kBroadcast, .root = root, .output = std::move(tensor)},
               std::move(what), {});
}

Communicator::Pending Communicator::Send(at::Tensor tensor, int peer, int tag, OperationName what) {
  return StartMessage(true, std::move(tensor), peer, tag, std::move(what), {});
}

Communicator::Pending Communicator::Receive(at::Tensor tensor, int peer, int tag,
                                            OperationName what, AfterIt after) {
  return StartMessage(false, std::move(tensor), peer, tag, std::move(what), std::move(after));
}

Communicator::Future Communicator::FutureOf(const Pending& pending) {
  return pending.operation ? pending.operation->future : nullptr;
}

void Communicator::Wait(Pending& pending) {
  if (!pending.operation) return;  // complete from the start
  if (retired_ || pending.operation->incarnation != options_.membership.incarnation) {
    retired_ = retired_ || monitor_->failed();
    pending.operation.reset();
    ThrowIfUnusable(pending.what);
    throw CommunicationError(absl::StrCat("rank ", options_.membership.rank, ": ",
                                          pending.what.ToString(),
                                          " was started before the process group was renewed"));
  }
  if (pending.on_stream) return OrderStreams(pending);
  WaitFuture(pending.operation->future, {}, pending.what);
  pending.operation.reset();
  ForgetComplete();
}

// Returns the operation that this rank waits for: the one with `future`. The future of a comm hook
// belongs to no operation; then it returns the oldest collective that is not complete.
Inquiry::Awaited Communicator::Awaited(const Future& future, const OperationName& what) {
  ForgetComplete();
  for (const std::shared_ptr<Operation>& message : messages_) {
    if (message->future != future) continue;
    return {.sequence = -1, .peer = message->peer, .what = what.ToString()};
  }
  for (const std::shared_ptr<Operation>& operation : in_flight_) {
    if (operation->sequence < 0) continue;
    if (operation->future->completed() && !operation->future->hasError()) continue;
    return {.sequence = operation->sequence,
            .needs_all_ranks = operation->needs_all_ranks,
            .what = what.ToString()};
  }
  // The future is of no operation on this backend, so it needs no other rank.
  return {.sequence = -1, .needs_all_ranks = false, .what = what.ToString()};
}

// Asks the other ranks for their positions, and reports the failure that the answers prove. An
// error of the store is logged and reported to no rank.
void Communicator::Inquire(const Future& future, const OperationName& what, int64_t since_ns) {
  if (MonotonicNanoseconds() < ask_again_ns) return;
  try {
    inquiry_.Search(
        since_ns,
        [&](absl::Duration limit) {
          return wait_.Wait(*future, limit) != CompletionWait::Result::kTimedOut;
        },
        [&] { return std::optional(Awaited(future, what)); });
  } catch (const std::exception& error) {
    ask_again_ns = MonotonicNanoseconds() + absl::ToInt64Nanoseconds(kPauseAfterStoreFailure);
    LOG(WARNING) << "rank " << options_.membership.rank
                 << ": could not ask the other ranks where they are: " << error.what();
  }
}

// Names the ranks that are late, for the message of a timeout. Empty when none is known.
std::string Communicator::LateRanks(const Future& future, const OperationName& what) {
  if (log_ == nullptr) return std::string();  // a group of one: nobody to ask
  return inquiry_.DescribeLateNow(Awaited(future, what));
}

// Lets the thread of the messages turn to the one with `future`. Returns true when it is to be
// called again soon: see MessageThread::Hurry().
bool Communicator::HurryMessages(const Future& future) {
  if (messages_.empty()) return false;
  const auto message = std::find_if(messages_.begin(), messages_.end(),
                                    [&](const auto& one) { return one->future == future; });
  return point_to_point_.thread()->Hurry(message == messages_.end() ? future : (*message)->message);
}

// Blocks until the future is complete, a failure is known, another operation has failed, or the
// timeout has passed.
CompletionWait::Result Communicator::Await(const Future& future, const OperationName& what) {
  const PeerWaitScope scope;
  const MonotonicClock clock;
  // The backend has the same timeout. The margin lets its error, which is more precise, come first.
  const absl::Time deadline = clock.Now() + options_.timeout + absl::Seconds(1);
  absl::Duration patience = kFirstPatience;
  int64_t since_ns = MonotonicNanoseconds();
  absl::Time ask_at = clock.Now() + patience;
  while (true) {
    // Another operation may fail without a notification, so no slice is longer than 1 s.
    const absl::Duration longest = HurryMessages(future) ? kMessageTurn : kFirstPatience;
    const absl::Duration slice = std::min({longest, ask_at - clock.Now(), deadline - clock.Now()});
    const CompletionWait::Result result = wait_.Wait(*future, slice);
    if (result != CompletionWait::Result::kTimedOut || clock.Now() >= deadline) return result;
    if (FailedOperation() != nullptr) return result;
    if (clock.Now() < ask_at) continue;
    if (log_ != nullptr) Inquire(future, what, since_ns);
    patience = std::min(2 * patience, kLongestPatience);
    since_ns = MonotonicNanoseconds();
    ask_at = clock.Now() + patience;
  }
}

void Communicator::WaitFuture(const Future& future, std::vector<at::Tensor> keep_alive,
                              OperationName what) {
  if (retired_) ThrowIfUnusable(what);
  // A future on a stream is complete when it is enqueued, before a failure.
  if (device_watch_ && monitor_->failed()) Fail(what, "a peer failed");
  const MonotonicClock clock;
  const absl::Time start = clock.Now();
  const bool watched = !future->completed();
  const CompletionWait::Result result = Await(future, what);
  const absl::Time news_at = clock.Now();
  // A peer may have completed this operation before it failed. Its data may arrive after its
  // failure report. This rank must not miss a step that others made; the next operation throws.
  const bool completed =
      result == CompletionWait::Result::kCompleted ||
      (result == CompletionWait::Result::kPeerFailed && wait_.AwaitCompletion(*future, kHeadStart));
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
    if (const Operation* failed = FailedOperation()) FailOperation(*failed, watched);
  }
  if (result == CompletionWait::Result::kTimedOut) {
    Fail(what, absl::StrCat("not all ranks came within ", waited, LateRanks(future, what)));
  }
  if (result == CompletionWait::Result::kPeerFailed) {
    wait_.YieldToCause(kHeadStart - (clock.Now() - news_at));
    Fail(what, "a peer failed");
  }
  const std::string error = TextOf(future->exception_ptr());
  const Operation* const failed = FailedOperation();
  if (failed == nullptr) {
    FailOwn(GroupError::Kind::kReduction, absl::StrCat("rank ", options_.membership.rank, ": ",
                                                       what.ToString(), " failed: ", error));
  }
  FailBroken(future, what, absl::StrCat("after ", waited, ": ", error),
             FaultOfOperation(*failed, watched));
}

// Throws for an operation that failed with `reason`. A rank that fails closes its connections, so
// this rank's error may be a consequence. This function looks for the cause first.
void Communicator::FailBroken(const Future& future, const OperationName& what,
                              const std::string& reason, OperationFault fault) {
  retired_ = true;
  FailForDeadRank(future, what);
  if (log_ != nullptr && fault == OperationFault::kLate) {
    Fail(what, absl::StrCat(reason, LateRanks(future, what)));
  }
  if (log_ == nullptr || fault != OperationFault::kConnection) {
    const auto timeout =
        fault == OperationFault::kPeerAborted ? kExplanationOfAbortTimeout : kExplanationTimeout;
    if (monitor_->AwaitFailure(timeout).has_value()) wait_.YieldToCause(kHeadStart);
    Fail(what, reason);
  }
  Inquiry::Awaited awaited = Awaited(future, what);
  const bool not_started = awaited.sequence < 0 && awaited.peer < 0;
  if (not_started) awaited.sequence = log_->launched() - 1;
  const std::optional<GroupFailure> cause = inquiry_.Explain(awaited, reason);
  if (cause.has_value()) {
    if (cause->rank == options_.membership.rank) Fail(what, cause->reason);
    monitor_->ReportFound(*cause);
  }
  // The rank at fault should end first. Its peers must read the failure report before this rank
  // ends, because this rank may serve the store.
  wait_.YieldToCause(kHeadStart);
  Fail(what, reason);
}

// Throws when the backend knows which rank has died. That rank can report nothing, so this one does
// not wait for a report.
void Communicator::FailForDeadRank(const Future& future, const OperationName& what) {
  if (options_.traits.dead_rank == nullptr || !backend_) return;
  const int rank = options_.traits.dead_rank(*backend_);
  if (rank < 0) return;
  const GroupFailure ended = inquiry_.DescribeEnded(Awaited(future, what), {rank});
  if (options_.traits.all_see_dead_rank) {
    monitor_->ReportSeen(ended);
  } else {
    monitor_->ReportFound(ended);
  }
  Fail(what, "a peer failed");
}

// The path of Wait() for an operation on a stream: blocks the host only when a failure is known.
// The operation stays, because another stream may wait for it too.
void Communicator::OrderStreams(Pending& pending) {
  ThrowForgottenError();
  const c10::intrusive_ptr<c10d::Work>& work = pending.operation->work;
  if (monitor_->failed() && (!work || !device_watch_->AwaitCompletion(*work))) {
    Fail(pending.what, "a peer failed");
  }
  try {
    if (work) work->synchronize();
    if (!work || pending.operation->has_finish) {
      pending.operation->future->wait();  // does not block: NCCL's is complete at the launch
    }
  } catch (const c10::Error& error) {
    Fail(pending.what, error.what_without_backtrace());
  }
}

bool Communicator::IsComplete(const Pending& pending) {
  if (!pending.operation) return true;
  if (const auto& thread = pending.operation->message_thread) {
    thread->Hurry(pending.operation->message);
  }
  if (!pending.on_stream || !pending.operation->work) return pending.operation->future->completed();
  return pending.operation->work->isCompleted();
}

at::Tensor Communicator::ToHost(const at::Tensor& tensor, const OperationName& what) {
  if (!device_watch_ || !options_.traits.RunsOnStream(tensor.device())) return tensor.to(at::kCPU);
  const DeviceProof proof = device_watch_->Mark(tensor.device());
  at::Tensor on_host = tensor.to(at::kCPU);
  device_watch_->Look();
  if (*proof == DeviceOutcome::kLost) Fail(what, "a peer failed");
  FailIfWatched();
  return on_host;
}

DeviceProof Communicator::Prove(at::Device device) {
  if (!device_watch_ || !options_.traits.RunsOnStream(device)) return nullptr;
  DeviceProof proof = device_watch_->Mark(device);
  NoteLastPass(monitor_, proof);
  return proof;
}

Communicator::Pending Communicator::StartBarrier(at::Device device, OperationName what) {
  return AllReduce(at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device)),
                   std::move(what));
}

void Communicator::Barrier(at::Device device) {
  Pending pending = StartBarrier(device, "a barrier");
  Wait(pending);
  if (pending.on_stream) (void)ToHost(pending.tensor, pending.what);  // the host waits as well
}

void Communicator::BeginBarrier(at::Device device, OperationName what) {
  barrier_ = StartBarrier(device, std::move(what));
}

void Communicator::EndBarrier() {
  if (!barrier_.operation) return;
  Pending barrier = std::exchange(barrier_, {});
  Wait(barrier);
}

at::Tensor Communicator::AllocateBuffer(int64_t count, const at::TensorOptions& options) {
  static const bool registered = WantsRegisteredMemory();
  const bool wanted = options_.traits.allocates_shared ||
                      (registered && options_.traits.RunsOnStream(options.device()));
  if (wanted && backend_ && backend_->supportsTensorAlloc(options.device().index())) {
    return backend_->allocateTensor(count, options).zero_();
  }
  return at::zeros({count}, options);
}

void Communicator::Fail(const OperationName& what, const std::string& reason) {
  retired_ = true;
  ThrowGroupError(*monitor_, monitor_->Health([&](auto& health) {
    return health.OnOperationFailed(what.ToString(), reason);
  }));
}

// Throws an error of this rank that no operation has caused.
void Communicator::FailOwn(GroupError::Kind kind, const std::string& message) {
  retired_ = true;
  ThrowGroupError(*monitor_,
                  monitor_->Health([&](auto& health) { return health.OnOwnError(kind, message); }));
}

void Communicator::ThrowIfUnusable(const OperationName& what) {
  if (!retired_ && !monitor_->failed()) return;
  const std::optional<GroupError> error =
      monitor_->Health([&](auto& health) { return health.OnUse(retired_, what.ToString()); });
  if (!error.has_value()) return;
  retired_ = true;
  ThrowGroupError(*monitor_, *error);
}

}  // namespace ddp::internal
