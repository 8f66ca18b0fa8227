// Length: one network with its ranks, the arithmetic of each collective, and the Work and Backend
// of c10d around it.

#include "testing/backend/fake_backend.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"

namespace ddp::testing {
namespace {

using Kind = FakeCall::Kind;
using Reduction = c10d::ReduceOp::RedOpType;

// The longest wait of a test for operations to be held.
constexpr absl::Duration kHeldTimeout = absl::Seconds(60);

// One rank's operation, from its launch to its end.
struct Operation {
  FakeCall call;
  FakeFate fate;
  Reduction reduction = Reduction::UNUSED;
  int root = -1;
  int peer = -1;
  int tag = 0;
  at::Tensor input;   // a copy; undefined for a receive
  at::Tensor output;  // undefined for a send
  // The sizes of the parts of an all-to-all, in elements; empty: equal parts.
  std::vector<int64_t> output_sizes;
  std::vector<int64_t> input_sizes;
  c10::intrusive_ptr<c10::ivalue::Future> future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  std::optional<at::Tensor> held_result;  // of a held completion
  bool ended = false;                     // a result or an error is on its way
};
using OperationPtr = std::shared_ptr<Operation>;

// The end of an operation: its result, or its error.
struct Ending {
  OperationPtr operation;
  at::Tensor result;  // undefined: nothing to write
  std::exception_ptr error;
};

void Deliver(const Ending& ending) {
  Operation& operation = *ending.operation;
  if (ending.error) {
    operation.future->setError(ending.error);
    return;
  }
  const at::NoGradGuard no_grad;
  at::Tensor& output = operation.output;
  if (ending.result.defined() && output.is_sparse()) {
    output.copy_(ending.result);
  } else if (ending.result.defined() && output.nbytes() > 0) {
    // Not copy_(): the rank may have made the tensor in inference mode, and this thread may not.
    std::memcpy(output.mutable_data_ptr(), ending.result.const_data_ptr(), output.nbytes());
  }
  std::vector<at::Tensor> value;
  if (output.defined()) value.push_back(output);
  operation.future->markCompleted(c10::IValue(std::move(value)));
}

at::Tensor CopyOf(const at::Tensor& tensor) {
  const c10::InferenceMode ordinary(false);
  const at::NoGradGuard no_grad;
  return tensor.clone();
}

void Add(at::Tensor& sum, const at::Tensor& next, Reduction reduction) {
  switch (reduction) {
    case Reduction::SUM:
    case Reduction::AVG:
      sum = sum.is_sparse() ? sum + next : sum.add_(next);
      return;
    case Reduction::PRODUCT:
      sum.mul_(next);
      return;
    case Reduction::MIN:
      sum = at::minimum(sum, next);
      return;
    case Reduction::MAX:
      sum = at::maximum(sum, next);
      return;
    case Reduction::BAND:
      sum.bitwise_and_(next);
      return;
    case Reduction::BOR:
      sum.bitwise_or_(next);
      return;
    case Reduction::BXOR:
      sum.bitwise_xor_(next);
      return;
    default:
      LOG(FATAL) << "a reduction that no test needs: " << static_cast<int>(reduction);
  }
}

// The n-th collective of each rank.
struct Round {
  std::vector<OperationPtr> arrived;  // by rank; null: has not come
  at::Tensor reduced;                 // of a reduction, once it is computed
};

// Adds the inputs of all ranks, in rank order.
const at::Tensor& Reduced(Round& round) {
  if (round.reduced.defined()) return round.reduced;
  const Reduction reduction = round.arrived[0]->reduction;
  at::Tensor sum = round.arrived[0]->input.clone();
  for (size_t rank = 1; rank < round.arrived.size(); ++rank) {
    Add(sum, round.arrived[rank]->input, reduction);
  }
  if (reduction == Reduction::AVG) sum.div_(static_cast<int64_t>(round.arrived.size()));
  round.reduced = sum;
  return round.reduced;
}

bool Agree(const Operation& a, const Operation& b) {
  if (a.call.kind != b.call.kind || a.reduction != b.reduction || a.root != b.root) return false;
  if (a.input.scalar_type() != b.input.scalar_type()) return false;
  if (a.input.is_sparse() != b.input.is_sparse()) return false;
  if (a.input.is_sparse()) return a.input.sizes() == b.input.sizes();
  if (a.input_sizes.empty() != b.input_sizes.empty()) return false;
  return !a.input_sizes.empty() || a.input.numel() == b.input.numel();
}

int64_t PartOf(const at::Tensor& tensor, const std::vector<int64_t>& sizes, size_t rank,
               size_t count) {
  return sizes.empty() ? tensor.numel() / static_cast<int64_t>(count) : sizes[rank];
}

// Returns true when each rank receives as much as the others send to it.
bool PartsFit(const Round& round) {
  const size_t size = round.arrived.size();
  for (size_t to = 0; to < size; ++to) {
    for (size_t from = 0; from < size; ++from) {
      const Operation& sender = *round.arrived[from];
      const Operation& receiver = *round.arrived[to];
      if (PartOf(sender.input, sender.input_sizes, to, size) !=
          PartOf(receiver.output, receiver.output_sizes, from, size)) {
        return false;
      }
    }
  }
  return true;
}

at::Tensor Concatenated(std::vector<at::Tensor> parts) {
  for (at::Tensor& part : parts) part = part.reshape({-1});
  return at::cat(parts);
}

// Returns what `rank` receives. All ranks have come.
at::Tensor ResultOf(Round& round, int rank) {
  const size_t size = round.arrived.size();
  std::vector<at::Tensor> parts;
  switch (round.arrived[rank]->call.kind) {
    case Kind::kAllGather:
      for (const OperationPtr& from : round.arrived) parts.push_back(from->input);
      return Concatenated(parts);
    case Kind::kReduceScatter:
      return Reduced(round).reshape({-1}).chunk(static_cast<int64_t>(size))[rank].contiguous();
    case Kind::kAllToAll:
      for (const OperationPtr& from : round.arrived) {
        int64_t begin = 0;
        for (int to = 0; to < rank; ++to) begin += PartOf(from->input, from->input_sizes, to, size);
        parts.push_back(from->input.reshape({-1}).narrow(
            0, begin, PartOf(from->input, from->input_sizes, rank, size)));
      }
      return Concatenated(parts);
    default:
      return Reduced(round);
  }
}

std::exception_ptr ClosedBy(int rank) {
  return std::make_exception_ptr(
      C10_BUILD_ERROR(DistNetworkError, absl::StrCat("Connection closed by rank ", rank)));
}

std::exception_ptr ErrorOf(const std::string& text) {
  return text.empty() ? nullptr : std::make_exception_ptr(std::runtime_error(text));
}

// The backends of one group in one incarnation. Guarded by the mutex of the network's state.
struct World {
  explicit World(int size) : next_collective(size), next_message(size), size(size) {}

  std::vector<int64_t> next_collective;  // by rank
  std::vector<int64_t> next_message;
  const int size;
  int connected = 0;
  std::set<int> departed;
  std::map<int64_t, Round> rounds;                                        // unfinished, by number
  std::map<std::tuple<int, int, int>, std::deque<at::Tensor>> sent;       // by source, target, tag
  std::map<std::tuple<int, int, int>, std::deque<OperationPtr>> awaited;  // likewise
};

}  // namespace

class FakeNetwork::State {
 public:
  explicit State(Options options) : options_(std::move(options)) {
    if (options_.delivery == Delivery::kOwnThread) thread_ = std::thread([this] { DeliverAll(); });
  }

  // Joins the network's thread. Afterwards operations end on the calling threads.
  void Close() {
    std::vector<Ending> endings;
    {
      MutexLock lock(mutex_);
      closed_ = true;
      for (const auto& [id, operation] : unfinished_) {
        endings.push_back(
            {.operation = operation, .error = ErrorOf("the fake network has closed")});
      }
      for (const Ending& ending : endings) ending.operation->ended = true;
      unfinished_.clear();
      held_.clear();
      changed_.NotifyAll();
    }
    if (thread_.joinable()) thread_.join();
    for (const Ending& ending : endings) Deliver(ending);
  }

  std::shared_ptr<World> Connect(const BackendRequest& request) {
    const std::string name = NewName();
    const std::string agreed = request.store->compareSet("fake-world", std::string(), name);
    const absl::Time deadline = clock_.Now() + absl::FromChrono(request.connect_timeout);
    MutexLock lock(mutex_);
    std::shared_ptr<World>& world = worlds_[agreed];
    if (!world) world = std::make_shared<World>(request.size);
    const std::shared_ptr<World> mine = world;
    ++mine->connected;
    changed_.NotifyAll();
    while (mine->connected < mine->size) {
      const absl::Duration left = deadline - clock_.Now();
      if (left <= absl::ZeroDuration()) {
        throw CommunicationError(absl::StrCat("rank ", request.rank, " of ", request.size,
                                              ": only ", mine->connected, " ranks have connected"));
      }
      changed_.WaitFor(mutex_, left);
    }
    worlds_.erase(agreed);  // complete: the store gives this name to no other rank
    return mine;
  }

  // Starts `operation` of a rank in `world`. Throws the script's launch error.
  c10::intrusive_ptr<c10d::Work> Launch(const std::shared_ptr<World>& world,
                                        const OperationPtr& operation) {
    FakeCall& call = operation->call;
    {
      MutexLock lock(mutex_);
      const bool message = call.kind == Kind::kSend || call.kind == Kind::kReceive;
      call.id = next_id_++;
      call.number = (message ? world->next_message : world->next_collective)[call.rank]++;
    }
    if (options_.script) operation->fate = options_.script(call);
    if (!operation->fate.launch_error.empty()) {
      throw std::runtime_error(operation->fate.launch_error);
    }
    std::vector<Ending> endings;
    {
      MutexLock lock(mutex_);
      if (closed_) throw std::runtime_error("the fake network has closed");
      unfinished_[call.id] = operation;
      if (operation->fate.hold == FakeFate::Hold::kArrival) {
        Hold(world, operation);
      } else if (!operation->fate.lost) {
        endings = Arrive(*world, operation);
      }
    }
    End(std::move(endings));
    return c10d::Work::create_from_future(operation->future);
  }

  void Depart(const std::shared_ptr<World>& world, int rank) {
    std::vector<Ending> endings;
    {
      MutexLock lock(mutex_);
      world->departed.insert(rank);
      for (auto& [number, round] : world->rounds) FailWithoutPeer(*world, round, &endings);
      for (auto& [key, receives] : world->awaited) {
        if (std::get<0>(key) != rank) continue;
        for (const OperationPtr& operation : receives) {
          Settle({.operation = operation, .error = ClosedBy(rank)}, &endings);
        }
        receives.clear();
      }
    }
    End(std::move(endings));
  }

  std::vector<FakeCall> AwaitHeld(size_t count) {
    const absl::Time deadline = clock_.Now() + kHeldTimeout;
    MutexLock lock(mutex_);
    while (held_.size() < count) {
      const absl::Duration left = deadline - clock_.Now();
      if (left <= absl::ZeroDuration()) {
        throw std::runtime_error(absl::StrCat(held_.size(), " operations are held after ",
                                              absl::FormatDuration(kHeldTimeout), ", not ", count));
      }
      changed_.WaitFor(mutex_, left);
    }
    std::vector<FakeCall> calls;
    for (const auto& [id, held] : held_) calls.push_back(held.operation->call);
    std::sort(calls.begin(), calls.end(), [](const FakeCall& a, const FakeCall& b) {
      return std::tie(a.number, a.rank, a.id) < std::tie(b.number, b.rank, b.id);
    });
    return calls;
  }

  void Release(int64_t id) {
    std::vector<Ending> endings;
    {
      MutexLock lock(mutex_);
      const auto found = held_.find(id);
      CHECK(found != held_.end()) << "operation " << id << " is not held";
      const Held held = found->second;
      held_.erase(found);
      if (std::optional<at::Tensor>& result = held.operation->held_result; result.has_value()) {
        const at::Tensor ready = *std::exchange(result, std::nullopt);
        held.operation->fate.hold = FakeFate::Hold::kNothing;
        Settle({.operation = held.operation, .result = ready}, &endings);
      } else {
        endings = Arrive(*held.world, held.operation);
      }
    }
    End(std::move(endings));
  }

 private:
  struct Held {
    std::shared_ptr<World> world;
    OperationPtr operation;
  };

  std::string NewName() {
    MutexLock lock(mutex_);
    return absl::StrCat(next_world_++);
  }

  void Hold(std::shared_ptr<World> world, const OperationPtr& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    held_[operation->call.id] = {std::move(world), operation};
    changed_.NotifyAll();
  }

  // Lets the peers see the operation. Returns the operations that end by that.
  std::vector<Ending> Arrive(World& world, const OperationPtr& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const c10::InferenceMode ordinary(false);
    const at::NoGradGuard no_grad;
    std::vector<Ending> endings;
    if (operation->call.kind == Kind::kSend) {
      ArriveWithMessage(world, operation, &endings);
    } else if (operation->call.kind == Kind::kReceive) {
      ArriveForMessage(world, operation, &endings);
    } else {
      ArriveAtCollective(world, operation, &endings);
    }
    return endings;
  }

  void ArriveAtCollective(World& world, const OperationPtr& operation, std::vector<Ending>* endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Round& round = world.rounds[operation->call.number];
    round.arrived.resize(world.size);
    round.arrived[operation->call.rank] = operation;
    if (operation->call.kind == Kind::kBroadcast) SettleBroadcast(round, operation->root, endings);
    const bool complete =
        std::all_of(round.arrived.begin(), round.arrived.end(), [&](const OperationPtr& arrived) {
          return arrived && Agree(*arrived, *round.arrived.front());
        });
    if (!complete) return FailWithoutPeer(world, round, endings);
    const bool fits = operation->call.kind != Kind::kAllToAll || PartsFit(round);
    if (fits && operation->call.kind != Kind::kBroadcast) {
      for (const OperationPtr& arrived : round.arrived) {
        Settle({.operation = arrived, .result = ResultOf(round, arrived->call.rank)}, endings);
      }
    }
    if (fits) world.rounds.erase(operation->call.number);
  }

  // Ends the broadcast on the ranks that have come, once the root has come.
  void SettleBroadcast(Round& round, int root, std::vector<Ending>* endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const OperationPtr& source = round.arrived[root];
    if (!source) return;
    for (const OperationPtr& arrived : round.arrived) {
      if (!arrived || !Agree(*arrived, *source)) continue;
      const bool is_source = arrived == source;
      Settle({.operation = arrived, .result = is_source ? at::Tensor() : source->input}, endings);
    }
  }

  // Ends the operations of `round` that need a rank which has departed without coming.
  void FailWithoutPeer(const World& world, Round& round, std::vector<Ending>* endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    round.arrived.resize(world.size);
    for (const int rank : world.departed) {
      if (round.arrived[rank]) continue;
      for (const OperationPtr& arrived : round.arrived) {
        if (!arrived || (arrived->root >= 0 && arrived->root != rank)) continue;
        Settle({.operation = arrived, .error = ClosedBy(rank)}, endings);
      }
    }
  }

  void ArriveWithMessage(World& world, const OperationPtr& operation, std::vector<Ending>* endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const std::tuple key(operation->call.rank, operation->peer, operation->tag);
    std::deque<OperationPtr>& receives = world.awaited[key];
    Settle({.operation = operation}, endings);
    if (receives.empty()) {
      world.sent[key].push_back(operation->input);
      return;
    }
    Settle(Received(receives.front(), operation->input), endings);
    receives.pop_front();
  }

  void ArriveForMessage(World& world, const OperationPtr& operation, std::vector<Ending>* endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const std::tuple key(operation->peer, operation->call.rank, operation->tag);
    std::deque<at::Tensor>& messages = world.sent[key];
    if (!messages.empty()) {
      Settle(Received(operation, messages.front()), endings);
      messages.pop_front();
    } else if (world.departed.count(operation->peer) > 0) {
      Settle({.operation = operation, .error = ClosedBy(operation->peer)}, endings);
    } else {
      world.awaited[key].push_back(operation);
    }
  }

  static Ending Received(const OperationPtr& operation, const at::Tensor& message) {
    const size_t expected = operation->output.nbytes();
    if (message.nbytes() == expected) return {.operation = operation, .result = message};
    return {.operation = operation,
            .error = ErrorOf(absl::StrCat("rank ", operation->peer, " sends ", message.nbytes(),
                                          " bytes, and this rank receives ", expected))};
  }

  // Appends the operation's end to `endings`. A second end of one operation, and one that is held,
  // is dropped.
  void Settle(Ending ending, std::vector<Ending>* endings) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Operation& operation = *ending.operation;
    if (operation.ended || operation.held_result.has_value()) return;
    if (!ending.error) ending.error = ErrorOf(operation.fate.error);
    if (!ending.error && operation.fate.hold == FakeFate::Hold::kCompletion) {
      operation.held_result = ending.result;
      return Hold(nullptr, ending.operation);
    }
    operation.ended = true;
    unfinished_.erase(operation.call.id);
    endings->push_back(std::move(ending));
  }

  void End(std::vector<Ending> endings) {
    if (options_.delivery == Delivery::kOwnThread) {
      MutexLock lock(mutex_);
      if (!closed_) {
        for (Ending& ending : endings) queue_.push_back(std::move(ending));
        changed_.NotifyAll();
        return;
      }
    }
    for (const Ending& ending : endings) Deliver(ending);
  }

  // The network's thread.
  void DeliverAll() {
    while (true) {
      Ending next;
      {
        MutexLock lock(mutex_);
        while (queue_.empty() && !closed_) changed_.WaitFor(mutex_, CondVar::kLongestWait);
        if (queue_.empty()) return;
        next = std::move(queue_.front());
        queue_.pop_front();
      }
      Deliver(next);
    }
  }

  const Options options_;
  const MonotonicClock clock_;
  Mutex mutex_;
  CondVar changed_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t next_world_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::shared_ptr<World>> worlds_ ABSL_GUARDED_BY(mutex_);  // connecting
  std::map<int64_t, OperationPtr> unfinished_ ABSL_GUARDED_BY(mutex_);            // by id
  std::map<int64_t, Held> held_ ABSL_GUARDED_BY(mutex_);                          // likewise
  std::deque<Ending> queue_ ABSL_GUARDED_BY(mutex_);  // for the network's thread
  std::thread thread_;                                // kOwnThread
};

namespace {

class FakeBackend final : public c10d::Backend {
 public:
  FakeBackend(std::shared_ptr<FakeNetwork::State> network, std::shared_ptr<World> world,
              const BackendRequest& request)
      : Backend(request.rank, request.size),
        network_(std::move(network)),
        world_(std::move(world)),
        incarnation_(request.incarnation) {}
  ~FakeBackend() override { network_->Depart(world_, getRank()); }

  const std::string getBackendName() const override { return "fake"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    const OperationPtr operation = New(Kind::kAllReduce, tensors.at(0), tensors.at(0));
    operation->reduction = options.reduceOp;
    return network_->Launch(world_, operation);
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    const OperationPtr operation = New(Kind::kBroadcast, tensors.at(0), tensors.at(0));
    operation->root = static_cast<int>(options.rootRank);
    return network_->Launch(world_, operation);
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    return network_->Launch(world_, New(Kind::kAllGather, input, output));
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    const OperationPtr operation = New(Kind::kReduceScatter, input, output);
    operation->reduction = options.reduceOp;
    return network_->Launch(world_, operation);
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_sizes,
                                               std::vector<int64_t>& input_sizes,
                                               const c10d::AllToAllOptions&) override {
    const OperationPtr operation = New(Kind::kAllToAll, input, output);
    operation->output_sizes = output_sizes;
    operation->input_sizes = input_sizes;
    return network_->Launch(world_, operation);
  }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer,
                                      int tag) override {
    const OperationPtr operation = New(Kind::kSend, tensors.at(0), {});
    operation->peer = peer;
    operation->tag = tag;
    return network_->Launch(world_, operation);
  }

  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer,
                                      int tag) override {
    const OperationPtr operation = New(Kind::kReceive, {}, tensors.at(0));
    operation->peer = peer;
    operation->tag = tag;
    return network_->Launch(world_, operation);
  }

 private:
  OperationPtr New(Kind kind, const at::Tensor& input, const at::Tensor& output) const {
    auto operation = std::make_shared<Operation>();
    operation->call = {.kind = kind, .rank = getRank(), .incarnation = incarnation_};
    if (input.defined()) operation->input = CopyOf(input);
    if (input.defined() && !input.is_sparse()) {
      operation->call.bytes = static_cast<int64_t>(input.nbytes());
    }
    operation->output = output;
    return operation;
  }

  const std::shared_ptr<FakeNetwork::State> network_;
  const std::shared_ptr<World> world_;
  const int64_t incarnation_;
};

}  // namespace

FakeNetwork::FakeNetwork(Options options) : state_(std::make_shared<State>(std::move(options))) {}

FakeNetwork::~FakeNetwork() { state_->Close(); }

c10::intrusive_ptr<c10d::Backend> FakeNetwork::Connect(const BackendRequest& request) {
  return c10::make_intrusive<FakeBackend>(state_, state_->Connect(request), request);
}

BackendMaker FakeNetwork::maker() {
  return [this](const BackendRequest& request) { return Connect(request); };
}

std::vector<FakeCall> FakeNetwork::AwaitHeld(size_t count) { return state_->AwaitHeld(count); }

void FakeNetwork::Release(const FakeCall& call) { state_->Release(call.id); }

}  // namespace ddp::testing
