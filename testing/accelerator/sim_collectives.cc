#include "testing/accelerator/sim_collectives.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "glog/logging.h"
#include "testing/accelerator/accelerator.h"
#include "testing/accelerator/peer_sockets.h"
#include "testing/accelerator/sim_communicator.h"
#include "testing/accelerator/sim_reduction.h"

namespace ddp::testing {
namespace {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

void CheckTensor(const Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == kDevice && tensor.layout() == at::kStrided,
              "Tensors must be on a simulated device and dense");
  TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
  switch (tensor.scalar_type()) {
    case at::kBool:
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      return;
    default:
      TORCH_CHECK_TYPE(false, "Input tensor data type is not supported for NCCL process group: ",
                       tensor.scalar_type());
  }
}

const Tensor& Single(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "Expecting one tensor only but got ", tensors.size());
  return tensors[0];
}

Tensors FlatViews(const Tensors& tensors) {
  Tensors views;
  for (const Tensor& tensor : tensors) views.push_back(FlatKernelView(tensor));
  return views;
}

// Cuts the elements of `tensor` into `count` equal parts.
Tensors Parts(const Tensor& tensor, int count) {
  TORCH_CHECK(tensor.numel() % count == 0, tensor.numel(), " elements for ", count, " ranks");
  const int64_t each = tensor.numel() / count;
  const Tensor flat = FlatKernelView(tensor);
  Tensors parts;
  for (int i = 0; i < count; ++i) parts.push_back(flat.narrow(0, i * each, each));
  return parts;
}

// Cuts the elements of `tensor` by sizes in its first dimension; into equal parts without sizes.
Tensors PartsOfSizes(const Tensor& tensor, const std::vector<int64_t>& sizes, int count) {
  if (sizes.empty()) return Parts(tensor, count);
  TORCH_CHECK(static_cast<int>(sizes.size()) == count, sizes.size(), " sizes for ", count,
              " ranks");
  const int64_t rows = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  TORCH_CHECK(tensor.dim() > 0 && rows == tensor.size(0), "the sizes do not fit the tensor");
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  const Tensor flat = FlatKernelView(tensor);
  Tensors parts;
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    parts.push_back(flat.narrow(0, begin, size * row));
    begin += size * row;
  }
  return parts;
}

Tensors Joined(const TensorLists& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// Messages of one exchange, by rank.
struct Messages {
  Tensors out;
  Tensors in;
};

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(const c10::intrusive_ptr<c10d::Store>& store, const SimBackendOptions& options)
      : Backend(options.rank, options.size), store_(store), timeout_(options.timeout) {}
  ~SimBackend() override { abort(); }

  const std::string getBackendName() const override { return "sim"; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = absl::FromChrono(timeout);
  }
  void eagerConnectSingleDevice(at::Device device) override { Connected(device, std::nullopt); }
  void abort() override;
  void shutdown() override;
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Single(tensors);
    return AllReduce(OpType::ALLREDUCE, tensors, options.reduceOp);
  }
  WorkPtr allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override {
    TORCH_CHECK(false,
                "NCCL does not support all_reduce with sparse tensors. "
                "Please use dense tensors instead.");
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return AllReduce(OpType::ALLREDUCE_COALESCED, tensors, options.reduceOp);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return AllGather(OpType::_ALLGATHER_BASE, {output}, {input});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions&) override {
    return AllGather(OpType::COALESCED, outputs, inputs);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return ReduceScatter(OpType::_REDUCE_SCATTER_BASE, {output}, {input}, options.reduceOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return ReduceScatter(OpType::COALESCED, outputs, inputs, options.reduceOp);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override;
  WorkPtr send(Tensors& tensors, int peer, int) override { return Message(tensors, peer, true); }
  WorkPtr recv(Tensors& tensors, int peer, int) override { return Message(tensors, peer, false); }
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  // Returns the communicator of all ranks on `device`, or of this rank and `peer`. Connects it if
  // need be.
  std::shared_ptr<SimCommunicator> Connected(at::Device device, std::optional<int> peer);
  std::vector<std::shared_ptr<SimCommunicator>> Communicators() const;

  WorkPtr Launch(SimCall call, std::optional<int> peer = std::nullopt);
  // Launches exchanges after which nothing is left to do.
  WorkPtr LaunchExchanges(SimCall call, std::vector<Messages> exchanges);
  WorkPtr AllReduce(OpType type, const Tensors& tensors, const c10d::ReduceOp& op);
  WorkPtr AllGather(OpType type, const Tensors& outputs, const Tensors& inputs);
  WorkPtr ReduceScatter(OpType type, const Tensors& outputs, const Tensors& inputs,
                        const c10d::ReduceOp& op);
  WorkPtr ReduceParts(SimCall call, std::vector<Tensors> parts, const c10d::ReduceOp& op);
  WorkPtr Message(const Tensors& tensors, int peer, bool sends);

  // Returns a message for each rank, or none.
  Tensors ToAll(const Tensor& tensor) const { return Tensors(size_, tensor); }
  Tensors ToOne(const Tensor& tensor, int64_t rank) const {
    Tensors messages(size_);
    messages.at(rank) = tensor;
    return messages;
  }
  Tensors ToNone() const { return Tensors(size_); }

  const c10::intrusive_ptr<c10d::Store> store_;
  absl::Duration timeout_;

  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<SimCommunicator>> communicators_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<at::Device> last_device_ ABSL_GUARDED_BY(mutex_);
  Mutex connect_mutex_;  // one thread connects at a time; abort() does not wait for it
  std::map<std::string, int64_t> meetings_ ABSL_GUARDED_BY(connect_mutex_);
};

// ---- The life of a backend.

PeerSockets::Store Interface(const c10::intrusive_ptr<c10d::Store>& store, absl::Duration timeout) {
  return {.set =
              [store](const std::string& key, const std::string& value) {
                store->set(key, std::vector<uint8_t>(value.begin(), value.end()));
              },
          .get =
              [store, timeout](const std::string& key) {
                store->wait({key}, absl::ToChronoMilliseconds(timeout));
                const std::vector<uint8_t> value = store->get(key);
                return std::string(value.begin(), value.end());
              }};
}

std::shared_ptr<SimCommunicator> SimBackend::Connected(at::Device device, std::optional<int> peer) {
  const PeerSockets::Place place =
      peer ? PeerSockets::Place{.rank = rank_ < *peer ? 0 : 1, .size = 2}
           : PeerSockets::Place{.rank = rank_, .size = size_};
  // The ranks meet by the number of the meeting: each may be on another device.
  const std::string ranks =
      peer ? absl::StrCat(std::min(rank_, *peer), "-", std::max(rank_, *peer)) : "all";
  const std::string key = absl::StrCat(ranks, "/", device.index());
  MutexLock connecting(connect_mutex_);
  {
    MutexLock lock(mutex_);
    TORCH_CHECK(!ended_, "the backend has been shut down or aborted");
    last_device_ = device;
    const auto it = communicators_.find(key);
    if (it != communicators_.end()) return it->second;
  }
  const int64_t meeting = meetings_[ranks]++;
  absl::StatusOr<PeerSockets> sockets = PeerSockets::Connect(
      place, Interface(store_, timeout_), absl::StrCat("sim/", ranks, "/", meeting, "/"), timeout_);
  if (!sockets.ok()) {
    C10_THROW_ERROR(DistBackendError,
                    absl::StrCat("rank ", rank_, " cannot connect: ", sockets.status().message()));
  }
  const c10::Stream stream = c10::impl::VirtualGuardImpl(kDevice).getNewStream(device);
  auto made = std::make_shared<SimCommunicator>(*std::move(sockets), place, stream);
  MutexLock lock(mutex_);
  if (ended_) made->Abort();
  communicators_[key] = made;
  return made;
}

std::vector<std::shared_ptr<SimCommunicator>> SimBackend::Communicators() const {
  std::vector<std::shared_ptr<SimCommunicator>> all;
  MutexLock lock(mutex_);
  for (const auto& [key, communicator] : communicators_) all.push_back(communicator);
  return all;
}

void SimBackend::abort() {
  {
    MutexLock lock(mutex_);
    ended_ = true;
  }
  for (const auto& communicator : Communicators()) communicator->Abort();
}

void SimBackend::shutdown() {
  {
    MutexLock lock(mutex_);
    ended_ = true;
  }
  for (const auto& communicator : Communicators()) {
    if (communicator->AwaitIdle(timeout_)) continue;
    LOG(ERROR) << "rank " << rank_ << ": shutdown() has waited for "
               << absl::FormatDuration(timeout_) << "; it aborts";
  }
  abort();
}

c10::intrusive_ptr<c10d::Backend> SimBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>& options) {
  const auto place = std::find(ranks.begin(), ranks.end(), rank_);
  if (place == ranks.end()) return nullptr;
  return MakeSimBackend(store,
                        {.rank = static_cast<int>(place - ranks.begin()),
                         .size = static_cast<int>(ranks.size()),
                         .timeout = options ? absl::FromChrono(options->timeout) : timeout_});
}

// ---- Collectives.

WorkPtr SimBackend::Launch(SimCall call, std::optional<int> peer) {
  const Tensor& any = call.outputs.empty() ? call.inputs.at(0) : call.outputs[0];
  for (const Tensors* tensors : {&call.inputs, &call.outputs}) {
    for (const Tensor& tensor : *tensors) {
      TORCH_CHECK(tensor.device() == any.device(), "Tensors must be on one device");
    }
  }
  return Connected(any.device(), peer)->Launch(std::move(call));
}

WorkPtr SimBackend::LaunchExchanges(SimCall call, std::vector<Messages> exchanges) {
  call.run = [exchanges = std::move(exchanges)](const SimCall::Exchange& exchange) {
    for (const Messages& messages : exchanges) exchange(messages.out, messages.in);
  };
  return Launch(std::move(call));
}

WorkPtr SimBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  CheckTensor(Single(tensors));
  const Tensor view = FlatKernelView(tensors[0]);
  const int64_t root = options.rootRank;
  Messages messages =
      rank_ == root ? Messages{ToAll(view), ToNone()} : Messages{ToNone(), ToOne(view, root)};
  return LaunchExchanges({.type = OpType::BROADCAST, .outputs = tensors}, {messages});
}

WorkPtr SimBackend::AllReduce(OpType type, const Tensors& tensors, const c10d::ReduceOp& op) {
  for (const Tensor& tensor : tensors) CheckTensor(tensor);
  const SimReduction reduction(op, tensors.at(0));
  SimCall call{.type = type, .outputs = tensors};
  call.run = [reduction, size = size_,
              views = FlatViews(tensors)](const SimCall::Exchange& exchange) {
    for (const Tensor& view : views) {
      Tensors ranks;
      for (int i = 0; i < size; ++i) ranks.push_back(at::empty_like(view));
      exchange(Tensors(size, view), ranks);
      view.copy_(reduction.Combine(std::move(ranks)));
    }
  };
  return Launch(std::move(call));
}

WorkPtr SimBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  CheckTensor(Single(tensors));
  const SimReduction reduction(options.reduceOp, tensors[0]);
  const Tensor view = FlatKernelView(tensors[0]);
  const Tensors out = ToOne(view, options.rootRank);
  SimCall call{.type = OpType::REDUCE, .outputs = tensors};
  call.run = [=, is_root = rank_ == options.rootRank](const SimCall::Exchange& exchange) {
    Tensors in(out.size());
    if (!is_root) return exchange(out, in);
    for (Tensor& tensor : in) tensor = at::empty_like(view);
    exchange(out, in);
    view.copy_(reduction.Combine(std::move(in)));
  };
  return Launch(std::move(call));
}

WorkPtr SimBackend::allgather(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions&) {
  TORCH_CHECK(outputs.size() == 1, "Expecting one list of outputs");
  CheckTensor(Single(inputs));
  for (const Tensor& tensor : outputs[0]) CheckTensor(tensor);
  return LaunchExchanges({.type = OpType::ALLGATHER, .inputs = inputs, .outputs = outputs[0]},
                         {{ToAll(FlatKernelView(inputs[0])), FlatViews(outputs[0])}});
}

WorkPtr SimBackend::AllGather(OpType type, const Tensors& outputs, const Tensors& inputs) {
  std::vector<Messages> exchanges;
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckTensor(inputs[i]);
    CheckTensor(outputs.at(i));
    exchanges.push_back({ToAll(FlatKernelView(inputs[i])), Parts(outputs[i], size_)});
  }
  return LaunchExchanges({.type = type, .inputs = inputs, .outputs = outputs},
                         std::move(exchanges));
}

WorkPtr SimBackend::gather(TensorLists& outputs, Tensors& inputs,
                           const c10d::GatherOptions& options) {
  CheckTensor(Single(inputs));
  const bool is_root = rank_ == options.rootRank;
  TORCH_CHECK(outputs.size() == (is_root ? 1 : 0), "only the root has one list of outputs");
  const Tensors gathered = Joined(outputs);
  for (const Tensor& tensor : gathered) CheckTensor(tensor);
  return LaunchExchanges({.type = OpType::GATHER, .inputs = inputs, .outputs = gathered},
                         {{ToOne(FlatKernelView(inputs[0]), options.rootRank),
                           is_root ? FlatViews(gathered) : ToNone()}});
}

WorkPtr SimBackend::scatter(Tensors& outputs, TensorLists& inputs,
                            const c10d::ScatterOptions& options) {
  CheckTensor(Single(outputs));
  const bool is_root = rank_ == options.rootRank;
  TORCH_CHECK(inputs.size() == (is_root ? 1 : 0), "only the root has one list of inputs");
  const Tensors scattered = Joined(inputs);
  for (const Tensor& tensor : scattered) CheckTensor(tensor);
  return LaunchExchanges({.type = OpType::SCATTER, .inputs = scattered, .outputs = outputs},
                         {{is_root ? FlatViews(scattered) : ToNone(),
                           ToOne(FlatKernelView(outputs[0]), options.rootRank)}});
}

WorkPtr SimBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                   const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(inputs.size() == 1, "Expecting one list of inputs");
  for (const Tensor& tensor : inputs[0]) CheckTensor(tensor);
  CheckTensor(Single(outputs));
  return ReduceParts({.type = OpType::REDUCE_SCATTER, .inputs = inputs[0], .outputs = outputs},
                     {FlatViews(inputs[0])}, options.reduceOp);
}

WorkPtr SimBackend::ReduceScatter(OpType type, const Tensors& outputs, const Tensors& inputs,
                                  const c10d::ReduceOp& op) {
  std::vector<Tensors> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckTensor(inputs[i]);
    CheckTensor(outputs.at(i));
    parts.push_back(Parts(inputs[i], size_));
  }
  return ReduceParts({.type = type, .inputs = inputs, .outputs = outputs}, std::move(parts), op);
}

// Sends part p of each tensor to rank p, and combines what comes into the outputs.
WorkPtr SimBackend::ReduceParts(SimCall call, std::vector<Tensors> parts,
                                const c10d::ReduceOp& op) {
  const SimReduction reduction(op, call.outputs.at(0));
  call.run = [reduction, parts = std::move(parts),
              outputs = FlatViews(call.outputs)](const SimCall::Exchange& exchange) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      Tensors ranks;
      for (size_t rank = 0; rank < parts[i].size(); ++rank) {
        ranks.push_back(at::empty_like(outputs[i]));
      }
      exchange(parts[i], ranks);
      outputs[i].copy_(reduction.Combine(std::move(ranks)));
    }
  };
  return Launch(std::move(call));
}

WorkPtr SimBackend::alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                                  std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions&) {
  CheckTensor(output);
  CheckTensor(input);
  return LaunchExchanges(
      {.type = OpType::ALLTOALL_BASE, .inputs = {input}, .outputs = {output}},
      {{PartsOfSizes(input, input_sizes, size_), PartsOfSizes(output, output_sizes, size_)}});
}

WorkPtr SimBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  TORCH_CHECK(outputs.size() == size_ && inputs.size() == size_, "a tensor for each rank");
  for (const Tensor& tensor : Joined({outputs, inputs})) CheckTensor(tensor);
  return LaunchExchanges({.type = OpType::ALLTOALL, .inputs = inputs, .outputs = outputs},
                         {{FlatViews(inputs), FlatViews(outputs)}});
}

WorkPtr SimBackend::Message(const Tensors& tensors, int peer, bool sends) {
  CheckTensor(Single(tensors));
  TORCH_CHECK(peer != rank_ && peer >= 0 && peer < size_, "Invalid peer rank ", peer);
  SimCall call{.type = sends ? OpType::SEND : OpType::RECV, .outputs = tensors};
  Tensors messages(2);  // by the place in the pair
  messages[peer < rank_ ? 0 : 1] = FlatKernelView(tensors[0]);
  call.run = [messages, sends](const SimCall::Exchange& exchange) {
    exchange(sends ? messages : Tensors(2), sends ? Tensors(2) : messages);
  };
  return Launch(std::move(call), peer);
}

WorkPtr SimBackend::barrier(const c10d::BarrierOptions& options) {
  std::optional<at::Device> device = options.device ? options.device : getBoundDeviceId();
  if (!device && !options.device_ids.empty()) {
    device = at::Device(kDevice, static_cast<at::DeviceIndex>(options.device_ids[0]));
  }
  {
    MutexLock lock(mutex_);
    if (!device) device = last_device_;
  }
  if (!device) device = c10::impl::VirtualGuardImpl(kDevice).getDevice();
  const Tensor tensor = at::empty({1}, at::TensorOptions(*device).dtype(at::kByte));
  const Tensor own = at::zeros({1}, at::kByte);
  SimCall call{.type = OpType::BARRIER, .outputs = {tensor}, .blocks_host = true};
  call.run = [own, size = size_](const SimCall::Exchange& exchange) {
    Tensors in;
    for (int i = 0; i < size; ++i) in.push_back(at::empty_like(own));
    exchange(Tensors(size, own), in);
  };
  return Launch(std::move(call));
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> MakeSimBackend(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const SimBackendOptions& options) {
  return c10::make_intrusive<SimBackend>(store, options);
}

}  // namespace ddp::testing
