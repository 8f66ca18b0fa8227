// Length: one short method for each of c10d's operations. RankEngine does their work.

#include "ddp/comm/engine_backend/engine_backend.h"

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "ddp/comm/backend/gloo_backend.h"
#include "ddp/comm/engine_backend/engine_work.h"
#include "ddp/comm/hierarchical/gloo_link.h"
#include "ddp/comm/hierarchical/host_layout.h"
#include "ddp/comm/hierarchical/host_meeting.h"
#include "ddp/comm/hierarchical/rank_engine.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/meeting/c10d_group_store.h"
#include "ddp/comm/shared_memory/registered_memory.h"
#include "ddp/comm/shared_memory/tensor_reduction.h"
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
  static auto* const kept = new std::vector<EnginePtr>;
  if (engine->group()->in_forked_child()) {
    kept->push_back(engine);
    return;
  }
  const auto leave = [engine] { engine->Leave(); };
  // A continuation that ran on such a thread may have held the last reference.
  if (!engine->MustNotLeave()) return leave();
  try {
    std::thread(leave).detach();
  } catch (const std::exception& error) {  // the group ends with the process
    LOG(ERROR) << "a group cannot end without a thread: " << error.what();
    kept->push_back(engine);
  }
}

void CheckDense(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided,
                    "expected a dense tensor on the CPU");
}

void CheckOne(const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "expected one tensor, got ", tensors.size());
  CheckDense(tensors.front());
}

void CheckPairs(size_t outputs, size_t inputs) {
  TORCH_CHECK_VALUE(outputs == inputs, "expected an output for each input");
}

class EngineBackend final : public c10d::Backend {
 public:
  struct EngineOptions : Options {
    using Options::Options;
  };

  // `gloo` carries the messages between the ranks of several hosts; null on one host.
  EngineBackend(const EngineBackendOptions& options, EnginePtr engine, BackendPtr gloo)
      : Backend(options.rank, options.hosts.back().end),
        options_(c10::make_intrusive<EngineOptions>(options.name,
                                                    absl::ToChronoMilliseconds(options.timeout))),
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
  void set_driven() { hurries_ = false; }

  const std::string getBackendName() const override { return options_->backend; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    if (gloo_) gloo_->setTimeout(timeout);
  }
  void abort() override { (void)engine_->Abort(); }
  void shutdown() override { (void)engine_->Abort(); }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {  // NOLINT: c10d's type
    return AllocateRegistered(size, options);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  // ---- Reductions.

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (tensors.size() == 1 && tensors.front().defined() && tensors.front().is_sparse()) {
      return allreduce_sparse(tensors, options);
    }
    CheckOne(tensors);
    Batch batch{.type = c10d::OpType::ALLREDUCE, .results = tensors};
    AddInPlace(batch, {.kind = Kind::kAllReduce}, tensors.front(), options.reduceOp);
    return Launch(std::move(batch), options.timeout);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    Batch batch{.type = c10d::OpType::ALLREDUCE_COALESCED, .results = tensors};
    for (const at::Tensor& tensor : tensors) {
      AddInPlace(batch, {.kind = Kind::kAllReduce}, tensor, options.reduceOp);
    }
    return Launch(std::move(batch), options.timeout);
  }

  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    CheckOne(tensors);
    Batch batch{.type = c10d::OpType::REDUCE, .results = tensors};
    CollectiveRequest request{.kind = Kind::kReduce, .root = RootOf(options.rootRank)};
    if (rank_ == request.root) {
      AddInPlace(batch, std::move(request), tensors.front(), options.reduceOp);
    } else {
      Add(batch, std::move(request), tensors, {}, options.reduceOp);
    }
    return Launch(std::move(batch), options.timeout);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    CheckOne(outputs);
    TORCH_CHECK_VALUE(inputs.size() == 1, "expected one list of inputs");
    Batch batch{.type = c10d::OpType::REDUCE_SCATTER, .results = outputs};
    AddReduceScatter(batch, outputs.front(), inputs.front(), options.reduceOp);
    return Launch(std::move(batch), options.timeout);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    Batch batch{.type = c10d::OpType::_REDUCE_SCATTER_BASE, .results = {output}};
    AddReduceScatter(batch, output, PartsOf(input.contiguous()), options.reduceOp);
    return Launch(std::move(batch), options.timeout);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    CheckPairs(outputs.size(), inputs.size());
    Batch batch{.type = c10d::OpType::COALESCED, .results = outputs};
    for (size_t i = 0; i < inputs.size(); ++i) {
      AddReduceScatter(batch, outputs[i], PartsOf(inputs[i].contiguous()), options.reduceOp);
    }
    return Launch(std::move(batch), options.timeout);
  }

  // ---- Copies.

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    CheckOne(tensors);
    Batch batch{.type = c10d::OpType::BROADCAST, .results = tensors};
    const int root = RootOf(options.rootRank);
    Add(batch, {.kind = Kind::kBroadcast, .root = root, .elements = tensors.front().nbytes()},
        rank_ == root ? tensors : Tensors(), rank_ == root ? Tensors() : tensors);
    return Launch(std::move(batch), options.timeout);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    TORCH_CHECK_VALUE(outputs.size() == 1, "expected one list of outputs");
    CheckOne(inputs);
    Batch batch{.type = c10d::OpType::ALLGATHER, .results = outputs.front()};
    AddAllGather(batch, outputs.front(), inputs.front());
    return Launch(std::move(batch), options.timeout);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    Batch batch{.type = c10d::OpType::_ALLGATHER_BASE, .results = {output}};
    AddAllGather(batch, PartsOf(batch.DenseOut(output)), input);
    return Launch(std::move(batch), options.timeout);
  }

  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_),
                      "expected a list of outputs for each rank");
    Batch batch{.type = c10d::OpType::ALLGATHER_COALESCED};
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors parts;
      for (const Tensors& list : outputs) parts.push_back(list.at(i));
      AddAllGather(batch, parts, inputs[i]);
      batch.results.insert(batch.results.end(), parts.begin(), parts.end());
    }
    return Launch(std::move(batch), options.timeout);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    CheckPairs(outputs.size(), inputs.size());
    Batch batch{.type = c10d::OpType::COALESCED, .results = outputs};
    for (size_t i = 0; i < inputs.size(); ++i) {
      AddAllGather(batch, PartsOf(batch.DenseOut(outputs[i])), inputs[i]);
    }
    return Launch(std::move(batch), options.timeout);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    CheckOne(inputs);
    Batch batch{.type = c10d::OpType::GATHER};
    const int root = RootOf(options.rootRank);
    if (rank_ == root) {
      TORCH_CHECK_VALUE(outputs.size() == 1, "expected one list of outputs");
      CheckLike(outputs.front(), inputs.front());
      batch.results = outputs.front();
    }
    Add(batch, {.kind = Kind::kGather, .root = root, .elements = inputs.front().nbytes()}, inputs,
        batch.results);
    return Launch(std::move(batch), options.timeout);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    CheckOne(outputs);
    Batch batch{.type = c10d::OpType::SCATTER, .results = outputs};
    const int root = RootOf(options.rootRank);
    if (rank_ == root) {
      TORCH_CHECK_VALUE(inputs.size() == 1, "expected one list of inputs");
      CheckLike(inputs.front(), outputs.front());
    }
    Add(batch, {.kind = Kind::kScatter, .root = root, .elements = outputs.front().nbytes()},
        rank_ == root ? inputs.front() : Tensors(), outputs);
    return Launch(std::move(batch), options.timeout);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    Batch batch{.type = c10d::OpType::ALLTOALL, .results = outputs};
    return LaunchAllToAll(std::move(batch), outputs, inputs, options);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    Batch batch{.type = c10d::OpType::ALLTOALL_BASE, .results = {output}};
    const Tensors outputs = RowsOf(batch.DenseOut(output), output_sizes);
    return LaunchAllToAll(std::move(batch), outputs, RowsOf(input.contiguous(), input_sizes),
                          options);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    Batch batch{.type = c10d::OpType::BARRIER};
    batch.requests.push_back({.kind = Kind::kBarrier});
    return Launch(std::move(batch), options.timeout);
  }

  // A timeout names the ranks that have not come in every case.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) override {
    barrier(options)->wait(kNoTimeout);
  }

  // ---- Messages, and operations that are no collectives.

  WorkPtr StartOwn(CollectiveEngine::OwnProtocol protocol) {
    tag_.reset();
    return StartMessage({.type = c10d::OpType::ALLREDUCE}, [&](EngineWork&, Done done) {
      engine_->local().StartOwn(std::move(protocol), DefaultTimeout(), std::move(done));
    });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    if (gloo_) return StartGloo(tag, [&] { return gloo_->send(tensors, to, tag); });
    CheckOne(tensors);
    TORCH_CHECK_VALUE(RootOf(to) != rank_, "a rank cannot send to itself");
    Batch batch{.type = c10d::OpType::SEND, .results = tensors};
    const auto data = batch.In(tensors.front());
    return StartMessage(std::move(batch), [&](EngineWork&, Done done) {
      engine_->local().Send(to, static_cast<uint64_t>(tag), data, DefaultTimeout(),
                            std::move(done));
    });
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    if (gloo_) return StartGloo(tag, [&] { return gloo_->recv(tensors, from, tag); });
    TORCH_CHECK_VALUE(RootOf(from) != rank_, "a rank cannot receive from itself");
    return Receive(tensors, from, tag);
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    if (gloo_) return StartGloo(tag, [&] { return gloo_->recvAnysource(tensors, tag); });
    return Receive(tensors, -1, tag);
  }

 private:
  using Done = CollectiveEngine::Done;

  absl::Duration DefaultTimeout() const { return absl::FromChrono(options_->timeout); }

  int RootOf(int64_t root) const {
    TORCH_CHECK_VALUE(root >= 0 && root < size_, "there is no rank ", root, " among ", size_);
    return static_cast<int>(root);
  }
  void CheckLike(const Tensors& tensors, const at::Tensor& like) const;
  Tensors PartsOf(const at::Tensor& tensor) const;
  Tensors RowsOf(const at::Tensor& tensor, const std::vector<int64_t>& sizes) const;

  void Add(Batch& batch, CollectiveRequest request, const Tensors& inputs, const Tensors& outputs,
           const std::optional<c10d::ReduceOp>& op = std::nullopt) const;
  void AddInPlace(Batch& batch, CollectiveRequest request, const at::Tensor& tensor,
                  const c10d::ReduceOp& op) const;
  void Push(Batch& batch, CollectiveRequest request, const std::optional<c10d::ReduceOp>& op,
            size_t first_after) const;
  void AddAllGather(Batch& batch, const Tensors& outputs, const at::Tensor& input) const {
    CheckDense(input);
    CheckLike(outputs, input);
    Add(batch, {.kind = Kind::kAllGather, .elements = input.nbytes()}, {input}, outputs);
  }
  void AddReduceScatter(Batch& batch, const at::Tensor& output, const Tensors& inputs,
                        const c10d::ReduceOp& op) const {
    CheckDense(output);
    CheckLike(inputs, output);
    Add(batch, {.kind = Kind::kReduceScatter}, inputs, {output}, op);
  }
  WorkPtr LaunchAllToAll(Batch&& batch, const Tensors& outputs, const Tensors& inputs,
                         const c10d::AllToAllOptions& options);
  WorkPtr Launch(Batch&& batch, std::chrono::milliseconds timeout);

  // Starts an operation of the engine of one host that is no collective: start(work, done).
  template <typename Start>
  WorkPtr StartMessage(Batch&& batch, const Start& start) {
    auto work = c10::make_intrusive<EngineWork>(rank_, std::move(batch), 1, engine_, hurries_);
    start(*work, [work](const absl::Status& status) { work->EndOne(status); });
    return work;
  }
  WorkPtr StartGloo(int tag, const std::function<WorkPtr()>& start) const;
  WorkPtr Receive(Tensors& tensors, int from, int tag);

  const c10::intrusive_ptr<EngineOptions> options_;
  const EnginePtr engine_;
  const BackendPtr gloo_;
  std::optional<uint32_t> tag_;
  bool hurries_ = true;
  uint64_t sequence_ = 0;
};

void EngineBackend::CheckLike(const Tensors& tensors, const at::Tensor& like) const {
  TORCH_CHECK_VALUE(tensors.size() == static_cast<size_t>(size_), "expected ", size_,
                    " tensors, got ", tensors.size());
  for (const at::Tensor& tensor : tensors) {
    CheckDense(tensor);
    TORCH_CHECK_VALUE(tensor.numel() == like.numel() && tensor.scalar_type() == like.scalar_type(),
                      "expected tensors of ", like.numel(), " elements of ", like.scalar_type(),
                      ", got ", tensor.numel(), " of ", tensor.scalar_type());
  }
}

// Returns the parts of a contiguous tensor for the ranks, as views.
Tensors EngineBackend::PartsOf(const at::Tensor& tensor) const {
  CheckDense(tensor);
  TORCH_CHECK_VALUE(tensor.numel() % size_ == 0, "a tensor of ", tensor.numel(),
                    " elements has no equal parts for ", size_, " ranks");
  const int64_t part = tensor.numel() / size_;
  const at::Tensor flat = tensor.view({-1});
  Tensors parts;
  for (int rank = 0; rank < size_; ++rank) parts.push_back(flat.narrow(0, rank * part, part));
  return parts;
}

// The same, with the number of rows for each rank; equal parts where `sizes` is empty.
Tensors EngineBackend::RowsOf(const at::Tensor& tensor, const std::vector<int64_t>& sizes) const {
  if (sizes.empty()) return PartsOf(tensor);
  CheckDense(tensor);
  TORCH_CHECK_VALUE(
      sizes.size() == static_cast<size_t>(size_) && tensor.is_contiguous() && tensor.dim() > 0,
      "expected a contiguous tensor and a size for each of ", size_, " ranks");
  Tensors list;
  int64_t row = 0;
  for (const int64_t size : sizes) {
    list.push_back(tensor.narrow(0, row, size));
    row += size;
  }
  TORCH_CHECK_VALUE(row == tensor.size(0), "the sizes do not add up to the tensor");
  return list;
}

// Adds a collective with these tensors.
void EngineBackend::Add(Batch& batch, CollectiveRequest request, const Tensors& inputs,
                        const Tensors& outputs, const std::optional<c10d::ReduceOp>& op) const {
  const size_t first_after = batch.after.size();
  for (const at::Tensor& input : inputs) request.inputs.push_back(batch.In(input));
  for (const at::Tensor& output : outputs) request.outputs.push_back(batch.Out(output));
  Push(batch, std::move(request), op, first_after);
}

// Adds a reduction whose result replaces its input.
void EngineBackend::AddInPlace(Batch& batch, CollectiveRequest request, const at::Tensor& tensor,
                               const c10d::ReduceOp& op) const {
  CheckDense(tensor);
  const size_t first_after = batch.after.size();
  const std::span<std::byte> memory = batch.Out(tensor, /*with_contents=*/true);
  request.inputs = {memory};
  request.outputs = {memory};
  Push(batch, std::move(request), op, first_after);
}

// The last tensor that the batch keeps is one of the request; the output, if there is one. What
// comes after the request begins at `first_after`.
void EngineBackend::Push(Batch& batch, CollectiveRequest request,
                         const std::optional<c10d::ReduceOp>& op, size_t first_after) const {
  const at::Tensor& last = batch.kept.back();
  request.value_type = static_cast<uint8_t>(last.scalar_type());
  if (op.has_value()) {
    request.reduction = ReduceKindOf(op->op_, last.scalar_type());
    request.type = ElementTypeOf(last.scalar_type());
    request.factor = FactorOf(*op);
    request.elements = request.inputs.front().size() / SizeOf(request.type);
  }
  if (op.has_value() && op->op_ == c10d::ReduceOp::AVG && !request.outputs.empty()) {
    batch.after.insert(batch.after.begin() + static_cast<ptrdiff_t>(first_after),
                       [last, size = size_] { DivideSums(last, size); });
  }
  batch.requests.push_back(std::move(request));
}

WorkPtr EngineBackend::Launch(Batch&& batch, std::chrono::milliseconds timeout) {
  auto requests = std::move(batch.requests);
  auto work =
      c10::make_intrusive<EngineWork>(rank_, std::move(batch), requests.size(), engine_, hurries_);
  const std::optional<uint32_t> tag = std::exchange(tag_, std::nullopt);
  const absl::Duration limit =
      timeout == c10d::kUnsetTimeout ? DefaultTimeout() : absl::FromChrono(timeout);
  ++sequence_;
  for (CollectiveRequest& request : requests) {
    request.tag = tag;
    engine_->Start(std::move(request), limit,
                   [work](const absl::Status& status) { work->EndOne(status); });
  }
  return work;
}

WorkPtr EngineBackend::LaunchAllToAll(Batch&& batch, const Tensors& outputs, const Tensors& inputs,
                                      const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_) && inputs.size() == outputs.size(),
                    "expected an input and an output for each of ", size_, " ranks");
  for (const Tensors* const tensors : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *tensors) CheckDense(tensor);
  }
  Add(batch, {.kind = Kind::kAllToAll}, inputs, outputs);
  return Launch(std::move(batch), options.timeout);
}

// The tensors of all ranks, indices and values, are gathered and added by rank in the tree's order.
WorkPtr EngineBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  TORCH_CHECK_VALUE(tensors.size() == 1 && tensors.front().is_sparse() && tensors.front().is_cpu(),
                    "expected one sparse tensor on the CPU");
  const bool average = options.reduceOp.op_ == c10d::ReduceOp::AVG;
  TORCH_CHECK_VALUE(average || options.reduceOp.op_ == c10d::ReduceOp::SUM,
                    "sparse tensors can be summed or averaged only");
  const at::Tensor target = tensors.front();
  const at::Tensor mine = target.coalesce();
  Batch batch{.type = c10d::OpType::ALLREDUCE, .results = tensors};
  const auto parts = std::make_shared<Tensors>();
  CollectiveRequest request{.kind = Kind::kAllGatherSized};
  request.on_sizes = [parts](const std::vector<size_t>& sizes) {
    std::vector<std::span<std::byte>> memory;
    for (const size_t size : sizes) {
      parts->push_back(at::empty({static_cast<int64_t>(size)}, at::kByte));
      memory.push_back(BytesOf(parts->back()));
    }
    return memory;
  };
  Add(batch, std::move(request), {BytesOfSparse(mine)}, {});
  batch.after.emplace_back([target, mine, parts, average, size = size_] {
    at::Tensor sum = SumOfSparse(*parts, mine, 0, parts->size());
    if (average) sum = sum.div(size);
    target.copy_(sum);
  });
  return Launch(std::move(batch), options.timeout);
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

WorkPtr EngineBackend::Receive(Tensors& tensors, int from, int tag) {
  CheckOne(tensors);
  Batch batch{.type = from < 0 ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV,
              .results = tensors};
  const auto data = batch.Out(tensors.front());
  return StartMessage(std::move(batch), [&](EngineWork& work, Done done) {
    engine_->local().Receive(from, static_cast<uint64_t>(tag), data, work.source(),
                             DefaultTimeout(), std::move(done));
  });
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
  const std::shared_ptr<GroupStore> keys = MakeGroupStore(store);
  auto entry = one_host ? GroupEntry::Run(*keys, {.member = layout.member(),
                                                  .size = layout.ranks(),
                                                  .timeout = options.connect_timeout})
                        : ShareMemory(*keys, *MakeGroupStore(Prefixed(HostPrefix(layout), store)),
                                      layout, options.connect_timeout);
  if (!entry.ok()) return entry.status();
  auto group = std::make_shared<HostGroup>(*std::move(entry));
  BackendPtr gloo;
  if (!one_host) {
    gloo = MakeGlooBackend(Prefixed(kGlooPrefix, store), {.rank = options.rank,
                                                          .size = layout.ranks(),
                                                          .timeout = options.connect_timeout,
                                                          .single_host = options.over_loopback});
    gloo->setTimeout(absl::ToChronoMilliseconds(options.timeout));
  }
  auto engine = std::make_shared<RankEngine>(
      layout, std::move(group), one_host ? nullptr : std::make_unique<GlooLink>(gloo),
      HierarchicalEngine::Options{.deterministic = options.deterministic});
  return c10::make_intrusive<EngineBackend>(options, std::move(engine), std::move(gloo));
}

std::vector<std::string> EngineBackendKeys(int size, bool one_host) {
  if (one_host) return GroupEntry::Keys();
  std::vector<std::string> keys = ShareMemoryKeys(size);
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
                    absl::Time deadline) {
    Cast(backend).set_driven();
    return Cast(backend).engine().Drive(stop, deadline);
  };
  traits.waker = [](c10d::Backend& backend) { return Cast(backend).Waker(); };
  traits.abort = [](c10d::Backend& backend) { return Cast(backend).engine().Abort(); };
  traits.allocates_shared = true;
  traits.dead_rank = [](c10d::Backend& backend) { return Cast(backend).engine().dead_rank(); };
}

}  // namespace ddp::internal
