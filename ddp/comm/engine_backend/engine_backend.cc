#include "ddp/comm/engine_backend/engine_backend.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "ddp/comm/backend/gloo_backend.h"
#include "ddp/comm/backend/operation_fault.h"
#include "ddp/comm/hierarchical/gloo_link.h"
#include "ddp/comm/hierarchical/host_layout.h"
#include "ddp/comm/hierarchical/rank_engine.h"
#include "ddp/comm/host_group/group_entry.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/meeting/c10d_group_store.h"
#include "ddp/comm/shared_memory/registered_memory.h"
#include "ddp/comm/shared_memory/tensor_reduction.h"
#include "ddp/common/keep_forever.h"
#include "ddp/common/logging.h"

namespace ddp::internal {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using EnginePtr = std::shared_ptr<RankEngine>;
using Kind = CollectiveRequest::Kind;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Leaves a group that the backend is no longer a part of.
void Leave(const EnginePtr& engine) {
  // A forked child has none of the threads that the destructors join.
  if (engine->group()->in_forked_child()) return KeepForever(engine);
  const auto leave = [engine] { engine->Leave(); };
  // A continuation that ran on such a thread may have held the last reference.
  if (!engine->MustNotLeave()) return leave();
  try {
    std::thread(leave).detach();
  } catch (const std::exception& error) {  // the group ends with the process
    LOG(ERROR) << "a group cannot end without a thread: " << error.what();
    KeepForever(engine);
  }
}

void CheckDense(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
                        tensor.is_contiguous(),
                    "expected a dense, contiguous tensor on the CPU");
}

void CheckOne(const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "expected one tensor, got ", tensors.size());
  CheckDense(tensors.front());
}

std::exception_ptr ErrorOf(const absl::Status& status) {
  const c10::SourceLocation here = {__func__, __FILE__, __LINE__};
  const std::string text(status.message());
  if (absl::IsAborted(status)) return std::make_exception_ptr(PeerAbortedError(here, text));
  if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) {
    return std::make_exception_ptr(c10::DistNetworkError(here, text));
  }
  return std::make_exception_ptr(c10::DistBackendError(here, text));
}

// The Work of one operation of an engine. Thread-safe.
class EngineWork final : public c10d::Work {
 public:
  struct Operation {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    Tensors results;               // of the future
    Tensors inputs;                // kept until the end
    std::function<void()> finish;  // on success, before the end; may be null
  };

  EngineWork(int rank, Operation operation, std::weak_ptr<RankEngine> engine)
      : Work(rank, operation.type), operation_(std::move(operation)), engine_(std::move(engine)) {}

  bool isCompleted() override {
    if (done()) return true;
    if (const auto engine = engine_.lock()) engine->Poll();
    return done();
  }
  bool isSuccess() const override { return done() && !future_->hasError(); }
  std::exception_ptr exception() const override {
    return done() && future_->hasError() ? future_->exception_ptr() : nullptr;
  }
  Tensors result() override { return operation_.results; }

  // Blocks, and does the work on this thread. Throws a kind of c10::DistError (see
  // operation_fault.h) when the operation fails or `timeout` passes; a timeout leaves the operation
  // as it is.
  bool wait(std::chrono::milliseconds timeout) override {
    if (const auto engine = engine_.lock(); engine && !done()) {
      engine->Drive([this] { return done(); },
                    timeout == kNoTimeout ? absl::InfiniteFuture()
                                          : MonotonicClock().Now() + absl::FromChrono(timeout));
    }
    if (!done()) {
      std::rethrow_exception(
          ErrorOf(absl::DeadlineExceededError("Timed out: the wait for an operation")));
    }
    if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
    return true;
  }
  void synchronize() override {}
  void abort() override {
    if (const auto engine = engine_.lock()) engine->Abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  // To be called once, when the operation has ended, by the engine's thread of the moment.
  void End(absl::Status status) {
    if (status.ok() && operation_.finish) {
      const at::NoGradGuard no_grad;
      try {
        operation_.finish();
      } catch (const std::exception& error) {
        status = absl::InternalError(error.what());
      }
    }
    operation_.finish = nullptr;  // frees its captures before the future is complete
    operation_.inputs.clear();
    if (status.ok()) {
      future_->markCompleted(operation_.results);
    } else {
      future_->setError(ErrorOf(status));
    }
  }

 private:
  bool done() const { return future_->completed(); }

  Operation operation_;  // `results` are constant
  const std::weak_ptr<RankEngine> engine_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
};

// Returns a reduction of `bytes` of elements like those of `tensor`.
CollectiveRequest Reduction(Kind kind, const at::Tensor& tensor, size_t bytes,
                            const c10d::ReduceOp& op) {
  const ElementType type = ElementTypeOf(tensor.scalar_type());
  return {.kind = kind,
          .reduction = ReduceKindOf(op.op_, type),
          .type = type,
          .elements = bytes / SizeOf(type)};
}

class EngineBackend final : public c10d::Backend {
 public:
  // `gloo` carries the messages between the ranks of several hosts; null on one host.
  EngineBackend(const EngineBackendOptions& options, EnginePtr engine, BackendPtr gloo)
      : Backend(options.rank, options.hosts.back().end),
        name_(options.name),
        timeout_(options.timeout),
        engine_(std::move(engine)),
        gloo_(std::move(gloo)) {}

  ~EngineBackend() override { Leave(engine_); }

  RankEngine& engine() { return *engine_; }
  std::function<void()> Waker() {
    return [weak = std::weak_ptr<RankEngine>(engine_)] {
      if (const auto engine = weak.lock()) engine->Wake();
    };
  }
  void set_tag(uint32_t tag) { tag_ = tag; }

  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = absl::FromChrono(timeout);
    if (gloo_) gloo_->setTimeout(timeout);
  }
  void abort() override { (void)engine_->Abort(); }
  void shutdown() override { (void)engine_->Abort(); }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {  // NOLINT: c10d's type
    return AllocateRegistered(size, options);
  }

  // ---- Collectives.

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (tensors.size() == 1 && tensors.front().defined() && tensors.front().is_sparse()) {
      return allreduce_sparse(tensors, options);
    }
    CheckOne(tensors);
    const std::span<std::byte> memory = BytesOf(tensors.front());
    CollectiveRequest request =
        Reduction(Kind::kAllReduce, tensors.front(), memory.size(), options.reduceOp);
    request.inputs = {memory};
    request.outputs = {memory};
    return Launch({.type = c10d::OpType::ALLREDUCE, .results = tensors}, std::move(request),
                  options.timeout);
  }

  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    CheckParts(input, output);
    CollectiveRequest request =
        Reduction(Kind::kReduceScatter, output, output.nbytes(), options.reduceOp);
    for (const auto part : PartsOf(input, {})) request.inputs.push_back(part);
    request.outputs = {BytesOf(output)};
    return Launch(
        {.type = c10d::OpType::_REDUCE_SCATTER_BASE, .results = {output}, .inputs = {input}},
        std::move(request), options.timeout);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    CheckOne(tensors);
    const std::span<std::byte> memory = BytesOf(tensors.front());
    CollectiveRequest request{
        .kind = Kind::kBroadcast, .root = CheckedRank(options.rootRank), .elements = memory.size()};
    if (rank_ == request.root) {
      request.inputs = {memory};
    } else {
      request.outputs = {memory};
    }
    return Launch({.type = c10d::OpType::BROADCAST, .results = tensors}, std::move(request),
                  options.timeout);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    CheckParts(output, input);
    CollectiveRequest request{
        .kind = Kind::kAllGather, .elements = input.nbytes(), .inputs = {BytesOf(input)}};
    for (const auto part : PartsOf(output, {})) request.outputs.push_back(part);
    return Launch({.type = c10d::OpType::_ALLGATHER_BASE, .results = {output}, .inputs = {input}},
                  std::move(request), options.timeout);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    CollectiveRequest request{.kind = Kind::kAllToAll};
    for (const auto part : PartsOf(input, input_sizes)) request.inputs.push_back(part);
    for (const auto part : PartsOf(output, output_sizes)) request.outputs.push_back(part);
    return Launch({.type = c10d::OpType::ALLTOALL_BASE, .results = {output}, .inputs = {input}},
                  std::move(request), options.timeout);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return Launch({.type = c10d::OpType::BARRIER}, {.kind = Kind::kBarrier}, options.timeout);
  }

  // ---- Messages, and operations that are no collectives.

  WorkPtr StartOwn(CollectiveEngine::OwnProtocol protocol) {
    tag_.reset();
    return Start({.type = c10d::OpType::ALLREDUCE}, [&](Done done) {
      engine_->local().StartOwn(std::move(protocol), timeout_, std::move(done));
    });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    if (gloo_) return StartGloo(tag, [&] { return gloo_->send(tensors, to, tag); });
    CheckOne(tensors);
    TORCH_CHECK_VALUE(CheckedRank(to) != rank_, "a rank cannot send to itself");
    return Start({.type = c10d::OpType::SEND, .results = tensors}, [&](Done done) {
      engine_->local().Send(to, static_cast<uint64_t>(tag), BytesOf(tensors.front()), timeout_,
                            std::move(done));
    });
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    if (gloo_) return StartGloo(tag, [&] { return gloo_->recv(tensors, from, tag); });
    CheckOne(tensors);
    TORCH_CHECK_VALUE(CheckedRank(from) != rank_, "a rank cannot receive from itself");
    return Start({.type = c10d::OpType::RECV, .results = tensors}, [&](Done done) {
      engine_->local().Receive(from, static_cast<uint64_t>(tag), BytesOf(tensors.front()), timeout_,
                               std::move(done));
    });
  }

 private:
  using Done = CollectiveEngine::Done;
  using Parts = std::vector<std::span<std::byte>>;

  int CheckedRank(int64_t rank) const {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "there is no rank ", rank, " among ", size_);
    return static_cast<int>(rank);
  }
  void CheckParts(const at::Tensor& whole, const at::Tensor& part) const;
  Parts PartsOf(const at::Tensor& tensor, const std::vector<int64_t>& rows) const;

  // Starts an operation of an engine: begin(done).
  template <typename Begin>
  WorkPtr Start(EngineWork::Operation operation, const Begin& begin) {
    auto work = c10::make_intrusive<EngineWork>(rank_, std::move(operation), engine_);
    begin([work](const absl::Status& status) { work->End(status); });
    return work;
  }
  WorkPtr Launch(EngineWork::Operation operation, CollectiveRequest request,
                 std::chrono::milliseconds timeout);
  WorkPtr StartGloo(int tag, const std::function<WorkPtr()>& start) const;

  const std::string name_;
  absl::Duration timeout_;  // of an operation that has none of its own
  const EnginePtr engine_;
  const BackendPtr gloo_;
  std::optional<uint32_t> tag_;
};

// The whole consists of a part for each rank.
void EngineBackend::CheckParts(const at::Tensor& whole, const at::Tensor& part) const {
  CheckDense(whole);
  CheckDense(part);
  TORCH_CHECK_VALUE(
      whole.numel() == size_ * part.numel() && whole.scalar_type() == part.scalar_type(),
      "expected ", size_ * part.numel(), " elements of ", part.scalar_type(), ", got ",
      whole.numel(), " of ", whole.scalar_type());
}

// Returns the memory of the parts for the ranks: of equal parts, or of `rows` rows for each.
EngineBackend::Parts EngineBackend::PartsOf(const at::Tensor& tensor,
                                            const std::vector<int64_t>& rows) const {
  CheckDense(tensor);
  const std::span<std::byte> memory = BytesOf(tensor);
  if (rows.empty()) {
    TORCH_CHECK_VALUE(tensor.numel() % size_ == 0, "a tensor of ", tensor.numel(),
                      " elements has no equal parts for ", size_, " ranks");
  } else {
    TORCH_CHECK_VALUE(rows.size() == static_cast<size_t>(size_) && tensor.dim() > 0,
                      "expected a tensor with rows, and a size for each of ", size_, " ranks");
    TORCH_CHECK_VALUE(
        std::ranges::min(rows) >= 0 && std::reduce(rows.begin(), rows.end()) == tensor.size(0),
        "the sizes do not add up to the tensor");
  }
  const int64_t all = rows.empty() ? size_ : tensor.size(0);
  const size_t row = all == 0 ? 0 : memory.size() / static_cast<size_t>(all);
  Parts parts;
  size_t begin = 0;
  for (int rank = 0; rank < size_; ++rank) {
    const size_t bytes = row * static_cast<size_t>(rows.empty() ? 1 : rows[rank]);
    parts.push_back(memory.subspan(begin, bytes));
    begin += bytes;
  }
  return parts;
}

WorkPtr EngineBackend::Launch(EngineWork::Operation operation, CollectiveRequest request,
                              std::chrono::milliseconds timeout) {
  request.tag = std::exchange(tag_, std::nullopt);
  const absl::Duration limit =
      timeout == c10d::kUnsetTimeout ? timeout_ : absl::FromChrono(timeout);
  return Start(std::move(operation),
               [&](Done done) { engine_->Start(std::move(request), limit, std::move(done)); });
}

// The tensors of all ranks, indices and values, are gathered and added by rank in the tree's order.
WorkPtr EngineBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  TORCH_CHECK_VALUE(tensors.size() == 1 && tensors.front().is_sparse() && tensors.front().is_cpu(),
                    "expected one sparse tensor on the CPU");
  TORCH_CHECK_VALUE(options.reduceOp.op_ == c10d::ReduceOp::SUM, "sparse tensors are summed only");
  const at::Tensor target = tensors.front();
  const at::Tensor mine = target.coalesce();
  const at::Tensor bytes = BytesOfSparse(mine);
  const auto parts = std::make_shared<Tensors>();
  CollectiveRequest request{.kind = Kind::kAllGatherSized, .inputs = {BytesOf(bytes)}};
  request.on_sizes = [parts](const std::vector<size_t>& sizes) {
    Parts memory;
    for (const size_t size : sizes) {
      parts->push_back(at::empty({static_cast<int64_t>(size)}, at::kByte));
      memory.push_back(BytesOf(parts->back()));
    }
    return memory;
  };
  const auto add = [target, mine, parts] {
    target.copy_(SumOfSparse(*parts, mine, 0, parts->size()));
  };
  return Launch(
      {.type = c10d::OpType::ALLREDUCE, .results = tensors, .inputs = {bytes}, .finish = add},
      std::move(request), options.timeout);
}

// Starts a message between ranks of several hosts. Greater tags are those of the engine's messages.
WorkPtr EngineBackend::StartGloo(int tag, const std::function<WorkPtr()>& start) const {
  TORCH_CHECK_VALUE(tag >= 0 && tag < GlooLink::kFirstTag,
                    "between hosts the tag of a message is less than ", GlooLink::kFirstTag,
                    ", got ", tag);
  BackendTraits traits;
  AddGlooTraits(traits);
  MutexLock lock(*traits.launch_mutex);
  return start();
}

EngineBackend& Cast(c10d::Backend& backend) { return static_cast<EngineBackend&>(backend); }

StorePtr Prefixed(const std::string& prefix, const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

constexpr char kGlooPrefix[] = "hosts";

}  // namespace

absl::StatusOr<BackendPtr> MakeEngineBackend(const StorePtr& store,
                                             const EngineBackendOptions& options) {
  const HostLayout layout(options.hosts, options.rank);
  const bool one_host = layout.host_count() == 1;
  auto group = GroupEntry::Run(*MakeGroupStore(store), {.member = layout.member(),
                                                        .size = layout.local().size(),
                                                        .first_rank = layout.local().begin,
                                                        .ranks = layout.ranks(),
                                                        .timeout = options.connect_timeout});
  if (!group.ok()) return group.status();
  BackendPtr gloo;
  if (!one_host) {
    gloo = MakeGlooBackend(Prefixed(kGlooPrefix, store), {.rank = options.rank,
                                                          .size = layout.ranks(),
                                                          .timeout = options.connect_timeout,
                                                          .single_host = options.over_loopback});
    gloo->setTimeout(absl::ToChronoMilliseconds(options.timeout));
  }
  auto engine = std::make_shared<RankEngine>(
      layout, *std::move(group), one_host ? nullptr : std::make_unique<GlooLink>(gloo),
      HierarchicalEngine::Options{.deterministic = options.deterministic});
  return c10::make_intrusive<EngineBackend>(options, std::move(engine), std::move(gloo));
}

std::vector<std::string> EngineBackendKeys(int size, bool one_host) {
  std::vector<std::string> keys = GroupEntry::Keys(size);
  if (one_host) return keys;
  for (const std::string& key : GlooKeys(size)) {
    keys.push_back(absl::StrCat(kGlooPrefix, "/", key));
  }
  return keys;
}

bool IsEngineBackend(const c10d::Backend& backend) {
  return dynamic_cast<const EngineBackend*>(&backend) != nullptr;
}

std::shared_ptr<HostGroup> OneHostGroupOf(c10d::Backend& backend) {
  if (!IsEngineBackend(backend) || !Cast(backend).engine().has_one_host()) return nullptr;
  return Cast(backend).engine().group();
}

WorkPtr StartOwn(c10d::Backend& backend, CollectiveEngine::OwnProtocol protocol) {
  return Cast(backend).StartOwn(std::move(protocol));
}

void AddEngineTraits(BackendTraits& traits) {
  traits.set_tag = [](c10d::Backend& backend, uint32_t tag) { Cast(backend).set_tag(tag); };
  traits.drive = [](c10d::Backend& backend, const std::function<bool()>& stop,
                    absl::Time deadline) { return Cast(backend).engine().Drive(stop, deadline); };
  traits.waker = [](c10d::Backend& backend) { return Cast(backend).Waker(); };
  traits.abort = [](c10d::Backend& backend) { return Cast(backend).engine().Abort(); };
  traits.allocates_shared = true;
  traits.dead_rank = [](c10d::Backend& backend) { return Cast(backend).engine().dead_rank(); };
}

}  // namespace ddp::internal
