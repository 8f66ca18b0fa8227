// Tests backwards over several workers, and the reduction of wrapped models in them. Workers are
// processes; trainers have a process group of their own, on Gloo.
//
// Length: one case for each way in which such a backward ends, on the same two modules.
#include "ddp/rpc/autograd_context.h"

#include <signal.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/message.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "base/mutex.h"
#include "ddp/activation_checkpoint.h"
#include "ddp/default_hooks.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/join.h"
#include "ddp/nn/sync_batch_norm.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "ddp/process_group.h"
#include "ddp/rpc/message_fault.h"
#include "ddp/rpc/rpc.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/random_numbers.h"
#include "testing/error_of.h"
#include "testing/ranks/rank_test.h"

namespace ddp::rpc {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::Randomize;
using ::ddp::testing::RandomNumbers;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using torch::distributed::autograd::DistAutogradContainer;

constexpr double kRate = 0.1;

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

// Has no gradient in the backward.
struct Vanish : torch::autograd::Function<Vanish> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {at::Tensor()};
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
    table = RandomNumbers(1, {10, 4});
    weight = RandomNumbers(2, {4, 4});
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
    Randomize(*this, 10);
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

// A layer whose weight has no gradient where `vanish` is set.
struct VanishingImpl : torch::nn::Module {
  VanishingImpl() {
    layer = register_module("layer", torch::nn::Linear(4, 3));
    Randomize(*this, 11);
  }
  at::Tensor forward(const at::Tensor& x, bool vanish) {
    const at::Tensor weight = vanish ? Vanish::apply(layer->weight) : layer->weight;
    return torch::linear(x, weight, layer->bias);
  }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Vanishing);

at::Tensor Ids(int rank, int step) {
  return torch::tensor({(3 * rank + step) % 10, (7 + step) % 10, (3 * rank + step) % 10});
}

// Returns whether a trainer uses the spare layer: in turn, one of them does, none, both.
bool UsesSpare(int rank, int step) { return step % 3 == 2 || (step % 3 == 0 && rank == 1); }

// The training in one process: gradients of the trainers are halved and added, as the reducer does;
// the server's parameters take the steps of one trainer after the other.
struct Reference {
  explicit Reference(bool sparse) : shard(sparse) {}
  Shard shard;
  Net net{[this](const at::Tensor& x) { return shard.Mix(x); }};

  void Step(int step, bool with_spare) {
    const size_t dense = net->parameters().size();
    std::vector<at::Tensor> all = net->parameters();
    for (const at::Tensor& parameter : shard.parameters()) all.push_back(parameter);
    std::vector<std::vector<at::Tensor>> gradients;
    for (int rank = 0; rank < 2; ++rank) {
      const bool use = with_spare && UsesSpare(rank, step);
      const at::Tensor loss = net->forward(shard.Lookup(Ids(rank, step)), use).pow(2).mean();
      gradients.push_back(torch::autograd::grad({loss}, all, {}, false, false,
                                                /*allow_unused=*/true));
    }
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < all.size(); ++i) {
      const at::Tensor a = gradients[0][i];
      const at::Tensor b = gradients[1][i];
      if (i >= dense) {
        all[i].add_(a, -kRate).add_(b, -kRate);
      } else if (a.defined() || b.defined()) {
        const at::Tensor zero = torch::zeros_like(all[i]);
        all[i].sub_((a.defined() ? a * 0.5 : zero) + (b.defined() ? b * 0.5 : zero), kRate);
      }
    }
  }
};

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

constexpr auto kForward = torch::distributed::rpc::FORWARD_AUTOGRAD_REQ;
constexpr auto kBackward = torch::distributed::rpc::BACKWARD_AUTOGRAD_REQ;
constexpr auto kCleanup = torch::distributed::rpc::CLEANUP_AUTOGRAD_CONTEXT_REQ;

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
      return static_cast<int64_t>(DistAutogradContainer::getInstance().numAutogradContexts());
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

NetImpl::Mix MixOn(const RRef<Shard>& shard) {
  return [shard](const at::Tensor& x) { return shard.sync<at::Tensor>("mix", x); };
}

// ---- Wrapped models.

struct Mode {
  DistributedDataParallelOptions options;
  bool with_spare = false;
  bool sparse = false;
  bool hook = false;
};

void TrainAsInOneProcess(Job& job, const Mode& mode) {
  ProcessGroup& group = *job.trainers;
  const RRef<Shard> shard = job.MakeShard(mode.sparse);
  Net net(MixOn(shard));
  DistributedDataParallel model(net, job.trainers, mode.options);
  if (mode.hook) model.register_comm_hook(job.trainers, allreduce_hook);
  DistributedOptimizer optimizer(sgd(kRate), {shard}, net->parameters());
  Reference reference(mode.sparse);
  for (int step = 0; step < 6; ++step) {
    AutogradContext context;
    const at::Tensor rows = shard.sync<at::Tensor>("lookup", Ids(group.rank(), step));
    const bool use = mode.with_spare && UsesSpare(group.rank(), step);
    context.backward(model.forward(rows, use).pow(2).mean());
    for (const at::Tensor& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == group.rank()) optimizer.step(context);
      group.barrier();
    }
    reference.Step(step, mode.with_spare);
    const auto expected = reference.net->named_parameters();
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(torch::equal(item.value(), expected[item.key()]))
          << item.key() << " in step " << step;
    }
    const auto values = shard.sync<std::vector<at::Tensor>>("values");
    EXPECT_TRUE(torch::equal(values[0], reference.shard.table)) << step;
    EXPECT_TRUE(torch::equal(values[1], reference.shard.weight)) << step;
    group.barrier();
  }
}

RANK_TEST(AutogradContextTest, WrappedModelsTrainAsInOneProcess, 3) {
  Job job;
  if (job.trainers) {
    const double tiny = 1e-5;
    const std::vector<Mode> modes = {
        {{.params_and_buffers_to_ignore = {"spare.weight", "spare.bias"}}},
        {{.find_unused_parameters = true}, true},
        {{.bucket_cap_mb = tiny, .find_unused_parameters = true}, true, /*sparse=*/true},
        {{.bucket_cap_mb = tiny, .gradient_as_bucket_view = true, .find_unused_parameters = true},
         true},
        {{.bucket_cap_mb = tiny,
          .gradient_as_bucket_view = true,
          .find_unused_parameters = true,
          .skip_all_reduce_unused_params = true},
         true},
        {{.bucket_cap_mb = tiny, .lazy_bucket_allocation = true, .find_unused_parameters = true},
         true},
        {{.bucket_cap_mb = tiny, .find_unused_parameters = true}, true, false, /*hook=*/true},
        {{.bucket_cap_mb = tiny, .batched_grad_copy = true, .find_unused_parameters = true}, true},
        {{.bucket_cap_mb = tiny, .static_graph = true}},
        {{.bucket_cap_mb = tiny, .gradient_as_bucket_view = true, .static_graph = true}},
    };
    for (size_t i = 0; i < modes.size(); ++i) {
      SCOPED_TRACE(i);
      TrainAsInOneProcess(job, modes[i]);
    }
  }
  job.workers->shutdown();
}

// LibTorch has one thread here for all that the trainers do for each other. A thread that waited
// for the other trainer's gradients would never serve that trainer's graph.
RANK_TEST(AutogradContextTest, OneThreadIsEnough, 2) {
  at::set_num_interop_threads(1);
  Registry registry;
  const at::Tensor weight = RandomNumbers(5, {4, 4}).requires_grad_();
  registry.function("serve", [weight](at::Tensor x) { return torch::matmul(x, weight); });
  Job job(std::move(registry));
  const std::string peer = "worker" + std::to_string(1 - job.rank());
  Net net([&](const at::Tensor& x) { return sync<at::Tensor>(peer, "serve", x); });
  DistributedDataParallel model(net, job.trainers,
                                {.bucket_cap_mb = 1e-5, .find_unused_parameters = true});
  for (int step = 0; step < 8; ++step) {
    AutogradContext context;
    context.backward(model.forward(RandomNumbers(step, {2, 4}), true).sum());
    EXPECT_TRUE(context.grad(net->first->weight).defined());
    EXPECT_TRUE(context.grad(net->spare->weight).defined());
  }
  job.workers->shutdown();
}

// Autograd calls the hooks of a parameter also for an undefined gradient.
RANK_TEST(AutogradContextTest, AnUndefinedGradientIsAsInAPlainBackward, 3) {
  Job job;
  if (job.trainers) {
    for (const DistributedDataParallelOptions& options :
         {DistributedDataParallelOptions{},
          DistributedDataParallelOptions{.find_unused_parameters = true},
          DistributedDataParallelOptions{.gradient_as_bucket_view = true}}) {
      Vanishing plain;
      Vanishing contextual;
      DistributedDataParallel plain_model(plain, job.trainers, options);
      DistributedDataParallel model(contextual, job.trainers, options);
      for (int step = 0; step < 4; ++step) {
        SCOPED_TRACE(step);
        const bool vanish = step == 2 || step % 2 == job.rank();
        const at::Tensor x = RandomNumbers(10 * job.rank() + step, {2, 4});
        for (at::Tensor& parameter : plain->parameters()) parameter.mutable_grad() = at::Tensor();
        plain_model.forward(x + 1, vanish).pow(2).sum().backward();
        AutogradContext context;
        const at::Tensor y = sync<at::Tensor>("worker2", "plus_one", x);
        context.backward(model.forward(y, vanish).pow(2).sum());
        for (size_t i = 0; i < plain->parameters().size(); ++i) {
          const at::Tensor expected = plain->parameters()[i].grad();
          const at::Tensor gradient = context.grad(contextual->parameters()[i]);
          ASSERT_EQ(gradient.defined(), expected.defined()) << i;
          EXPECT_TRUE(!expected.defined() || torch::equal(gradient, expected)) << i;
        }
      }
    }
  }
  job.workers->shutdown();
}

// ---- Contexts without a wrapped model.

RANK_TEST(AutogradContextTest, GradientsAreThoseOfOneProcess, 3) {
  Job job;
  if (job.rank() == 0) {
    const RRef<Shard> shard = remote<Shard>("worker2", false);
    const at::Tensor x = RandomNumbers(3, {2, 4}).requires_grad_();
    const at::Tensor unused = torch::ones({1}).requires_grad_();
    const Shard local(false);
    const at::Tensor loss = (local.Mix(x * 2) * local.Lookup(Ids(0, 0)).sum()).sum();
    const std::vector<at::Tensor> expected = torch::autograd::grad({loss}, {x});
    {
      AutogradContext context;
      Future<at::Tensor> mixed = shard.async<at::Tensor>("mix", x * 2);
      Future<at::Tensor> rows = shard.async<at::Tensor>("lookup", Ids(0, 0));
      const at::Tensor total = (mixed.wait() * rows.wait().sum()).sum();
      EXPECT_TRUE(torch::equal(total, loss));
      context.backward(total, /*retain_graph=*/true);
      EXPECT_TRUE(torch::equal(context.grad(x), expected[0]));
      EXPECT_FALSE(x.grad().defined());
      EXPECT_FALSE(context.grad(unused).defined());
      context.backward(total);  // adds
      EXPECT_TRUE(torch::equal(context.grad(x), expected[0] * 2));
      EXPECT_EQ(sync<int>("worker2", "contexts"), 1);
    }
    // The message of a context's end is not awaited.
    while (sync<int>("worker2", "contexts") > 0) continue;
    EXPECT_THROW(AutogradContext().backward(torch::ones({})), ConfigurationError);
    EXPECT_THROW(AutogradContext().backward(torch::ones({}).requires_grad_()), ConfigurationError);
  }
  job.workers->shutdown();
}

// The way back to the argument leads through other workers alone.
RANK_TEST(AutogradContextTest, AFunctionMayPassItsArgumentOn, 3) {
  Registry registry;
  registry.function("relay", [](at::Tensor x) {
    const at::Tensor y = sync<at::Tensor>("worker2", "plus_one", x);
    return sync<at::Tensor>("worker2", "plus_one", y);
  });
  Job job(std::move(registry));
  if (job.rank() == 0) {
    const at::Tensor x = torch::ones({2}).requires_grad_();
    AutogradContext context;
    context.backward(sync<at::Tensor>("worker1", "relay", x * 3).sum());
    EXPECT_TRUE(torch::equal(context.grad(x), torch::full({2}, 3.0)));
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, CheckpointsThatAreNotReentrantWork, 3) {
  Job job;
  if (job.rank() == 0) {
    const at::Tensor x = RandomNumbers(3, {2, 4}).requires_grad_();
    const auto segment = [](const at::Tensor& t) { return torch::tanh(t) * t; };
    const at::Tensor expected = torch::autograd::grad({segment(x + 1).sum()}, {x})[0];
    for (const bool reentrant : {false, true}) {
      AutogradContext context;
      const at::Tensor y = sync<at::Tensor>("worker2", "plus_one", x);
      const at::Tensor z = checkpoint({.use_reentrant = reentrant}, segment, y);
      const auto backward = [&] { context.backward(z.sum()); };
      if (reentrant) {
        EXPECT_THAT(ErrorOf<RemoteError>(backward),
                    AllOf(HasSubstr("worker0"), HasSubstr("a reentrant checkpoint works in")));
      } else {
        backward();
        EXPECT_TRUE(torch::equal(context.grad(x), expected));
      }
    }
  }
  job.workers->shutdown();
}

// The message of a context's end is lost once, and sent again.
RANK_TEST(AutogradContextTest, ALostEndOfAContextIsRepeated, 3) {
  Job job({}, {.lost = {"CLEANUP_AUTOGRAD_CONTEXT_REQ"}, .losses = 1});
  if (job.rank() == 0) {
    {
      AutogradContext context;
      context.backward(
          sync<at::Tensor>("worker2", "plus_one", torch::ones({2}).requires_grad_()).sum());
    }
    while (sync<int>("worker2", "contexts") > 0) continue;
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, AGradientThatNeverComesIsAnErrorAtOnce, 3) {
  Registry registry;
  registry.function("forgetful", [](at::Tensor x) {
    sync<at::Tensor>("worker1", "plus_one", x);
    return x * 2;
  });
  const at::Tensor weight = torch::ones({2}).requires_grad_();
  registry.function("ignores", [weight](at::Tensor x) { return weight * 2; });
  registry.function("leaf", [weight](at::Tensor x) { return weight; });
  registry.function("relay",
                    [](at::Tensor x) { return x + sync<at::Tensor>("worker1", "ignores", x); });
  Job job(std::move(registry));
  if (job.rank() == 0) {
    const at::Tensor x = torch::ones({2}).requires_grad_();
    const auto problem = [&](const std::function<at::Tensor()>& forward) {
      AutogradContext context;
      const at::Tensor loss = forward().sum();
      return ErrorOf<ConfigurationError>([&] { context.backward(loss); });
    };
    const auto plus_one = [](const at::Tensor& t) {
      return async<at::Tensor>("worker2", "plus_one", t);
    };
    EXPECT_THAT(problem([&] {
                  plus_one(x).wait();
                  return x * 2;
                }),
                HasSubstr("the loss does not depend on the answer of plus_one on worker worker2"));
    EXPECT_THAT(problem([&] {
                  plus_one(x);
                  return x * 2;
                }),
                HasSubstr("the answer of plus_one on worker worker2 was not taken"));
    EXPECT_THAT(problem([&] { return x * sync<int64_t>("worker2", "count", x); }),
                HasSubstr("the call of count on worker worker2 sent a tensor"));
    EXPECT_THAT(problem([&] {
                  EXPECT_THROW(sync<at::Tensor>("worker2", "fail"), RemoteError);
                  return plus_one(x).wait();
                }),
                AllOf(HasSubstr("the call of fail on worker worker2 failed in this context"),
                      HasSubstr("no answer")));
    EXPECT_THAT(problem([&] { return x.detach(); }), HasSubstr("scalars that require gradients"));
    EXPECT_THAT(problem([&] {
                  EXPECT_THAT(ErrorOf<ConfigurationError>([] { AutogradContext another; }),
                              HasSubstr("open rpc::AutogradContext"));
                  return plus_one(x).wait();
                }),
                "no error");
    // Allowed: no gradient, or no argument that needs one.
    EXPECT_EQ(problem([&] {
                sync<int64_t>("worker2", "count", x.detach());
                const torch::NoGradGuard no_grad;
                EXPECT_FALSE(plus_one(x).wait().requires_grad());
                const at::AutoGradMode with_gradients(true);
                return plus_one(x).wait();
              }),
              "no error");
    // The answer's gradient leads to the callee's own parameter alone.
    EXPECT_EQ(problem([&] { return sync<at::Tensor>("worker2", "ignores", x.detach()); }),
              "no error");
    AutogradContext context;
    for (const char* function : {"ignores", "leaf", "relay"}) {
      EXPECT_THAT(ErrorOf<RemoteError>([&] { sync<at::Tensor>("worker2", function, x); }),
                  AllOf(HasSubstr(function), HasSubstr("does not depend on the argument that")));
    }
    EXPECT_THAT(ErrorOf<RemoteError>([&] { sync<at::Tensor>("worker2", "forgetful", x); }),
                AllOf(HasSubstr("within forgetful"), HasSubstr("plus_one on worker worker1")));
  }
  job.workers->shutdown();
}

// ---- Failures.

// The trainer whose graph fails throws the server's words; the other one gets a failure report.
// Both train on in the next context.
RANK_TEST(AutogradContextTest, AnExceptionOnTheServerHangsNobody, 3) {
  Job job;
  if (job.trainers) {
    bool bomb = false;
    Net net([&](const at::Tensor& x) {
      return sync<at::Tensor>("worker2", bomb ? "bomb" : "plus_one", x);
    });
    DistributedDataParallel model(net, job.trainers, {.find_unused_parameters = true});
    for (int step = 0; step < 4; ++step) {
      bomb = step == 1 && job.rank() == 0;
      const auto train = [&] {
        AutogradContext context;
        context.backward(model.forward(torch::ones({2, 4}), false).sum());
        EXPECT_TRUE(context.grad(net->first->weight).defined());
      };
      if (step != 1) {
        train();
      } else if (bomb) {
        EXPECT_THAT(ErrorOf<RemoteError>(train),
                    AllOf(HasSubstr("worker2"), HasSubstr("the bomb went off")));
      } else {
        EXPECT_THAT(ErrorOf<PeerFailedError>(train), HasSubstr("rank 0"));
      }
    }
  }
  job.workers->shutdown();
}

// The server's part comes after the wrapped model, so the backward fails before it comes to that.
RANK_TEST(AutogradContextTest, AnExceptionBeforeTheModelHangsNobody, 3) {
  Job job;
  if (job.trainers) {
    Net net([](const at::Tensor& x) { return x; });
    DistributedDataParallel model(net, job.trainers, {.find_unused_parameters = true});
    Net other([](const at::Tensor& x) { return x; });
    DistributedDataParallel other_model(other, job.trainers, {.find_unused_parameters = true});
    for (int step = 0; step < 4; ++step) {
      const bool bomb = step == 1 && job.rank() == 0;
      const auto train = [&] {
        AutogradContext context;
        const at::Tensor x = torch::full({2, 4}, 1.0 + step);
        const at::Tensor y = model.forward(x, false);
        context.backward(sync<at::Tensor>("worker2", bomb ? "bomb" : "plus_one", y).sum());
        EXPECT_TRUE(torch::equal(context.grad(net->first->bias), [&] {
          const at::Tensor loss = other->forward(x, false).sum();
          return torch::autograd::grad({loss}, {other->first->bias})[0];
        }()));
      };
      if (step != 1) {
        train();
      } else if (bomb) {
        EXPECT_THAT(ErrorOf<RemoteError>(train),
                    AllOf(HasSubstr("worker2"), HasSubstr("the bomb went off")));
      } else {
        EXPECT_THAT(ErrorOf<PeerFailedError>(train), HasSubstr("rank 0"));
      }
    }
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, AnExceptionOnATrainerHangsNobody, 3) {
  Job job;
  if (job.trainers) {
    const RRef<Shard> shard = job.MakeShard();
    bool bomb = false;
    Net net([&](const at::Tensor& x) {
      const at::Tensor y = bomb ? Bomb::apply(x) : x;
      return shard.sync<at::Tensor>("mix", y);
    });
    DistributedDataParallel model(net, job.trainers, {.find_unused_parameters = true});
    for (int step = 0; step < 4; ++step) {
      bomb = step == 1 && job.rank() == 1;
      const auto train = [&] {
        AutogradContext context;
        context.backward(model.forward(torch::ones({2, 4}), false).sum());
      };
      if (step != 1) {
        train();
      } else if (bomb) {
        EXPECT_THAT(ErrorOf<RemoteError>(train),
                    AllOf(HasSubstr("worker1"), HasSubstr("the bomb went off")));
      } else {
        EXPECT_THAT(ErrorOf<PeerFailedError>(train), HasSubstr("rank 1"));
      }
    }
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, TheServersDeathEndsTheBackward, .world_size = 3, .killed_rank = 2) {
  Job job;
  if (!job.trainers) return job.workers->shutdown();
  Net net([&](const at::Tensor& x) {
    return sync<at::Tensor>("worker2", job.rank() == 0 ? "death" : "plus_one", x);
  });
  DistributedDataParallel model(net, job.trainers, {.find_unused_parameters = true});
  std::optional<AutogradContext> context;
  context.emplace();
  const std::string error = ErrorOf<PeerFailedError>([&] {
    // Trainer 1 may hear of it in its forward, in its backward, or in the reduction.
    context->backward(model.forward(torch::ones({2, 4}), false).sum());
  });
  EXPECT_THAT(error, HasSubstr("worker2"));
}

// A plain backward would run into an assertion of LibTorch.
RANK_TEST(AutogradContextTest, APlainBackwardThroughACallIsRefused, 3) {
  Job job;
  if (job.rank() == 1) {
    // Its own backward is right. The peer may have launched all of its reductions before the error.
    Net net([](const at::Tensor& x) { return x; });
    DistributedDataParallel model(net, job.trainers, {.find_unused_parameters = true});
    const auto train = [&] {
      for (int step = 0; step < 2; ++step) {
        model.forward(torch::ones({2, 4}), false).sum().backward();
      }
    };
    EXPECT_THAT(ErrorOf<PeerFailedError>(train),
                AllOf(HasSubstr("rank 0"), HasSubstr("ended the backward")));
  } else if (job.rank() == 0) {
    Net net([](const at::Tensor& x) { return sync<at::Tensor>("worker2", "plus_one", x); });
    DistributedDataParallel model(net, job.trainers, {.find_unused_parameters = true});
    at::Tensor after;
    {
      AutogradContext context;
      EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                    model.forward(torch::ones({2, 4}), false).sum().backward();
                  }),
                  AllOf(HasSubstr("the answer of plus_one on worker worker2"),
                        HasSubstr("call context.backward(loss)")));
      const at::Tensor x = torch::ones({2}).requires_grad_();
      after = sync<at::Tensor>("worker2", "plus_one", x).sum();
    }
    EXPECT_THAT(ErrorOf<ConfigurationError>([&] { after.backward(); }),
                HasSubstr("call context.backward(loss)"));
  }
  job.workers->shutdown();
}

// The server lives, and its graph stands still: the report of a third worker ends the backward.
RANK_TEST(AutogradContextTest, AFailureReportEndsABackward, 3) {
  Job job;
  if (job.rank() == 0) {
    const at::Tensor x = torch::ones({2}).requires_grad_();
    AutogradContext context;
    const at::Tensor loss = sync<at::Tensor>("worker2", "stall", x).sum();
    EXPECT_THAT(ErrorOf<PeerFailedError>([&] { context.backward(loss); }),
                HasSubstr("worker worker1 failed: out of memory"));
  } else if (job.rank() == 1) {
    sync<void>("worker2", "stalled");
    job.workers->report_failure("out of memory");
  } else {
    EXPECT_THROW(job.workers->barrier(), PeerFailedError);
    Stall::released.set_value();
  }
}

// ---- Lost and late messages.

constexpr char kNoAnswer[] = "no answer in time from worker worker2: RPC ran for more than set";

// A call of "plus_one" of the server, and its backward.
struct PlusOne {
  at::Tensor x = torch::ones({2}).requires_grad_();
  AutogradContext context;
  at::Tensor loss = sync<at::Tensor>("worker2", "plus_one", x * 3).sum();

  void Backward() { context.backward(loss); }
  void ExpectGradient() {
    Backward();
    EXPECT_TRUE(torch::equal(context.grad(x), torch::full({2}, 3.0)));
  }
};

// The message of a context's end is not awaited.
void AwaitEndOfContexts(const std::string& worker) {
  while (sync<int>(worker, "contexts") > 0) continue;
}

RANK_TEST(AutogradContextTest, ALostCallNamesTheWorker, 3) {
  Job job;
  if (job.rank() == 0) {
    job.own_faults->limit = std::nullopt;
    for (const Faults::Fate fate : {Faults::kLost, Faults::kAnswerLost, Faults::kTooLate}) {
      SCOPED_TRACE(fate);
      {
        const at::Tensor x = torch::ones({2}).requires_grad_();
        AutogradContext context;
        job.own_faults->Next(kForward, fate);
        const Callee hasty("worker2", std::chrono::milliseconds(200));
        EXPECT_THAT(ErrorOf<TimeoutError>([&] { sync<at::Tensor>(hasty, "plus_one", x); }),
                    AllOf(HasSubstr("plus_one on worker worker2: "), HasSubstr(kNoAnswer)));
        EXPECT_THAT(ErrorOf<ConfigurationError>([&] { context.backward((x * 2).sum()); }),
                    HasSubstr("the call of plus_one on worker worker2 failed in this context"));
      }
      AwaitEndOfContexts("worker2");
      if (fate == Faults::kTooLate) {
        const int before = sync<int>("worker2", "plus_ones");
        job.own_faults->Release();
        while (sync<int>("worker2", "plus_ones") == before) continue;
      }
      PlusOne().ExpectGradient();
      AwaitEndOfContexts("worker2");
    }
  }
  job.workers->shutdown();
}

// Trainer 0 loses a message, and trainer 1 the answer of a message. Then the server loses the
// gradients for trainer 0.
RANK_TEST(AutogradContextTest, ALostMessageOfABackwardNamesTheWorker, 3) {
  Registry registry;
  std::shared_ptr<Faults> faults;
  registry.function("lose", [&faults] { faults->Next(kBackward, Faults::kLost, /*worker=*/0); });
  Job job(std::move(registry));
  faults = job.own_faults;
  job.workers->barrier();
  if (job.trainers) {
    for (const bool by_server : {false, true}) {
      SCOPED_TRACE(by_server);
      if (!by_server || job.rank() == 0) {
        PlusOne step;
        if (by_server) {
          sync<void>("worker2", "lose");
        } else {
          faults->Next(kBackward, job.rank() == 0 ? Faults::kLost : Faults::kAnswerLost);
        }
        EXPECT_THAT(ErrorOf<TimeoutError>([&] { step.Backward(); }),
                    StartsWith(by_server ? "backward on worker worker2: no answer in time from "
                                           "worker worker0: RPC ran for more than set timeout"
                                         : std::string("backward: ") + kNoAnswer));
        faults->Next(kCleanup, Faults::kLost);  // the message is repeated
      }
      job.trainers->barrier();
      PlusOne().ExpectGradient();
      job.trainers->barrier();
    }
    AwaitEndOfContexts("worker2");
    AwaitEndOfContexts("worker" + std::to_string(job.rank()));
  }
  job.workers->shutdown();
}

// The failure of a worker that the server waits for is no failure of the server.
RANK_TEST(AutogradContextTest, AFailureBehindTheServerNamesTheRightWorker, .world_size = 3,
          .killed_rank = 1) {
  Registry registry;
  registry.function("relay", [](at::Tensor x) { return sync<at::Tensor>("worker1", "death", x); });
  Job job(std::move(registry));
  if (job.rank() != 0) {
    EXPECT_THAT(ErrorOf<PeerFailedError>([&] { job.workers->shutdown(); }), HasSubstr("worker1"));
    return;
  }
  const at::Tensor x = torch::ones({2}).requires_grad_();
  AutogradContext context;
  const at::Tensor loss = sync<at::Tensor>("worker2", "relay", x).sum();
  EXPECT_THAT(ErrorOf<PeerFailedError>([&] { context.backward(loss); }),
              StartsWith("worker worker1 is gone"));
}

// The trainer whose message is lost throws the server's name after Options::timeout; the other one
// gets a failure report.
RANK_TEST(AutogradContextTest, ALostMessageEndsTheReductionOfAllTrainers, 3) {
  Job job({}, {}, std::chrono::seconds(10));
  if (job.trainers) {
    job.own_faults->limit = std::nullopt;
    Net net([&](const at::Tensor& x) { return sync<at::Tensor>("worker2", "plus_one", x); });
    DistributedDataParallel model(net, job.trainers, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      const auto train = [&] {
        AutogradContext context;
        const at::Tensor loss = model.forward(torch::ones({2, 4}), false).sum();
        if (step == 1 && job.rank() == 0) job.own_faults->Next(kBackward, Faults::kLost);
        context.backward(loss);
        EXPECT_TRUE(context.grad(net->first->weight).defined());
      };
      if (step != 1) {
        train();
      } else if (job.rank() == 0) {
        EXPECT_THAT(ErrorOf<TimeoutError>(train),
                    AllOf(HasSubstr(kNoAnswer), HasSubstr("10000 ms")));
      } else {
        EXPECT_THAT(ErrorOf<PeerFailedError>(train), HasSubstr("rank 0"));
      }
    }
  }
  job.workers->shutdown();
}

// A held message of trainer 0 goes out when trainer 1 has done a complete step.
RANK_TEST(AutogradContextTest, ALateMessageOfABackwardIsWaitedFor, 2) {
  Registry registry;
  std::shared_ptr<Faults> faults;
  registry.function("release", [&faults] {
    while (!faults->holds()) std::this_thread::yield();
    faults->Release();
  });
  registry.function("serve", [](at::Tensor x) { return x + 1; });
  Job job(std::move(registry));
  faults = job.own_faults;
  job.workers->barrier();
  const at::Tensor x = torch::ones({2}).requires_grad_();
  {
    AutogradContext context;
    const std::string peer = "worker" + std::to_string(1 - job.rank());
    const at::Tensor loss = sync<at::Tensor>(peer, "serve", x * 3).sum();
    if (job.rank() == 0) faults->Next(kBackward, Faults::kHeld, /*worker=*/1);
    context.backward(loss);
    EXPECT_TRUE(torch::equal(context.grad(x), torch::full({2}, 3.0)));
    if (job.rank() == 1) sync<void>("worker0", "release");
  }
  job.workers->shutdown();
}

// The message comes when the trainer has given up, and when its context has ended.
RANK_TEST(AutogradContextTest, AMessageOfABackwardThatIsTooLateDoesNothing, 3) {
  Job job;
  if (job.trainers) {
    std::optional<PlusOne> step(std::in_place);
    job.own_faults->Next(kBackward, Faults::kTooLate);
    EXPECT_THAT(ErrorOf<TimeoutError>([&] { step->Backward(); }), HasSubstr(kNoAnswer));
    if (job.rank() == 0) step.reset();
    job.own_faults->Release();
    step.reset();
    PlusOne().ExpectGradient();
    job.trainers->barrier();
    AwaitEndOfContexts("worker2");
    AwaitEndOfContexts("worker" + std::to_string(job.rank()));
  }
  job.workers->shutdown();
}

// LibTorch itself would use the context after its end, when the held message fails.
RANK_TEST(AutogradContextTest, AContextOutlivesItsMessages, 3) {
  Job job;
  if (job.rank() == 0) {
    std::weak_ptr<torch::distributed::autograd::DistAutogradContext> watched;
    {
      PlusOne step;
      watched = DistAutogradContainer::getInstance().retrieveContext(step.context.id());
      const at::Tensor bomb = sync<at::Tensor>("worker1", "bomb", step.x * 2).sum();
      job.own_faults->Next(kBackward, Faults::kHeld);
      EXPECT_THAT(ErrorOf<RemoteError>([&] { step.context.backward({step.loss + bomb}); }),
                  HasSubstr("the bomb went off"));
    }
    AwaitEndOfContexts("worker2");
    EXPECT_FALSE(watched.expired());
    job.own_faults->Release();
    while (!watched.expired()) std::this_thread::yield();
    PlusOne().ExpectGradient();
    AwaitEndOfContexts("worker2");
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, UnsupportedModesAreRefusedByName, 3) {
  Net served([](const at::Tensor& x) { return x; });
  std::unique_ptr<DistributedDataParallel<Net>> served_model;
  Registry registry;
  registry.function("served", [&](at::Tensor x) { return served_model->forward(x, false); });
  Job job(std::move(registry));
  if (job.trainers) {
    const auto error = [&](const DistributedDataParallelOptions& options, bool join, bool delayed) {
      Net net([](const at::Tensor& x) { return sync<at::Tensor>("worker2", "plus_one", x); });
      DistributedDataParallelOptions complete = options;
      complete.find_unused_parameters = true;
      // A group of its own, because the refusal is a failure of the step on all ranks.
      const std::shared_ptr<ProcessGroup> group = job.world->new_group({0, 1});
      if (delayed) {
        complete.delay_all_reduce_named_params = {{"second.weight", net->second->weight}};
        complete.param_to_hook_all_reduce = net->first->weight;
      }
      DistributedDataParallel model(net, group, complete);
      std::optional<Join> joined;
      if (join) joined.emplace(std::vector<JoinableRef>{&model});
      return ErrorOf<ConfigurationError>([&] {
        AutogradContext context;
        context.backward(model.forward(torch::ones({2, 4}), false).to(at::kFloat).sum());
      });
    };
    EXPECT_THAT(
        error({.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}}, false, false),
        HasSubstr("mixed_precision with a param_dtype is not supported in a distributed"));
    {
      Net net([](const at::Tensor& x) { return sync<at::Tensor>("worker2", "plus_one", x); });
      DistributedDataParallel model(net, job.world->new_group({0, 1}),
                                    {.find_unused_parameters = true});
      const auto train = [&] {
        AutogradContext context;
        context.backward(model.forward(torch::ones({2, 4}), false).sum());
      };
      {
        const auto guard = model.no_sync();
        EXPECT_THAT(ErrorOf<ConfigurationError>(train),
                    HasSubstr("no_sync is not supported in a distributed autograd context"));
      }
      EXPECT_EQ(ErrorOf<ConfigurationError>(train), "no error");
    }
    EXPECT_THAT(error({}, false, true),
                HasSubstr("delay_all_reduce_named_params is not supported in a distributed"));
    // A backward of the other trainer through this trainer's wrapped model.
    served_model =
        std::make_unique<DistributedDataParallel<Net>>(served, job.world->new_group({0, 1}));
    job.trainers->barrier();
    if (job.rank() == 0) {
      AutogradContext context;
      const at::Tensor y = sync<at::Tensor>("worker1", "served", torch::ones({2, 4}));
      EXPECT_THAT(ErrorOf<RemoteError>([&] { context.backward(y.sum()); }),
                  HasSubstr("a backward that another worker has started reaches a parameter"));
    }
    job.trainers->barrier();
    EXPECT_THAT(error({}, true, false), HasSubstr("a Join is not supported in a distributed"));
  }
  job.workers->shutdown();
}

struct NormalizedNetImpl : torch::nn::Module {
  NormalizedNetImpl() {
    register_module("first", first);
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& x) {
    return norm->forward(sync<at::Tensor>("worker2", "plus_one", first->forward(x)));
  }
  torch::nn::Linear first{4, 4};
  SyncBatchNorm1d norm{torch::nn::BatchNormOptions(4)};
};
TORCH_MODULE(NormalizedNet);

// Its sums would run on threads that must not wait.
RANK_TEST(AutogradContextTest, ASyncBatchNormIsRefusedByName, 3) {
  Job job;
  if (job.trainers) {
    DistributedDataParallel<NormalizedNet> model(NormalizedNet(), job.trainers);
    const at::Tensor x = RandomNumbers(job.rank(), {3, 4});
    EXPECT_THAT(ErrorOf<std::exception>([&] {
                  AutogradContext context;
                  context.backward(model(x).pow(3).sum());
                }),
                HasSubstr("SyncBatchNorm is not supported in a distributed autograd context"));
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, AZeroRedundancyOptimizerIsToldOfTheContext, 3) {
  Job job;
  if (job.trainers) {
    const auto error = [&](bool scatter) {
      Net net([](const at::Tensor& x) { return sync<at::Tensor>("worker2", "plus_one", x); });
      DistributedDataParallel model(net, job.world->new_group({0, 1}),
                                    {.find_unused_parameters = true});
      ZeroRedundancyOptimizer<torch::optim::SGD> zero(
          model, torch::optim::SGDOptions(kRate),
          ZeroRedundancyOptions{.scatter_gradients = scatter});
      return ErrorOf<ConfigurationError>([&] {
        AutogradContext context;
        context.backward(model.forward(torch::ones({2, 4}), false).sum());
        const at::Tensor before = net->first->weight.detach().clone();
        EXPECT_THAT(ErrorOf<ConfigurationError>([&] { zero.step(); }),
                    HasSubstr("copy context.grad(parameter) into .grad before step()"));
        EXPECT_TRUE(torch::equal(net->first->weight, before));
        for (const at::Tensor& parameter : net->parameters()) {
          parameter.mutable_grad() = context.grad(parameter);
        }
        zero.step();
        EXPECT_TRUE(
            torch::equal(net->first->weight, before.add(context.grad(net->first->weight), -kRate)));
        // The context is no news any more.
        zero.zero_grad();
        zero.step();
      });
    };
    EXPECT_EQ(error(false), "no error");
    EXPECT_THAT(error(true), HasSubstr("scatter_gradients of a ZeroRedundancyOptimizer is not "
                                       "supported in a distributed autograd context"));
  }
  job.workers->shutdown();
}

// ---- Optimizers.

RANK_TEST(AutogradContextTest, TrainersShareAnObjectsOptimizer, 3) {
  Job job;
  if (job.trainers) {
    const RRef<Shard> shard = job.MakeShard();
    Shard expected(false);
    torch::optim::Adagrad reference(expected.parameters(), torch::optim::AdagradOptions(0.1));
    DistributedOptimizer optimizer(adagrad(0.1), {shard});
    for (int step = 0; step < 6; ++step) {
      const at::Tensor ids = Ids(0, step);
      if (step % 2 == job.rank()) {
        AutogradContext context;
        context.backward(shard.sync<at::Tensor>("lookup", ids).pow(2).sum());
        optimizer.step(context);
      }
      job.trainers->barrier();
      reference.zero_grad();
      expected.Lookup(ids).pow(2).sum().backward();
      reference.step();
      const auto values = shard.sync<std::vector<at::Tensor>>("values");
      EXPECT_TRUE(torch::equal(values[0], expected.table)) << "in step " << step;
      EXPECT_TRUE(torch::equal(values[1], expected.weight)) << "in step " << step;
      job.trainers->barrier();
    }
    AutogradContext context;
    shard.sync<at::Tensor>("lookup", Ids(0, 0));
    EXPECT_THAT(ErrorOf<RemoteError>([&] { DistributedOptimizer(sgd(1), {shard}).step(context); }),
                HasSubstr("has an optimizer \"adagrad\" with other options"));
    EXPECT_THROW(DistributedOptimizer({.name = "none", .options = {}}, {shard}),
                 ConfigurationError);
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, TheOptimizerOfAnObjectDiesWithIt, 3) {
  Job job;
  if (job.rank() == 0) {
    {
      const RRef<Shard> shard = remote<Shard>("worker2", false);
      DistributedOptimizer optimizer(adagrad(0.1), {shard});
      AutogradContext context;
      context.backward(shard.sync<at::Tensor>("lookup", Ids(0, 0)).sum());
      optimizer.step(context);
      EXPECT_TRUE(sync<bool>("worker2", "table_alive"));
    }
    // The messages of both ends are not awaited.
    while (sync<bool>("worker2", "table_alive")) continue;
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, AStepThatThrowsLeavesNoGradient, 3) {
  Job job;
  if (job.rank() == 0) {
    const Shard shard(/*sparse=*/true);
    DistributedOptimizer optimizer(adam(0.1), {}, shard.parameters());
    AutogradContext context;
    context.backward(sync<at::Tensor>("worker2", "plus_one", shard.Lookup(Ids(0, 0))).sum());
    EXPECT_THAT(ErrorOf<std::exception>([&] { optimizer.step(context); }), HasSubstr("sparse"));
    EXPECT_FALSE(shard.table.grad().defined());
  }
  job.workers->shutdown();
}

// A shard on the server and one here, updated from the same contexts. The first three steps give
// the weights no gradient.
struct Updated {
  explicit Updated(const OptimizerSpec& spec) : optimizer(spec, {remote}, local.parameters()) {}

  template <typename Lookup, typename Mix>
  static at::Tensor Loss(int step, const Lookup& lookup, const Mix& mix) {
    const at::Tensor rows = lookup(Ids(0, step));
    return (step < 3 ? rows : mix(rows)).pow(2).sum();
  }
  static at::Tensor Loss(int step, const Shard& shard) {
    return Loss(
        step, [&](const at::Tensor& ids) { return shard.Lookup(ids); },
        [&](const at::Tensor& x) { return shard.Mix(x); });
  }
  void Step(int step) {
    AutogradContext context;
    const at::Tensor far = Loss(
        step, [&](const at::Tensor& ids) { return remote.sync<at::Tensor>("lookup", ids); },
        [&](const at::Tensor& x) { return remote.sync<at::Tensor>("mix", x); });
    context.backward(far + Loss(step, local));
    optimizer.step(context);
  }

  Shard local{/*sparse=*/false};
  RRef<Shard> remote = rpc::remote<Shard>("worker2", false);
  DistributedOptimizer optimizer;
};

void ExpectEqual(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].scalar_type(), b[i].scalar_type()) << i;
    EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
  }
}

// Returns LibTorch's own state, as DistributedOptimizer::state() should.
std::vector<at::Tensor> StateOf(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : optimizer.param_groups()[0].params()) {
    auto* const state = optimizer.state().at(parameter.unsafeGetTensorImpl()).get();
    if (const auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(state)) {
      all.insert(all.end(), {torch::tensor(int64_t{1}), sgd->momentum_buffer()});
    } else if (const auto* adagrad = dynamic_cast<torch::optim::AdagradParamState*>(state)) {
      all.insert(all.end(), {torch::tensor(adagrad->step()), adagrad->sum()});
    } else if (const auto* adam = dynamic_cast<torch::optim::AdamParamState*>(state)) {
      all.insert(all.end(), {torch::tensor(adam->step()), adam->exp_avg(), adam->exp_avg_sq()});
    }
  }
  return all;
}

void ContinueFromAState(const OptimizerSpec& spec, torch::optim::Optimizer& plain,
                        const Shard& plain_shard) {
  for (int step = 0; step < 6; ++step) {
    plain.zero_grad();
    Updated::Loss(step, plain_shard).backward();
    plain.step();
  }
  std::vector<at::Tensor> state, local_state, values, local_values;
  {
    Updated first(spec);
    for (int step = 0; step < 3; ++step) first.Step(step);
    state = first.optimizer.state(first.remote);
    local_state = first.optimizer.local_state();
    values = first.remote.sync<std::vector<at::Tensor>>("values");
    local_values = first.local.Values();
  }
  Updated second(spec);
  ExpectEqual(second.optimizer.state(second.remote), second.optimizer.local_state());
  second.Step(0);  // a loaded state replaces another one
  second.remote.sync<void>("load", values);
  second.local.Load(local_values);
  second.optimizer.load_state(second.remote, state);
  second.optimizer.load_local_state(local_state);
  ExpectEqual(second.optimizer.state(second.remote), state);
  EXPECT_THAT(ErrorOf<RemoteError>([&] { second.optimizer.load_state(second.remote, {}); }),
              HasSubstr("the optimizer's state has " + std::to_string(state.size()) + " tensors"));
  std::vector<at::Tensor> wrong = state;
  wrong[1] = wrong[1].flatten();
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { second.optimizer.load_local_state(wrong); }),
              HasSubstr("tensor 1 of the optimizer's state has another type or shape"));
  for (int step = 3; step < 6; ++step) second.Step(step);
  const std::vector<at::Tensor> expected = StateOf(plain);
  ExpectEqual(second.optimizer.state(second.remote), expected);
  ExpectEqual(second.optimizer.local_state(), expected);
  ExpectEqual(second.remote.sync<std::vector<at::Tensor>>("values"), plain_shard.Values());
  ExpectEqual(second.local.Values(), plain_shard.Values());
}

RANK_TEST(AutogradContextTest, AnOptimizersStateContinuesBitByBit, 3) {
  Job job;
  if (job.rank() == 0) {
    const auto shard = [] { return Shard(/*sparse=*/false); };
    const Shard a = shard(), b = shard(), c = shard();
    torch::optim::SGD plain_sgd(a.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::Adagrad plain_adagrad(b.parameters(), torch::optim::AdagradOptions(0.1));
    torch::optim::Adam plain_adam(c.parameters(), torch::optim::AdamOptions(0.1));
    {
      SCOPED_TRACE("sgd");
      ContinueFromAState(sgd(0.1, 0.9), plain_sgd, a);
    }
    {
      SCOPED_TRACE("adagrad");
      ContinueFromAState(adagrad(0.1), plain_adagrad, b);
    }
    {
      SCOPED_TRACE("adam");
      ContinueFromAState(adam(0.1), plain_adam, c);
    }
  }
  job.workers->shutdown();
}

RANK_TEST(AutogradContextTest, AnOptimizerWithoutAStateSaysSo, 3) {
  Job job;
  if (job.rank() == 0) {
    Updated plain(sgd(0.1));
    plain.Step(0);
    EXPECT_TRUE(plain.optimizer.state(plain.remote).empty());
    plain.optimizer.load_state(plain.remote, {});

    const RRef<Shard> shard = remote<Shard>("worker2", /*sparse=*/true);
    DistributedOptimizer optimizer(sgd(0.1, 0.9), {shard});
    AutogradContext context;
    context.backward(shard.sync<at::Tensor>("lookup", Ids(0, 0)).sum());
    optimizer.step(context);
    EXPECT_THAT(ErrorOf<RemoteError>([&] { optimizer.state(shard); }),
                HasSubstr("a momentum of sparse gradients cannot be saved"));
    EXPECT_THAT(ErrorOf<ConfigurationError>([&] { optimizer.local_state(); }),
                HasSubstr("no local parameters"));
  }
  job.workers->shutdown();
}

// ---- Training with disturbed messages.

class Training {
 public:
  explicit Training(Job& job)
      : job_(job),
        shard_(job.MakeShard()),
        net_(MixOn(shard_)),
        model_(net_, job.trainers, {.bucket_cap_mb = 1e-5, .find_unused_parameters = true}),
        optimizer_(adagrad(kRate), {shard_}, net_->parameters()) {}

  void Step(int step) {
    AutogradContext context;
    const at::Tensor rows = shard_.sync<at::Tensor>("lookup", Ids(job_.rank(), step));
    const bool use = UsesSpare(job_.rank(), step);
    context.backward(model_.forward(rows, use).pow(2).mean());
    job_.trainers->barrier();  // throws when the other trainer's backward has failed
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == job_.rank()) optimizer_.step(context);
      job_.trainers->barrier();
    }
  }

  // Returns all parameters, and the state of the server's optimizer.
  std::vector<at::Tensor> Values() const {
    std::vector<at::Tensor> values = shard_.sync<std::vector<at::Tensor>>("values");
    for (const at::Tensor& tensor : optimizer_.state(shard_)) values.push_back(tensor);
    for (const at::Tensor& tensor : net_->parameters()) values.push_back(tensor);
    return values;
  }

 private:
  Job& job_;
  const RRef<Shard> shard_;
  Net net_;
  DistributedDataParallel<Net> model_;
  DistributedOptimizer optimizer_;
};

std::vector<at::Tensor> UndisturbedValues(Job& job, int steps) {
  Training training(job);
  for (int step = 0; step < steps; ++step) training.Step(step);
  return training.Values();
}

// In each step one message waits until the same message of the other trainer has been answered.
RANK_TEST(AutogradContextTest, TrainingWithLateMessagesEndsWithTheSameBits, 3) {
  Job job;
  job.workers->barrier();
  if (job.trainers) {
    struct Late {
      int type, sender, receiver;
    };
    const std::vector<Late> late = {{kForward, 0, 2},  {kBackward, 0, 2}, {kBackward, 2, 0},
                                    {kCleanup, 0, 2},  {kForward, 1, 2},  {kBackward, 1, 2},
                                    {kBackward, 2, 1}, {kCleanup, 1, 2}};
    const std::vector<at::Tensor> expected = UndisturbedValues(job, static_cast<int>(late.size()));
    Training training(job);
    for (size_t step = 0; step < late.size(); ++step) {
      const auto [type, sender, receiver] = late[step];
      const int trainer = std::min(sender, receiver);
      std::thread releaser;
      if (job.rank() != trainer) {
        const std::string worker = "worker" + std::to_string(sender);
        sync<void>(worker, "next_fault", type, static_cast<int>(Faults::kHeld), receiver);
        const int before = job.own_faults->answered(type);
        releaser = std::thread([&job, worker, type, before] {
          while (job.own_faults->answered(type) == before) std::this_thread::yield();
          sync<void>(worker, "release_next");
        });
      }
      job.trainers->barrier();
      training.Step(static_cast<int>(step));
      if (releaser.joinable()) releaser.join();
      job.trainers->barrier();
    }
    ExpectEqual(training.Values(), expected);
  }
  job.workers->shutdown();
}

// The trainers repeat the step in a new context. A call comes before the reduction, so the other
// trainer only waits.
RANK_TEST(AutogradContextTest, TrainingWithLostMessagesEndsWithTheSameBits, 3) {
  Job job;
  job.workers->barrier();
  if (job.trainers) {
    struct Lost {
      int type;
      Faults::Fate fate;
      int sender, receiver;
    };
    const std::vector<Lost> lost = {{kForward, Faults::kLost, 0, 2},
                                    {kBackward, Faults::kLost, 0, 2},
                                    {kBackward, Faults::kAnswerLost, 1, 2},
                                    {kBackward, Faults::kLost, 2, 0},
                                    {kForward, Faults::kAnswerLost, 1, 2}};
    const std::vector<at::Tensor> expected =
        UndisturbedValues(job, static_cast<int>(lost.size()) + 1);
    Training training(job);
    for (int step = 0; step <= static_cast<int>(lost.size()); ++step) {
      SCOPED_TRACE(step);
      if (step < static_cast<int>(lost.size())) {
        const auto [type, fate, sender, receiver] = lost[step];
        const int trainer = std::min(sender, receiver);
        if (job.rank() == trainer) {
          sync<void>("worker" + std::to_string(sender), "next_fault", type, static_cast<int>(fate),
                     receiver);
          EXPECT_THAT(ErrorOf<TimeoutError>([&] { training.Step(step); }), HasSubstr("worker2"));
        } else if (type == kBackward) {
          EXPECT_THAT(ErrorOf<PeerFailedError>([&] { training.Step(step); }),
                      HasSubstr("rank " + std::to_string(trainer)));
        }
        if (type == kBackward) job.trainers->renew();  // after the failure report
      }
      training.Step(step);
    }
    ExpectEqual(training.Values(), expected);
  }
  job.workers->shutdown();
}

// The last gradients wait until the first bucket has been launched.
RANK_TEST(AutogradContextTest, BucketsAreLaunchedDuringTheBackward, 3) {
  Job job;
  if (job.trainers) {
    Mutex mutex;
    std::vector<std::string> events;
    std::promise<void> launched;
    Net net([](const at::Tensor& x) { return sync<at::Tensor>("worker2", "plus_one", x); });
    DistributedDataParallel model(net, job.trainers,
                                  {.bucket_cap_mb = 1e-5, .find_unused_parameters = true});
    model.register_comm_hook(
        job.trainers, [&](const std::shared_ptr<ProcessGroup>& group, GradBucket& bucket) {
          const MutexLock lock(mutex);
          if (std::find(events.begin(), events.end(), "launch") == events.end()) {
            launched.set_value();
          }
          events.emplace_back("launch");
          return allreduce_hook(group, bucket);
        });
    std::shared_future<void> awaited;
    for (const at::Tensor& leaf : net->first->parameters()) {
      leaf.register_hook([&](const at::Tensor&) {
        EXPECT_EQ(awaited.wait_for(std::chrono::seconds(30)), std::future_status::ready);
        const MutexLock lock(mutex);
        events.emplace_back("leaf");
      });
    }
    for (int step = 0; step < 3; ++step) {
      events.clear();
      launched = {};
      awaited = launched.get_future();
      AutogradContext context;
      context.backward(model.forward(torch::ones({2, 4}), true).sum());
      EXPECT_EQ(events.front(), "launch");
      EXPECT_EQ(std::count(events.begin(), events.end(), "leaf"), 2);
      EXPECT_EQ(events.back(), "launch");
    }
  }
  job.workers->shutdown();
}

}  // namespace
}  // namespace ddp::rpc
