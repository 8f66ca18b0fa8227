#include "testing/accelerator/sim_communicator.h"

#include <exception>
#include <stdexcept>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "glog/logging.h"
#include "testing/accelerator/accelerator.h"

namespace ddp::testing {
namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// Leaves SimCall::run when an exchange has failed.
struct CallEnded : std::runtime_error {
  explicit CallEnded(absl::Status ended)
      : std::runtime_error(std::string(ended.message())), status(std::move(ended)) {}
  absl::Status status;
};

template <typename Byte>
std::vector<std::optional<absl::Span<Byte>>> Messages(const std::vector<at::Tensor>& tensors) {
  std::vector<std::optional<absl::Span<Byte>>> messages;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) {
      messages.emplace_back(
          absl::Span<Byte>(static_cast<Byte*>(tensor.data_ptr()), tensor.nbytes()));
    } else {
      messages.emplace_back(std::nullopt);
    }
  }
  return messages;
}

}  // namespace

struct SimCommunicator::Shelf {
  explicit Shelf(const SimCall& call) : end(kDevice), tensors(call.inputs) {
    tensors.insert(tensors.end(), call.outputs.begin(), call.outputs.end());
  }

  void Empty() {
    std::vector<at::Tensor> freed;  // without the lock
    MutexLock lock(mutex);
    freed.swap(tensors);
  }

  c10::Event end;  // of the collective
  std::atomic<bool> succeeded = false;
  Mutex mutex;
  std::vector<at::Tensor> tensors ABSL_GUARDED_BY(mutex);
};

// As WorkNCCL: complete for the host as soon as it is launched, by its future; isCompleted() asks
// the device.
class SimCommunicator::SimWork final : public c10d::Work {
 public:
  SimWork(std::shared_ptr<SimCommunicator> communicator, std::shared_ptr<Shelf> shelf,
          const SimCall& call)
      : Work(communicator->place_.rank, call.type),
        communicator_(std::move(communicator)),
        shelf_(std::move(shelf)),
        outputs_(call.outputs),
        blocks_host_(call.blocks_host) {
    if (!Accelerator().options().futures) return;
    const c10::StreamGuard guard(communicator_->stream());
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{communicator_->stream().device()});
    future_->markCompleted(outputs_);
  }

  bool isCompleted() override { return exception() != nullptr || shelf_->end.query(); }

  std::exception_ptr exception() const override {
    const std::string error = communicator_->error();
    if (shelf_->succeeded || error.empty()) return nullptr;
    return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, error));
  }

  void synchronize() override {
    shelf_->end.block(CurrentStreamOfWork());
    shelf_->Empty();
  }

  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (blocks_host_) {
      c10::impl::VirtualGuardImpl(kDevice).synchronizeStream(CurrentStreamOfWork());
    }
    return true;
  }

  std::vector<at::Tensor> result() override { return outputs_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_ ? future_ : Work::getFuture();
  }

 private:
  c10::Stream CurrentStreamOfWork() const {
    return c10::impl::VirtualGuardImpl(kDevice).getStream(communicator_->stream().device());
  }

  const std::shared_ptr<SimCommunicator> communicator_;
  const std::shared_ptr<Shelf> shelf_;
  std::vector<at::Tensor> outputs_;
  const bool blocks_host_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // null: DDP_SIM_FUTURES=0
};

struct SimCommunicator::Task {
  ~Task() {
    if (!communicator) return;
    MutexLock lock(communicator->mutex_);
    --communicator->left_;
    communicator->changed_.NotifyAll();
  }

  std::shared_ptr<SimCommunicator> communicator;  // not null: counted in `left_`
  std::shared_ptr<Shelf> shelf;
  std::string name;    // for error messages
  int64_t number = 0;  // of the collectives of this process
  uint64_t tag = 0;
  std::function<void(const SimCall::Exchange&)> run;
};

SimCommunicator::SimCommunicator(PeerSockets sockets, PeerSockets::Place place, c10::Stream stream)
    : place_(place), stream_(stream), sockets_(std::move(sockets)) {}

c10::intrusive_ptr<c10d::Work> SimCommunicator::Launch(SimCall call) {
  const auto shelf = std::make_shared<Shelf>(call);
  const auto task = std::make_shared<Task>();
  task->shelf = shelf;
  task->number = Accelerator().NextCollective();
  task->name =
      absl::StrCat("collective ", task->number, " (", c10d::opTypeToString(call.type), ")");
  task->run = std::move(call.run);
  {
    MutexLock lock(mutex_);
    task->communicator = shared_from_this();
    ++left_;
    const c10d::OpType type = c10d::isP2POp(call.type) ? c10d::OpType::SEND : call.type;
    task->tag = static_cast<uint64_t>(launched_++) << 8 | static_cast<uint64_t>(type);
    if (aborted_) C10_THROW_ERROR(DistBackendError, absl::StrCat(task->name, ": ", error_));
    DropFinished();
    shelves_.push_back(shelf);
  }
  const c10::impl::VirtualGuardImpl device(kDevice);
  c10::Event ready(kDevice);
  ready.record(device.getStream(stream_.device()));
  ready.block(stream_);
  const c10::StreamGuard guard(stream_);
  LaunchOn(stream_.device(), task->name, [task] { task->communicator->Run(*task); });
  shelf->end.record(stream_);
  return c10::make_intrusive<SimWork>(shared_from_this(), shelf, call);
}

void SimCommunicator::Run(const Task& task) {
  const absl::Duration watchdog = Accelerator().options().watchdog;
  const absl::Time deadline =
      watchdog > absl::ZeroDuration() ? MonotonicClock().Now() + watchdog : absl::InfiniteFuture();
  {
    MutexLock lock(mutex_);
    if (aborted_) return;
  }
  const absl::Status status = RunCall(task, deadline);
  task.shelf->succeeded = status.ok();
  if (!status.ok()) Hang(status, task, deadline);
}

absl::Status SimCommunicator::RunCall(const Task& task, absl::Time deadline) {
  const RuntimeOptions& options = Accelerator().options();
  if (options.on_collective) options.on_collective(task.number);
  if (task.number == options.fail_collective) {
    return absl::InternalError("it fails by DDP_SIM_FAIL_COLLECTIVE");
  }
  if (task.number == options.hang_collective) return absl::UnknownError("");
  const at::NoGradGuard no_grad;
  try {
    task.run([&](const std::vector<at::Tensor>& outgoing, const std::vector<at::Tensor>& incoming) {
      const absl::Status status = sockets_.Exchange(task.tag, Messages<const char>(outgoing),
                                                    Messages<char>(incoming), deadline);
      if (!status.ok()) throw CallEnded(status);
      if (outgoing[place_.rank].defined() && incoming[place_.rank].defined()) {
        incoming[place_.rank].copy_(outgoing[place_.rank]);
      }
    });
  } catch (const CallEnded& ended) {
    return ended.status;
  }
  return absl::OkStatus();
}

void SimCommunicator::Hang(const absl::Status& why, const Task& task, absl::Time deadline) {
  const bool fails = !absl::IsUnknown(why) && !absl::IsDeadlineExceeded(why);
  MutexLock lock(mutex_);
  if (fails && error_.empty()) error_ = absl::StrCat(task.name, " failed: ", why.message());
  while (!aborted_) {
    const absl::Duration left = deadline - MonotonicClock().Now();
    LOG_IF(FATAL, left <= absl::ZeroDuration())
        << task.name << " has lasted longer than DDP_SIM_WATCHDOG_MS allows";
    changed_.WaitFor(mutex_, left);
  }
}

void SimCommunicator::Abort() {
  {
    MutexLock lock(mutex_);
    if (aborted_) return;
    aborted_ = true;
    if (error_.empty()) error_ = "the communicator was aborted";
    changed_.NotifyAll();
  }
  sockets_.Abort();
}

bool SimCommunicator::AwaitIdle(absl::Duration timeout) {
  const absl::Time deadline = MonotonicClock().Now() + timeout;
  MutexLock lock(mutex_);
  while (left_ > 0) {
    const absl::Duration left = deadline - MonotonicClock().Now();
    if (left <= absl::ZeroDuration()) return false;
    changed_.WaitFor(mutex_, left);
  }
  return true;
}

std::string SimCommunicator::error() const {
  MutexLock lock(mutex_);
  return error_;
}

void SimCommunicator::DropFinished() {
  while (!shelves_.empty() && shelves_.front()->end.query()) shelves_.pop_front();
}

}  // namespace ddp::testing
