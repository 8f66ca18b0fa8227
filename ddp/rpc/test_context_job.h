// Two trainers and a server whose backward goes over all of them, and messages that are lost or
// late, for the tests of this folder.
#ifndef DDP_RPC_TEST_CONTEXT_JOB_H_
#define DDP_RPC_TEST_CONTEXT_JOB_H_

#include <signal.h>
#include <torch/autograd.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/message.h>
#include <torch/nn.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "ddp/process_group.h"
#include "ddp/rpc/message_fault.h"
#include "ddp/rpc/rpc.h"
#include "gtest/gtest.h"
#include "testing/backend/random_numbers.h"

namespace ddp::rpc::testing {

inline constexpr double kRate = 0.1;

// Throws in the backward.
struct Bomb : torch::autograd::Function<Bomb> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("the bomb went off");
  }
};

// Kills its process in the backward.
struct Death : torch::autograd::Function<Death> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    raise(SIGKILL);
    return {};
  }
};

// Waits in the backward.
struct Stall : torch::autograd::Function<Stall> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    reached.set_value();
    released.get_future().wait();
    return gradients;
  }
  static inline std::promise<void> reached, released;
};

// The server's module: an embedding, and a matrix through which trainers send activations.
class Shard {
 public:
  explicit Shard(bool sparse) : sparse_(sparse) {
    const torch::NoGradGuard no_grad;
    table = ddp::testing::RandomNumbers(1, {10, 4});
    weight = ddp::testing::RandomNumbers(2, {4, 4});
    table.requires_grad_();
    weight.requires_grad_();
    newest_table = table.getIntrusivePtr();
  }
  at::Tensor Lookup(const at::Tensor& ids) const {
    return torch::embedding(table, ids, /*padding_idx=*/-1, /*scale_grad_by_freq=*/false, sparse_);
  }
  at::Tensor Mix(const at::Tensor& x) const { return torch::tanh(torch::matmul(x, weight)); }
  std::vector<at::Tensor> parameters() const { return {table, weight}; }
  std::vector<at::Tensor> Values() const { return {table.detach(), weight.detach()}; }
  void Load(const std::vector<at::Tensor>& values) const {
    table.detach().copy_(values[0]);
    weight.detach().copy_(values[1]);
  }

  at::Tensor table, weight;
  static inline c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> newest_table{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};

 private:
  const bool sparse_;
};

// The trainer's module. `mix` runs between its layers, on the server.
struct NetImpl : torch::nn::Module {
  using Mix = std::function<at::Tensor(const at::Tensor&)>;
  explicit NetImpl(Mix the_mix) : mix(std::move(the_mix)) {
    first = register_module("first", torch::nn::Linear(4, 4));
    second = register_module("second", torch::nn::Linear(4, 3));
    spare = register_module("spare", torch::nn::Linear(4, 3));
    ddp::testing::Randomize(*this, 10);
  }
  at::Tensor forward(const at::Tensor& x, bool use_spare) {
    const at::Tensor h = mix(first->forward(x));
    at::Tensor y = second->forward(h);
    if (use_spare) y = y + spare->forward(h);
    return y;
  }
  Mix mix;
  torch::nn::Linear first{nullptr}, second{nullptr}, spare{nullptr};
};
TORCH_MODULE(Net);

inline at::Tensor Ids(int rank, int step) {
  return torch::tensor({(3 * rank + step) % 10, (7 + step) % 10, (3 * rank + step) % 10});
}

// Returns whether a trainer uses the spare layer: in turn, one of them does, none, both.
inline bool UsesSpare(int rank, int step) { return step % 3 == 2 || (step % 3 == 0 && rank == 1); }

// Loses or delays messages of this worker.
class Faults final : public internal::MessageFault, public std::enable_shared_from_this<Faults> {
 public:
  enum Fate {
    kLost,
    kAnswerLost,
    kHeld,     // until Release()
    kTooLate,  // the same; and the answer is lost
  };

  // When the sender of a lost message gives up; nullopt: at its own limit. Set it before Next().
  std::optional<std::chrono::milliseconds> limit = std::chrono::seconds(1);

  // The next message of `type` to worker 2 has this fate.
  void Next(torch::distributed::rpc::MessageType type, Fate fate, int worker = 2) {
    const MutexLock lock(mutex_);
    next_[{type, worker}] = fate;
  }

  // Sends the held message.
  void Release() {
    std::function<void()> send;
    {
      const MutexLock lock(mutex_);
      send = std::exchange(held_, nullptr);
    }
    send();
  }
  bool holds() const {
    const MutexLock lock(mutex_);
    return held_ != nullptr;
  }

  // The number of messages of `type` without a fate that have been answered.
  int answered(int type) {
    const MutexLock lock(mutex_);
    return answered_[type];
  }

  FuturePtr OnSend(const Message& message) override {
    const std::optional<Fate> fate = Take(message);
    if (!fate.has_value()) {
      FuturePtr answer = message.send();
      answer->addCallback([self = shared_from_this(), type = message.type](Future&) {
        const MutexLock lock(self->mutex_);
        ++self->answered_[type];
      });
      return answer;
    }
    if (fate == kAnswerLost) message.send();
    if (fate == kTooLate) Hold(message.send);
    if (fate != kHeld) return message.lose(limit);
    auto answer = c10::make_intrusive<Future>(c10::AnyClassType::get());
    Hold([answer, send = message.send] {
      send()->addCallback([answer](Future& sent) {
        if (sent.hasError()) return answer->setError(sent.exception_ptr());
        answer->markCompleted(sent.constValue(), sent.storages());
      });
    });
    return answer;
  }

 private:
  std::optional<Fate> Take(const Message& message) {
    const MutexLock lock(mutex_);
    const auto found = next_.find({message.type, message.worker});
    if (found == next_.end()) return std::nullopt;
    const Fate fate = found->second;
    next_.erase(found);
    return fate;
  }
  void Hold(std::function<void()> send) {
    const MutexLock lock(mutex_);
    held_ = std::move(send);
  }

  mutable Mutex mutex_;
  std::map<std::pair<int, int>, Fate> next_ ABSL_GUARDED_BY(mutex_);  // by type and receiver
  std::map<int, int> answered_ ABSL_GUARDED_BY(mutex_);               // by type
  std::function<void()> held_ ABSL_GUARDED_BY(mutex_);
};

// Two trainers and a server, "worker2".
struct Job {
  explicit Job(Registry registry = {}, const Options::Faults& faults = {},
               std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
    registry.module<Shard, bool>("Shard")
        .method("lookup", &Shard::Lookup)
        .method("mix", &Shard::Mix)
        .method("values", &Shard::Values)
        .method("load", &Shard::Load);
    registry.function("contexts", [] {
      return static_cast<int64_t>(
          torch::distributed::autograd::DistAutogradContainer::getInstance().numAutogradContexts());
    });
    registry.function("table_alive", [] { return !Shard::newest_table.expired(); });
    registry.function("shared", [this]() -> RRef<Shard> { return *shared; });
    registry.function("plus_one", [this](at::Tensor x) {
      ++plus_ones;
      return x + 1;
    });
    registry.function("plus_ones", [this] { return plus_ones.load(); });
    registry.function("next_fault", [this](int type, int fate, int receiver) {
      own_faults->Next(static_cast<torch::distributed::rpc::MessageType>(type),
                       static_cast<Faults::Fate>(fate), receiver);
    });
    registry.function("release_next", [this] {
      while (!own_faults->holds()) std::this_thread::yield();
      own_faults->Release();
    });
    registry.function("count", [](at::Tensor x) { return x.numel(); });
    registry.function("bomb", [](at::Tensor x) { return Bomb::apply(x); });
    registry.function("stall", [](at::Tensor x) { return Stall::apply(x); });
    registry.function("stalled", [] { Stall::reached.get_future().wait(); });
    registry.function("death", [](at::Tensor x) { return Death::apply(x); });
    registry.function("fail", []() -> at::Tensor { throw std::runtime_error("no answer"); });
    const int rank = world->rank();
    trainers = world->new_group({0, 1});
    workers = internal::InitWithFault("worker" + std::to_string(rank), world->store(),
                                      {.rank = rank,
                                       .world_size = world->size(),
                                       .registry = std::move(registry),
                                       .timeout = timeout,
                                       .faults = faults},
                                      own_faults);
  }
  int rank() const { return world->rank(); }

  // Makes a shard on the server, and returns it on all trainers.
  RRef<Shard> MakeShard(bool sparse = false) {
    if (rank() == 0) shared = remote<Shard>("worker2", sparse);
    trainers->barrier();
    const RRef<Shard> shard = rank() == 0 ? *shared : sync<RRef<Shard>>("worker0", "shared");
    trainers->barrier();
    shared.reset();
    return shard;
  }

  std::atomic<int> plus_ones = 0;  // calls
  const std::shared_ptr<Faults> own_faults = std::make_shared<Faults>();
  std::optional<RRef<Shard>> shared;
  std::shared_ptr<ProcessGroup> world = init_process_group();
  std::shared_ptr<ProcessGroup> trainers;  // null on the server
  std::unique_ptr<Workers> workers;
};

inline NetImpl::Mix MixOn(const RRef<Shard>& shard) {
  return [shard](const at::Tensor& x) { return shard.sync<at::Tensor>("mix", x); };
}

inline void ExpectEqual(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].scalar_type(), b[i].scalar_type()) << i;
    EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
  }
}

}  // namespace ddp::rpc::testing

#endif  // DDP_RPC_TEST_CONTEXT_JOB_H_
