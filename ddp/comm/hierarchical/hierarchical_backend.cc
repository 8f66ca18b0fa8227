// Length: one short method for each of c10d's operations. HierarchicalEngine and FlatExchange do
// their work, on the thread of CollectiveQueue.

#include "ddp/comm/hierarchical/hierarchical_backend.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "ddp/comm/backend/gloo_backend.h"
#include "ddp/comm/hierarchical/collective_queue.h"
#include "ddp/comm/hierarchical/flat_exchange.h"
#include "ddp/comm/hierarchical/gloo_link.h"
#include "ddp/comm/hierarchical/hierarchical_engine.h"
#include "ddp/comm/hierarchical/host_layout.h"
#include "ddp/comm/hierarchical/host_meeting.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/meeting/c10d_group_store.h"
#include "ddp/comm/shared_memory/collective_engine.h"
#include "ddp/comm/shared_memory/registered_memory.h"
#include "ddp/comm/shared_memory/tensor_reduction.h"
#include "ddp/common/logging.h"

namespace ddp::internal {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

std::exception_ptr ExceptionOf(const absl::Status& status) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, __LINE__}, std::string(status.message())));
}

// A collective of the backend. Thread-safe.
class HierarchicalWork final : public c10d::Work {
 public:
  HierarchicalWork(int rank, c10d::OpType type, Tensors results)
      : Work(rank, type),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  void Complete(const absl::Status& status) {
    if (status.ok()) {
      finish();
      future_->markCompleted(c10::IValue(results_));
      return;
    }
    const std::exception_ptr error = ExceptionOf(status);
    finish(error);
    future_->setErrorIfNeeded(error);
  }

 private:
  const Tensors results_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The parts below the operations. The last one is destroyed first.
struct Parts {
  Parts(const HierarchicalOptions& options, std::unique_ptr<HostGroup> members,
        BackendPtr all_ranks, BackendPtr between_hosts)
      : group(std::move(members)),
        flat(std::move(all_ranks)),
        hosts(std::move(between_hosts)),
        local(group.get()),
        link(hosts),
        exchange(flat),
        engine(HostLayout(options.hosts, options.rank), &local,
               options.hosts.size() > 1 ? &link : nullptr,
               {.deterministic = options.deterministic}),
        queue(
            {.group = group.get(), .local = &local, .engine = &engine, .close_connections = [this] {
               CloseConnections();
             }}) {}

  void CloseConnections() {
    GlooTraits().end_operations(*flat);
    GlooTraits().end_operations(*hosts);
    exchange.End();
    link.End();
  }

  const std::unique_ptr<HostGroup> group;
  const BackendPtr flat;   // Gloo over all ranks
  const BackendPtr hosts;  // Gloo for the link
  CollectiveEngine local;
  GlooLink link;  // of the queue's thread, and so are the next two
  FlatExchange exchange;
  HierarchicalEngine engine;
  CollectiveQueue queue;
};

class HierarchicalBackend final : public c10d::Backend {
 public:
  struct HierarchicalBackendOptions : Options {
    explicit HierarchicalBackendOptions(std::chrono::milliseconds timeout)
        : Options(kHierarchicalName, timeout) {}
  };

  HierarchicalBackend(const HierarchicalOptions& options, std::unique_ptr<Parts> parts)
      : Backend(options.rank, options.hosts.back().end),
        options_(c10::make_intrusive<HierarchicalBackendOptions>(
            absl::ToChronoMilliseconds(options.timeout))),
        parts_(std::move(parts)) {}

  ~HierarchicalBackend() override {
    // LibTorch's Gloo joins its threads, which a forked child does not have.
    if (parts_->group->in_forked_child()) {
      (void)parts_.release();
      return;
    }
    if (!parts_->queue.OnThread()) return;
    // A continuation on the queue's thread has held the last reference.
    (void)parts_->queue.Abort();
    const auto parts = std::make_shared<std::unique_ptr<Parts>>(std::move(parts_));
    try {
      std::thread([parts] { parts->reset(); }).detach();
    } catch (const std::exception& error) {  // the group ends with the process
      LOG(ERROR) << "a group of several hosts cannot end without a thread: " << error.what();
      (void)parts->release();
    }
  }

  bool Abort() { return parts_->queue.Abort(); }
  void set_tag(uint32_t tag) { tag_ = tag; }
  int dead_rank() const {
    const HostGroup::End end = parts_->group->end();
    const int first = parts_->engine.layout().local().begin;
    return end.kind == GroupEnd::kDied ? first + end.member : -1;
  }

  const std::string getBackendName() const override { return kHierarchicalName; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    parts_->flat->setTimeout(timeout);
  }
  void abort() override { (void)Abort(); }
  void shutdown() override { (void)Abort(); }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {  // NOLINT: c10d's type
    return AllocateRegistered(size, options);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

 private:
  // An operation before its start.
  struct Call {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    Tensors sized = {};  // the tensors whose sizes all ranks have in common
    int root = -1;
    std::optional<c10d::ReduceOp> op = {};
    Tensors results = {};
    std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
    std::function<absl::Status(absl::Time deadline)> run = {};
    std::vector<std::pair<at::Tensor, at::Tensor>> copies = {};  // after `run`: from, to

    // Returns the tensor, or one without gaps whose contents come into the tensor at the end.
    at::Tensor Dense(const at::Tensor& output) {
      CheckDense(output);
      if (output.is_contiguous()) return output;
      const at::Tensor dense = at::empty(output.sizes(), output.options());
      copies.emplace_back(dense, output);
      return dense;
    }
  };

  static void CheckDense(const at::Tensor& tensor);
  static void CheckOne(const Tensors& tensors);
  void CheckLike(const Tensors& tensors, const at::Tensor& like) const;
  void CheckRoot(int64_t root) const;
  Tensors PartsOf(const at::Tensor& tensor) const;

  WorkPtr Start(Call call);
  WorkPtr StartSums(Call call, const Tensors& tensors);
  WorkPtr StartGathers(Call call, const std::vector<Tensors>& outputs, const Tensors& inputs);
  WorkPtr StartReduceScatters(Call call, const Tensors& outputs,
                              const std::vector<Tensors>& inputs);
  WorkPtr StartAllToAll(Call call, const Tensors& outputs, const Tensors& inputs);
  absl::Status Sum(const at::Tensor& dense, const c10d::ReduceOp& op, absl::Time deadline);
  absl::Status Gather(const at::Tensor& input, const Tensors& outputs, absl::Time deadline);
  const c10::intrusive_ptr<HierarchicalBackendOptions> options_;
  std::unique_ptr<Parts> parts_;
  std::optional<uint32_t> tag_;
  uint64_t sequence_ = 0;
};

WorkPtr HierarchicalBackend::Start(Call call) {
  auto work = c10::make_intrusive<HierarchicalWork>(rank_, call.type, call.results);
  CollectiveQueue::Collective collective;
  collective.run = [run = std::move(call.run),
                    copies = std::move(call.copies)](absl::Time deadline) -> absl::Status {
    const at::NoGradGuard no_grad;
    try {
      DDP_RETURN_IF_ERROR(run(deadline));
      for (const auto& [from, to] : copies) to.copy_(from);
      return absl::OkStatus();
    } catch (const std::exception& error) {
      return StatusOf(error);
    }
  };
  collective.done = [work](const absl::Status& status) {
    const at::NoGradGuard no_grad;
    work->Complete(status);
  };
  collective.deadline =
      MonotonicClock().Now() +
      absl::FromChrono(call.timeout == c10d::kUnsetTimeout ? options_->timeout : call.timeout);
  CollectiveHeader& header = collective.header;
  header.operation = static_cast<uint8_t>(call.type);
  header.root = call.root;
  if (call.op.has_value()) {
    header.reduction = static_cast<uint8_t>(call.op->op_);
    header.factor = FactorOf(*call.op);
  }
  for (const at::Tensor& tensor : call.sized) {
    const auto count = static_cast<uint64_t>(tensor.numel());
    header.elements += count;
    header.sizes = header.sizes * 0x9e3779b97f4a7c15 + count + 1;
    header.value_type = static_cast<uint8_t>(tensor.scalar_type());
  }
  const std::optional<uint32_t> tag = std::exchange(tag_, std::nullopt);
  header.tagged = tag.has_value() ? 1 : 0;
  header.tag = tag.value_or(0);
  ++sequence_;
  parts_->queue.Push(std::move(collective));
  return work;
}

// ---- Checks.

void HierarchicalBackend::CheckDense(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided,
                    "expected a dense tensor on the CPU");
}

void HierarchicalBackend::CheckOne(const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "expected one tensor, got ", tensors.size());
  CheckDense(tensors.front());
}

void HierarchicalBackend::CheckLike(const Tensors& tensors, const at::Tensor& like) const {
  TORCH_CHECK_VALUE(tensors.size() == static_cast<size_t>(size_), "expected ", size_,
                    " tensors, got ", tensors.size());
  for (const at::Tensor& tensor : tensors) {
    CheckDense(tensor);
    TORCH_CHECK_VALUE(tensor.numel() == like.numel() && tensor.scalar_type() == like.scalar_type(),
                      "expected tensors of ", like.numel(), " elements of ", like.scalar_type(),
                      ", got ", tensor.numel(), " of ", tensor.scalar_type());
  }
}

void HierarchicalBackend::CheckRoot(int64_t root) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, "there is no rank ", root, " among ", size_);
}

// Returns the parts of a tensor for the ranks: views, when it has no gaps.
Tensors HierarchicalBackend::PartsOf(const at::Tensor& tensor) const {
  CheckDense(tensor);
  TORCH_CHECK_VALUE(tensor.numel() % size_ == 0, "a tensor of ", tensor.numel(),
                    " elements has no equal parts for ", size_, " ranks");
  const int64_t part = tensor.numel() / size_;
  const at::Tensor flat = tensor.reshape({-1});
  Tensors parts;
  for (int rank = 0; rank < size_; ++rank) parts.push_back(flat.narrow(0, rank * part, part));
  return parts;
}

// ---- Reductions.

// Puts the sum, or what `op` is, of all ranks into a tensor without gaps.
absl::Status HierarchicalBackend::Sum(const at::Tensor& dense, const c10d::ReduceOp& op,
                                      absl::Time deadline) {
  const at::ScalarType type = dense.scalar_type();
  DDP_RETURN_IF_ERROR(parts_->engine.AllReduce(BytesOf(dense), ReduceKindOf(op.op_, type),
                                               ElementTypeOf(type), FactorOf(op), deadline));
  if (op.op_ == c10d::ReduceOp::AVG) DivideSums(dense, size_);
  return absl::OkStatus();
}

// Checks here what would throw on the thread.
void CheckReduction(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  (void)ReduceKindOf(op.op_, tensor.scalar_type());
  (void)ElementTypeOf(tensor.scalar_type());
  (void)FactorOf(op);
}

WorkPtr HierarchicalBackend::StartSums(Call call, const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) {
    CheckDense(tensor);
    CheckReduction(tensor, *call.op);
  }
  call.sized = tensors;
  call.results = tensors;
  call.run = [this, tensors, op = *call.op](absl::Time deadline) {
    for (const at::Tensor& tensor : tensors) {
      const at::Tensor dense = tensor.contiguous();
      DDP_RETURN_IF_ERROR(Sum(dense, op, deadline));
      if (!dense.is_same(tensor)) tensor.copy_(dense);
    }
    return absl::OkStatus();
  };
  return Start(std::move(call));
}

WorkPtr HierarchicalBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors.front().defined() && tensors.front().is_sparse()) {
    return allreduce_sparse(tensors, options);
  }
  CheckOne(tensors);
  return StartSums(
      {.type = c10d::OpType::ALLREDUCE, .op = options.reduceOp, .timeout = options.timeout},
      tensors);
}

WorkPtr HierarchicalBackend::allreduce_coalesced(Tensors& tensors,
                                                 const c10d::AllreduceCoalescedOptions& options) {
  return StartSums({.type = c10d::OpType::ALLREDUCE_COALESCED,
                    .op = options.reduceOp,
                    .timeout = options.timeout},
                   tensors);
}

WorkPtr HierarchicalBackend::allreduce_sparse(Tensors& tensors,
                                              const c10d::AllreduceOptions& options) {
  TORCH_CHECK_VALUE(tensors.size() == 1 && tensors.front().is_sparse() && tensors.front().is_cpu(),
                    "expected one sparse tensor on the CPU");
  const bool average = options.reduceOp.op_ == c10d::ReduceOp::AVG;
  TORCH_CHECK_VALUE(average || options.reduceOp.op_ == c10d::ReduceOp::SUM,
                    "sparse tensors can be summed or averaged only");
  const at::Tensor target = tensors.front();
  return Start({.type = c10d::OpType::_ALLREDUCE_SPARSE,
                .op = options.reduceOp,
                .results = tensors,
                .timeout = options.timeout,
                .run = [this, target, average](absl::Time deadline) {
                  return parts_->exchange.SumSparse(target, average, deadline);
                }});
}

// All ranks reduce, and the root keeps the result.
WorkPtr HierarchicalBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  CheckOne(tensors);
  CheckRoot(options.rootRank);
  CheckReduction(tensors.front(), options.reduceOp);
  const bool is_root = rank_ == options.rootRank;
  return Start({.type = c10d::OpType::REDUCE,
                .sized = tensors,
                .root = static_cast<int>(options.rootRank),
                .op = options.reduceOp,
                .results = tensors,
                .timeout = options.timeout,
                .run = [this, tensor = tensors.front(), op = options.reduceOp,
                        is_root](absl::Time deadline) {
                  const at::Tensor dense = tensor.clone(at::MemoryFormat::Contiguous);
                  DDP_RETURN_IF_ERROR(Sum(dense, op, deadline));
                  if (is_root) tensor.copy_(dense);
                  return absl::OkStatus();
                }});
}

WorkPtr HierarchicalBackend::StartReduceScatters(Call call, const Tensors& outputs,
                                                 const std::vector<Tensors>& inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "expected an output for each input");
  for (size_t i = 0; i < outputs.size(); ++i) {
    CheckDense(outputs[i]);
    CheckLike(inputs[i], outputs[i]);
    CheckReduction(outputs[i], *call.op);
  }
  call.sized = outputs;
  call.results = outputs;
  call.run = [this, outputs, inputs, op = *call.op](absl::Time deadline) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      Tensors parts;  // keeps copies of inputs with gaps
      std::vector<std::span<const std::byte>> from;
      for (const at::Tensor& input : inputs[i]) {
        from.push_back(BytesOf(parts.emplace_back(input.contiguous())));
      }
      const at::Tensor dense = at::empty(outputs[i].sizes(), outputs[i].options());
      const at::ScalarType type = dense.scalar_type();
      DDP_RETURN_IF_ERROR(
          parts_->engine.ReduceScatter(from, BytesOf(dense), ReduceKindOf(op.op_, type),
                                       ElementTypeOf(type), FactorOf(op), deadline));
      if (op.op_ == c10d::ReduceOp::AVG) DivideSums(dense, size_);
      outputs[i].copy_(dense);
    }
    return absl::OkStatus();
  };
  return Start(std::move(call));
}

WorkPtr HierarchicalBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ReduceScatterOptions& options) {
  CheckOne(outputs);
  return StartReduceScatters(
      {.type = c10d::OpType::REDUCE_SCATTER, .op = options.reduceOp, .timeout = options.timeout},
      outputs, inputs);
}

WorkPtr HierarchicalBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::ReduceScatterOptions& options) {
  return StartReduceScatters({.type = c10d::OpType::_REDUCE_SCATTER_BASE,
                              .op = options.reduceOp,
                              .timeout = options.timeout},
                             {output}, {PartsOf(input)});
}

WorkPtr HierarchicalBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  std::vector<Tensors> parts;
  for (const at::Tensor& input : inputs) parts.push_back(PartsOf(input));
  return StartReduceScatters(
      {.type = c10d::OpType::COALESCED, .op = options.reduceOp, .timeout = options.timeout},
      outputs, parts);
}

// ---- Copies.

WorkPtr HierarchicalBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  CheckOne(tensors);
  CheckRoot(options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  return Start({.type = c10d::OpType::BROADCAST,
                .sized = tensors,
                .root = root,
                .results = tensors,
                .timeout = options.timeout,
                .run = [this, tensor = tensors.front(), root](absl::Time deadline) {
                  const at::Tensor dense = tensor.contiguous();
                  DDP_RETURN_IF_ERROR(parts_->engine.Broadcast(BytesOf(dense), root, deadline));
                  if (!dense.is_same(tensor)) tensor.copy_(dense);
                  return absl::OkStatus();
                }});
}

WorkPtr HierarchicalBackend::barrier(const c10d::BarrierOptions& options) {
  // The agreement waits for all ranks.
  return Start({.type = c10d::OpType::BARRIER, .timeout = options.timeout, .run = [](absl::Time) {
                  return absl::OkStatus();
                }});
}

void HierarchicalBackend::monitoredBarrier(const c10d::BarrierOptions& options,
                                           bool /*wait_all_ranks*/) {
  barrier(options)->wait(kNoTimeout);
}

// Copies the inputs of all ranks into the outputs of their numbers.
absl::Status HierarchicalBackend::Gather(const at::Tensor& input, const Tensors& outputs,
                                         absl::Time deadline) {
  Tensors all;
  std::vector<std::span<std::byte>> to;
  for (const at::Tensor& output : outputs) {
    const bool dense = output.is_contiguous();
    all.push_back(dense ? output : at::empty(output.sizes(), output.options()));
    to.push_back(BytesOf(all.back()));
  }
  const at::Tensor from = input.contiguous();
  DDP_RETURN_IF_ERROR(parts_->engine.AllGather(BytesOf(from), to, deadline));
  for (int rank = 0; rank < size_; ++rank) {
    if (!all[rank].is_same(outputs[rank])) outputs[rank].copy_(all[rank]);
  }
  return absl::OkStatus();
}

WorkPtr HierarchicalBackend::StartGathers(Call call, const std::vector<Tensors>& outputs,
                                          const Tensors& inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "expected a list of outputs for each input");
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckDense(inputs[i]);
    CheckLike(outputs[i], inputs[i]);
  }
  call.sized = inputs;
  call.run = [this, outputs, inputs](absl::Time deadline) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      DDP_RETURN_IF_ERROR(Gather(inputs[i], outputs[i], deadline));
    }
    return absl::OkStatus();
  };
  return Start(std::move(call));
}

WorkPtr HierarchicalBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) {
  CheckOne(inputs);
  TORCH_CHECK_VALUE(outputs.size() == 1, "expected one list of outputs");
  return StartGathers(
      {.type = c10d::OpType::ALLGATHER, .results = outputs.front(), .timeout = options.timeout},
      outputs, inputs);
}

WorkPtr HierarchicalBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::AllgatherOptions& options) {
  CheckDense(input);
  CheckLike(PartsOf(output), input);
  Call call{.type = c10d::OpType::_ALLGATHER_BASE,
            .sized = {input},
            .results = {output},
            .timeout = options.timeout};
  call.run = [this, input, dense = call.Dense(output)](absl::Time deadline) {
    return Gather(input, PartsOf(dense), deadline);
  };
  return Start(std::move(call));
}

WorkPtr HierarchicalBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_),
                    "expected a list of outputs for each rank");
  Call call{.type = c10d::OpType::ALLGATHER_COALESCED, .timeout = options.timeout};
  std::vector<Tensors> by_input;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors& parts = by_input.emplace_back();
    for (const Tensors& list : outputs) parts.push_back(list.at(i));
    call.results.insert(call.results.end(), parts.begin(), parts.end());
  }
  return StartGathers(std::move(call), by_input, inputs);
}

WorkPtr HierarchicalBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  Call call{.type = c10d::OpType::COALESCED, .results = outputs, .timeout = options.timeout};
  std::vector<Tensors> parts;
  for (const at::Tensor& output : outputs) parts.push_back(PartsOf(call.Dense(output)));
  return StartGathers(std::move(call), parts, inputs);
}

WorkPtr HierarchicalBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::GatherOptions& options) {
  CheckOne(inputs);
  CheckRoot(options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  Tensors results;
  if (rank_ == root) {
    TORCH_CHECK_VALUE(outputs.size() == 1, "expected one list of outputs");
    CheckLike(outputs.front(), inputs.front());
    results = outputs.front();
  }
  return Start({.type = c10d::OpType::GATHER,
                .sized = inputs,
                .root = root,
                .results = results,
                .timeout = options.timeout,
                .run = [this, input = inputs.front(), results, root](absl::Time deadline) {
                  return parts_->exchange.GatherToRoot(input, results, root, deadline);
                }});
}

WorkPtr HierarchicalBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ScatterOptions& options) {
  CheckOne(outputs);
  CheckRoot(options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  Tensors parts;
  if (rank_ == root) {
    TORCH_CHECK_VALUE(inputs.size() == 1, "expected one list of inputs");
    CheckLike(inputs.front(), outputs.front());
    parts = inputs.front();
  }
  return Start({.type = c10d::OpType::SCATTER,
                .sized = outputs,
                .root = root,
                .results = outputs,
                .timeout = options.timeout,
                .run = [this, output = outputs.front(), parts, root](absl::Time deadline) {
                  return parts_->exchange.Scatter(parts, output, root, deadline);
                }});
}

WorkPtr HierarchicalBackend::StartAllToAll(Call call, const Tensors& outputs,
                                           const Tensors& inputs) {
  call.type = c10d::OpType::ALLTOALL;
  call.run = [this, outputs, inputs](absl::Time deadline) {
    return parts_->exchange.AllToAll(inputs, outputs, deadline);
  };
  return Start(std::move(call));
}

WorkPtr HierarchicalBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_) && inputs.size() == outputs.size(),
                    "expected an input and an output for each of ", size_, " ranks");
  for (const at::Tensor& tensor : inputs) CheckDense(tensor);
  for (const at::Tensor& tensor : outputs) CheckDense(tensor);
  return StartAllToAll({.results = outputs, .timeout = options.timeout}, outputs, inputs);
}

WorkPtr HierarchicalBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                           std::vector<int64_t>& output_sizes,
                                           std::vector<int64_t>& input_sizes,
                                           const c10d::AllToAllOptions& options) {
  const auto parts = [&](const at::Tensor& tensor, const std::vector<int64_t>& sizes) {
    if (sizes.empty()) return PartsOf(tensor);
    TORCH_CHECK_VALUE(sizes.size() == static_cast<size_t>(size_) && tensor.dim() > 0,
                      "expected a tensor with rows, and a size for each of ", size_, " ranks");
    Tensors list;
    int64_t row = 0;
    for (const int64_t size : sizes) {
      list.push_back(tensor.narrow(0, row, size));
      row += size;
    }
    TORCH_CHECK_VALUE(row == tensor.size(0), "the sizes do not add up to the tensor");
    return list;
  };
  CheckDense(input);
  Call call{.results = {output}, .timeout = options.timeout};
  const Tensors outputs = parts(call.Dense(output), output_sizes);
  return StartAllToAll(std::move(call), outputs, parts(input, input_sizes));
}

// ---- Messages.

WorkPtr HierarchicalBackend::send(Tensors& tensors, int to, int tag) {
  MutexLock lock(*GlooTraits().launch_mutex);
  return parts_->flat->send(tensors, to, tag);
}

WorkPtr HierarchicalBackend::recv(Tensors& tensors, int from, int tag) {
  MutexLock lock(*GlooTraits().launch_mutex);
  return parts_->flat->recv(tensors, from, tag);
}

WorkPtr HierarchicalBackend::recvAnysource(Tensors& tensors, int tag) {
  MutexLock lock(*GlooTraits().launch_mutex);
  return parts_->flat->recvAnysource(tensors, tag);
}

HierarchicalBackend& Cast(c10d::Backend& backend) {
  return static_cast<HierarchicalBackend&>(backend);
}

StorePtr Prefixed(const std::string& prefix, const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

}  // namespace

absl::StatusOr<BackendPtr> MakeHierarchicalBackend(const StorePtr& store,
                                                   const HierarchicalOptions& options) {
  const HostLayout layout(options.hosts, options.rank);
  const StorePtr of_host = Prefixed(HostPrefix(layout), store);
  auto entry = ShareMemory(*MakeGroupStore(store), *MakeGroupStore(of_host), layout,
                           options.connect_timeout);
  if (!entry.ok()) return entry.status();
  auto group = std::make_unique<HostGroup>(*std::move(entry));
  const GlooBackendOptions gloo{.rank = options.rank,
                                .size = options.hosts.back().end,
                                .timeout = options.connect_timeout,
                                .single_host = options.over_loopback};
  BackendPtr flat = MakeGlooBackend(Prefixed("flat", store), gloo);
  BackendPtr hosts = MakeGlooBackend(Prefixed("hosts", store), gloo);
  flat->setTimeout(absl::ToChronoMilliseconds(options.timeout));
  return c10::make_intrusive<HierarchicalBackend>(
      options,
      std::make_unique<Parts>(options, std::move(group), std::move(flat), std::move(hosts)));
}

std::vector<std::string> HierarchicalKeys(int size) {
  std::vector<std::string> keys = FindHostsKeys(size);
  for (const std::string& key : ShareMemoryKeys(size)) keys.push_back(key);
  for (const char* const gloo : {"flat", "hosts"}) {
    for (const std::string& key : GlooKeys(size)) keys.push_back(absl::StrCat(gloo, "/", key));
  }
  return keys;
}

bool IsHierarchical(const c10d::Backend& backend) {
  return dynamic_cast<const HierarchicalBackend*>(&backend) != nullptr;
}

void AddHierarchicalTraits(BackendTraits& traits) {
  traits.set_tag = [](c10d::Backend& backend, uint32_t tag) { Cast(backend).set_tag(tag); };
  traits.abort = [](c10d::Backend& backend) { return Cast(backend).Abort(); };
  traits.dead_rank = [](c10d::Backend& backend) { return Cast(backend).dead_rank(); };
  traits.allocates_shared = true;
}

}  // namespace ddp::internal
