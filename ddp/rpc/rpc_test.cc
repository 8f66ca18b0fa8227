// Tests calls between workers that are processes: functions, objects, errors, lost workers, lost
// messages.
//
// Length: one case for each way in which a call ends, on one set of functions.
#include "ddp/rpc/rpc.h"

#include <signal.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "ddp/process_group.h"
#include "ddp/rpc/pending_sends.h"
#include "ddp/rpc/transport.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"
#include "testing/ranks/rank_test.h"

namespace ddp::rpc {
namespace {

NOT_ON_DEVICE("RPC carries tensors of the CPU only");

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::string NameOf(int rank) { return "worker" + std::to_string(rank); }

// This process as a worker. The group brings the store.
struct Job {
  explicit Job(Registry registry, const Options& extra = {}) {
    Options options = extra;
    options.rank = group->rank();
    options.world_size = group->size();
    options.registry = std::move(registry);
    workers = init(NameOf(group->rank()), group->store(), std::move(options));
  }
  int rank() const { return group->rank(); }

  std::shared_ptr<ProcessGroup> group = init_process_group();
  std::unique_ptr<Workers> workers;
};

// Runs `body` on worker 0; the others serve it.
template <typename Body>
void OnFirst(Job& job, const Body& body) {
  if (job.rank() == 0) body();
  job.workers->shutdown();
}

template <typename E, typename F>
std::optional<E> Thrown(const F& f) {
  try {
    f();
  } catch (const E& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return std::nullopt;
}

// A counter that counts its own instances.
class Counter {
 public:
  explicit Counter(int64_t value) : value_(value) { ++alive; }
  ~Counter() { --alive; }
  int64_t Add(int64_t more) { return value_ += more; }
  int64_t value() const { return value_; }
  static inline std::atomic<int> alive = 0;

 private:
  std::atomic<int64_t> value_;
};

class Other {};

Registry Functions() {
  Registry registry;
  registry.function("add", [](const at::Tensor& a, at::Tensor b) { return a + b; });
  registry.function("describe", [](int number, double real, bool flag, const std::string& text) {
    return text + " " + std::to_string(number) + (flag ? " yes " : " no ") +
           std::to_string(static_cast<int>(real * 2));
  });
  registry.function("spread", [](std::vector<int64_t> numbers, std::optional<std::string> text) {
    return std::tuple(static_cast<int64_t>(numbers.size()), text, std::pair(numbers, 0.5));
  });
  registry.function("nothing", [] {});
  registry.function("small", [](int8_t number) { return number; });
  registry.function("fail", [](int how) -> int64_t {
    if (how == 0) throw std::runtime_error("plain words");
    if (how == 2) throw PeerFailedError(0, "a rank of a process group failed");
    if (how == 3) throw "no exception class";
    TORCH_CHECK(false, "the words of a check");
  });
  registry.function("bad_result", [](bool undefined) {
    return undefined ? at::Tensor() : at::ones({1}, at::kMeta);
  });
  registry.function("alive", [] { return Counter::alive.load(); });
  registry.module<Counter, int64_t>("Counter")
      .method("add", &Counter::Add)
      .method("value", &Counter::value);
  registry.module<Other>("Other");
  return registry;
}

RANK_TEST(RpcTest, FunctionsAreCalledWithTypes, {1, 2}) {
  Job job(Functions());
  OnFirst(job, [&] {
    const std::string last = NameOf(job.group->size() - 1);
    const at::Tensor sum = sync<at::Tensor>(last, "add", at::ones({2}), at::full({2}, 2.0));
    EXPECT_TRUE(at::equal(sum, at::full({2}, 3.0)));
    EXPECT_EQ(sync<std::string>(last, "describe", 7, 1.5, true, "text"), "text 7 yes 3");
    const auto [count, text, rest] =
        sync<std::tuple<int, std::optional<std::string>, std::pair<std::vector<int64_t>, float>>>(
            last, "spread", std::vector<int>{4, 5}, std::optional<std::string>());
    EXPECT_EQ(count, 2);
    EXPECT_EQ(text, std::nullopt);
    EXPECT_THAT(rest.first, ElementsAre(4, 5));
    EXPECT_EQ(rest.second, 0.5f);
    sync<void>(last, "nothing");
    std::vector<Future<at::Tensor>> sums;
    for (int i = 0; i < 40; ++i) {
      sums.push_back(async<at::Tensor>(last, "add", at::full({1}, i), at::ones({1})));
    }
    for (int i = 39; i >= 0; --i) EXPECT_EQ(sums[i].wait().item<int>(), i + 1);
    EXPECT_TRUE(sums[0].completed());
    EXPECT_THROW(sums[0].wait(), ConfigurationError);
  });
}

int ThreadsWhoseNameStartsWith(const std::string& prefix) {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    count += name.rfind(prefix, 0) == 0;
  }
  return count;
}

// TensorPipe's shared memory needs a core of its own, all the time.
RANK_TEST(RpcTest, NoThreadPollsWhereCoresAreFew, .world_size = 2,
          .environment = {{"LOCAL_WORLD_SIZE", "4096"}}) {
  Registry registry;
  registry.function("one", [] { return 1; });
  Job job(std::move(registry));
  OnFirst(job, [] {
    EXPECT_EQ(sync<int>(NameOf(1), "one"), 1);
    EXPECT_GT(ThreadsWhoseNameStartsWith("TP_UV_loop"), 0);
    EXPECT_EQ(ThreadsWhoseNameStartsWith("TP_SHM_"), 0);
  });
}

// One worker offers shared memory (where there are two cores), the other one does not.
RANK_TEST(RpcTest, WorkersOfDifferentTransportsReachEachOther, 2) {
  Registry registry;
  registry.function("size", [](const at::Tensor& tensor) { return tensor.numel(); });
  const auto group = init_process_group();
  ::setenv("LOCAL_WORLD_SIZE", group->rank() == 0 ? "4096" : "1", /*overwrite=*/1);
  const auto workers =
      init(NameOf(group->rank()), group->store(),
           {.rank = group->rank(), .world_size = group->size(), .registry = std::move(registry)});
  const std::string other = NameOf(1 - group->rank());
  for (const int64_t elements : {1, 1 << 16}) {
    EXPECT_EQ(sync<int64_t>(other, "size", at::ones({elements})), elements);
  }
  workers->shutdown();
}

RANK_TEST(RpcTest, ErrorsNameWorkerFunctionAndReason, 2) {
  Job job(Functions());
  OnFirst(job, [&] {
    const auto message = [](const std::string& function, auto... arguments) {
      const auto error =
          Thrown<RemoteError>([&] { sync<int64_t>("worker1", function, arguments...); });
      EXPECT_EQ(error->worker(), "worker1");
      EXPECT_EQ(error->function(), function);
      EXPECT_THAT(error->what(), StartsWith(function + " on worker worker1: "));
      EXPECT_THAT(error->what(), AllOf(HasSubstr(error->message()), Not(HasSubstr("frame #"))));
      return error->message();
    };
    EXPECT_EQ(message("fail", 0), "plain words");
    EXPECT_EQ(message("fail", 1), "the words of a check");
    EXPECT_EQ(message("fail", 2), "a rank of a process group failed");  // not a worker
    EXPECT_EQ(message("fail", 3), "an exception that is no std::exception");
    EXPECT_THAT(message("unknown", 1), AllOf(HasSubstr("no such function"), HasSubstr("describe"),
                                             Not(HasSubstr("ddp.rpc"))));
    EXPECT_THAT(message("fail", 1, 2), HasSubstr("fail(Int) got 2 arguments"));
    EXPECT_THAT(message("fail"), HasSubstr("got 0 arguments"));
    EXPECT_THAT(message("fail", "one"),
                HasSubstr("argument 1 of fail(Int): expected Int, got String"));
    EXPECT_THAT(message("small", 128), HasSubstr("128 does not fit"));
    EXPECT_THAT(message("spread", std::vector<double>{0.5}, "text"),
                HasSubstr("argument 1 of spread(vector<Int>, optional<String>): expected Int"));
    EXPECT_THAT(message("Counter.add", 99, 1), HasSubstr("no object 99"));
    const auto error = Thrown<RemoteError>([] { sync<int64_t>("worker1", "fail", 1); });
    EXPECT_THAT(error->remote_stack(), HasSubstr("the words of a check"));
    EXPECT_GE(error->remote_stack().size(), error->message().size());

    EXPECT_THAT(Thrown<ConfigurationError>([] { sync<void>("nobody", "fail"); })->what(),
                AllOf(HasSubstr("nobody"), HasSubstr("worker0, worker1")));
    EXPECT_THAT(Thrown<ConfigurationError>([] { sync<void>("worker1", "alive"); })->what(),
                HasSubstr("the result of alive on worker worker1: expected None, got Int"));
    const at::Tensor one = at::ones({1});
    EXPECT_EQ(Thrown<ConfigurationError>([&] {
                sync<at::Tensor>("worker1", "add", one, at::Tensor());
              })->what_without_backtrace(),
              std::string("argument 2 of add on worker worker1 has an undefined tensor: send a "
                          "std::optional<at::Tensor> without a value"));
    EXPECT_EQ(Thrown<ConfigurationError>([&] {
                sync<at::Tensor>("worker1", "add", one.to(at::kMeta), one);
              })->what_without_backtrace(),
              std::string("argument 1 of add on worker worker1 has a tensor on the device meta: "
                          "only tensors on the CPU travel; send tensor.cpu()"));
    EXPECT_THAT(Thrown<ConfigurationError>([&] {
                  remote<Counter>("worker1", 1).sync<int64_t>("add", std::vector{at::Tensor()});
                })->what(),
                StartsWith("argument 1 of Counter.add on worker worker1 has an undefined tensor"));
    EXPECT_THAT(message("bad_result", true), StartsWith("the result has an undefined tensor: "));
    EXPECT_THAT(message("bad_result", false), StartsWith("the result has a tensor on the device "
                                                         "meta: "));
    EXPECT_THROW(sync<void>("worker1", ""), ConfigurationError);
    EXPECT_THROW(sync<void>("worker1", "a b"), ConfigurationError);
    EXPECT_THAT(Thrown<ConfigurationError>([&] {
                  init("again", job.group->store(), {.rank = 0, .world_size = 2});
                })->what(),
                HasSubstr("once in a process"));
  });
  EXPECT_THAT(Thrown<ConfigurationError>([] { sync<void>("worker1", "nothing"); })->what(),
              AllOf(HasSubstr("this worker has shut down"), Not(HasSubstr("init() first"))));
  job.workers->report_failure("too late");  // does nothing
}

TEST(RpcInitTest, WrongOptionsAreRefused) {
  EXPECT_THAT(Thrown<ConfigurationError>([] { sync<void>("worker1", "nothing"); })->what(),
              HasSubstr("call rpc::init() first"));
  EXPECT_THROW(init("name", c10::intrusive_ptr<c10d::Store>(), {}), ConfigurationError);
  Registry registry;
  registry.function("f", [] {});
  EXPECT_THROW(registry.function("f", [] {}), ConfigurationError);
  EXPECT_THROW(registry.function("a b", [] {}), ConfigurationError);
  EXPECT_THROW(registry.function("", [] {}), ConfigurationError);
  EXPECT_THROW(registry.function("a..b", [] {}), ConfigurationError);
  EXPECT_THROW(registry.function("ddp.mine", [] {}), ConfigurationError);
  EXPECT_THROW(registry.module<Other>("ddp.mine"), ConfigurationError);
  registry.function("ddpx.f", [] {}).function("a.b_1", [] {});
  registry.module<Counter, int64_t>("Counter");
  EXPECT_THROW((registry.module<Counter, int64_t>("Again")), ConfigurationError);
  EXPECT_THROW(registry.class_name<Other>(), ConfigurationError);
}

// ---- Gradients outside of a context.

RANK_TEST(RpcTest, NoGradientPassesOutsideOfAContext, 2) {
  const at::Tensor weight = at::ones({2}).requires_grad_();
  Registry registry;
  registry.function("scale", [weight](at::Tensor x) {
    EXPECT_FALSE(x.requires_grad());
    return std::vector<at::Tensor>{x * weight, weight, at::arange(3)};
  });
  Job job(std::move(registry));
  OnFirst(job, [&] {
    const at::Tensor x = at::ones({2}).requires_grad_();
    for (const at::Tensor& answer : sync<std::vector<at::Tensor>>("worker1", "scale", x * 2)) {
      EXPECT_FALSE(answer.requires_grad());
    }
  });
}

// ---- Objects.

Registry WithHolder(std::optional<RRef<Counter>>* held) {
  Registry registry = Functions();
  registry.function("hold", [held](RRef<Counter> counter) { *held = counter; });
  registry.function("held", [held] { return held->value(); });
  registry.function("drop", [held] { held->reset(); });
  registry.function("hold_all", [](std::vector<RRef<Counter>>, std::string) {});
  registry.function("use", [held](int64_t more) { return (*held)->sync<int64_t>("add", more); });
  return registry;
}

// LibTorch's owner crashes when one of two users of an RRef is deleted.
RANK_TEST(RpcTest, AnObjectLivesAsLongAsItsUsers, 3) {
  std::optional<RRef<Counter>> held;
  Job job(WithHolder(&held));
  OnFirst(job, [&] {
    const auto alive = [] { return sync<int>("worker2", "alive"); };
    // The message of the last release is not awaited by the releasing worker.
    const auto await_end = [&] {
      while (alive() > 0) sync<void>("worker2", "nothing");
    };
    std::optional<RRef<Counter>> counter = remote<Counter>("worker2", 5);
    EXPECT_EQ(counter->owner(), "worker2");
    EXPECT_EQ(counter->sync<int64_t>("add", 2), 7);
    EXPECT_THROW(counter->local(), ConfigurationError);
    // A second user, on a third worker.
    sync<void>("worker1", "hold", *counter);
    EXPECT_EQ(sync<int64_t>("worker1", "use", 1), 8);
    counter.reset();
    EXPECT_EQ(sync<int64_t>("worker1", "use", 1), 9);
    EXPECT_EQ(alive(), 1);
    // Back as a result; then that worker lets go, and this one goes on.
    counter = sync<RRef<Counter>>("worker1", "held");
    sync<void>("worker1", "drop");
    EXPECT_EQ(counter->sync<int64_t>("value"), 9);
    // To its owner, which then is a user as well.
    sync<void>("worker2", "hold", *counter);
    counter.reset();
    EXPECT_EQ(sync<int64_t>("worker2", "use", 1), 10);
    sync<void>("worker2", "drop");
    await_end();
    EXPECT_EQ(alive(), 0);
    // A call in progress keeps its object.
    for (int i = 0; i < 50; ++i) {
      Future<int64_t> sum = remote<Counter>("worker2", i).async<int64_t>("add", 1);
      EXPECT_EQ(sum.wait(), i + 1);
    }
    await_end();
    EXPECT_EQ(alive(), 0);
  });
}

// Each call carries RRefs that nobody takes.
RANK_TEST(RpcTest, AnObjectOutlivesNoRefusedCall, 3) {
  std::optional<RRef<Counter>> held;
  Job job(WithHolder(&held));
  OnFirst(job, [&] {
    for (const std::string owner : {"worker0", "worker1", "worker2"}) {
      SCOPED_TRACE(owner);
      std::optional<RRef<Counter>> counter = remote<Counter>(owner, 5);
      EXPECT_THROW(sync<void>("worker1", "unknown", *counter), RemoteError);
      EXPECT_THROW(sync<void>("worker1", "hold", *counter, 1), RemoteError);
      EXPECT_THROW(sync<void>("worker1", "hold", 1, std::optional(*counter)), RemoteError);
      EXPECT_THROW(sync<void>("worker1", "small", *counter), RemoteError);
      EXPECT_THROW(sync<void>("worker1", "hold_all", std::vector{*counter, *counter}, 1),
                   RemoteError);
      EXPECT_THROW(sync<void>("nobody", "hold", *counter), ConfigurationError);
      EXPECT_THROW(sync<void>("worker1", "a b", *counter), ConfigurationError);
      constexpr uint64_t kTooMuch = std::numeric_limits<uint64_t>::max();
      EXPECT_THROW(sync<void>("worker1", "hold", *counter, kTooMuch), ConfigurationError);
      sync<void>("worker1", "hold", *counter);
      EXPECT_THROW(sync<int64_t>("worker1", "held"), ConfigurationError);
      EXPECT_THROW(sync<RRef<Other>>("worker1", "held"), ConfigurationError);
      (void)async<RRef<Counter>>("worker1", "held");
      EXPECT_EQ(sync<int64_t>("worker1", "use", 1), 6);
      sync<void>("worker1", "drop");
      counter.reset();
      while (sync<int>(owner, "alive") > 0) continue;
    }
  });
}

RANK_TEST(RpcTest, AnObjectOfThisWorkerCanBeShared, 2) {
  std::optional<RRef<Counter>> held;
  Job job(WithHolder(&held));
  OnFirst(job, [&] {
    auto object = std::make_shared<Counter>(1);
    const RRef<Counter> counter = share(object);
    EXPECT_EQ(counter.owner(), "worker0");
    EXPECT_EQ(counter.local(), object);
    EXPECT_EQ(counter.sync<int64_t>("add", 1), 2);  // a call of oneself
    sync<void>("worker1", "hold", counter);
    EXPECT_EQ(sync<int64_t>("worker1", "use", 1), 3);
    EXPECT_EQ(object->value(), 3);
    EXPECT_THAT(Thrown<RemoteError>([] {
                  sync<void>("worker1", "hold", remote<Other>("worker1"));
                })->message(),
                HasSubstr("expected an RRef of Counter, got one of Other"));
    EXPECT_THAT(Thrown<RemoteError>([] {
                  const RRef<Other> other = remote<Other>("worker1");
                  sync<int64_t>("worker1", "Counter.value", other.use()->id());
                })->message(),
                HasSubstr("the object is a Other"));
    sync<void>("worker1", "drop");
  });
}

// ---- Time limits, lost messages, lost workers.

RANK_TEST(RpcTest, ACallWithoutAnswerTimesOut, 2) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  Registry registry = Functions();
  registry.function("block", [released] { released.wait(); });
  registry.function("release", [&release] { release.set_value(); });
  Job job(std::move(registry));
  OnFirst(job, [&] {
    const auto error = Thrown<TimeoutError>(
        [] { sync<void>(Callee("worker1", std::chrono::milliseconds(50)), "block"); });
    EXPECT_THAT(error->what(), HasSubstr("block on worker worker1: no answer in time"));
    EXPECT_EQ(sync<int>("worker1", "alive"), 0);  // the worker is not lost
    sync<void>("worker1", "release");
  });
}

// The program sees a lost message as an error of its call, and may call again.
RANK_TEST(RpcTest, LostAndLateMessages, 2) {
  Job job(
      Functions(),
      {.timeout = std::chrono::seconds(20),
       .faults = {.lost = {"SCRIPT_CALL"}, .losses = 2, .delay_seconds = {{"SCRIPT_CALL", 0.3}}}});
  OnFirst(job, [&] {
    const at::Tensor one = at::ones({1});
    for (int i = 0; i < 2; ++i) {
      const auto error =
          Thrown<CommunicationError>([&] { sync<at::Tensor>("worker1", "add", one, one); });
      EXPECT_THAT(error->what(), StartsWith("add on worker worker1: "));
    }
    const Callee hasty("worker1", std::chrono::milliseconds(50));
    EXPECT_THROW(sync<at::Tensor>(hasty, "add", one, one), TimeoutError);
    EXPECT_EQ(sync<at::Tensor>("worker1", "add", one, one).item<int>(), 2);
  });
}

Registry Deadly(std::shared_future<void> never) {
  Registry registry = Functions();
  registry.function("die", [] { raise(SIGKILL); });
  registry.function("wait", [never] { never.wait_for(std::chrono::seconds(30)); });
  return registry;
}

// Worker 1 dies in a call of worker 0. Worker 2 waits for worker 0 only.
RANK_TEST(RpcTest, ALostWorkerEndsAllWaits, .world_size = 3, .killed_rank = 1) {
  std::promise<void> never;
  Job job(Deadly(never.get_future().share()));
  if (job.rank() == 2) {
    const auto error = Thrown<PeerFailedError>([&] { job.workers->barrier(); });
    EXPECT_EQ(error->rank(), 1);
    EXPECT_THAT(error->what(), HasSubstr("worker1"));
    never.set_value();
    return;
  }
  if (job.rank() == 1) return job.workers->barrier();
  Future<void> stuck = async<void>("worker2", "wait");
  const auto error = Thrown<PeerFailedError>([] { sync<void>("worker1", "die"); });
  EXPECT_EQ(error->rank(), 1);
  EXPECT_THAT(error->what(), HasSubstr("worker1"));
  EXPECT_THROW(stuck.wait(), PeerFailedError);  // although that worker lives
  EXPECT_THROW(sync<int>("worker2", "alive"), PeerFailedError);
  EXPECT_THROW(job.workers->shutdown(), PeerFailedError);
}

// Nobody has a message to worker 1 in progress, apart from the library's own.
RANK_TEST(RpcTest, TheDeathOfAWorkerThatNobodyCallsIsNoticed, .world_size = 3, .killed_rank = 1) {
  Job job(Functions());
  if (job.rank() == 1) raise(SIGKILL);
  const auto error = Thrown<PeerFailedError>([&] { job.workers->shutdown(); });
  EXPECT_EQ(error->rank(), 1);
  EXPECT_THAT(error->what(), HasSubstr("worker1"));
}

RANK_TEST(RpcTest, ADroppedFutureOfALostWorkerEndsABarrier, .world_size = 3, .killed_rank = 2) {
  std::promise<void> never;
  const std::shared_future<void> end = never.get_future().share();
  Job job(Deadly(end));
  if (job.rank() == 2) {
    end.wait_for(std::chrono::seconds(30));
    return;
  }
  if (job.rank() == 1) (void)async<void>("worker2", "die");
  EXPECT_THAT(Thrown<PeerFailedError>([&] { job.workers->barrier(); })->what(),
              HasSubstr("worker2"));
}

// The worker dies when all have come to the end, and before all have left.
RANK_TEST(RpcTest, ADeathAtTheEndOfShutdownIsNoticed, .world_size = 2, .killed_rank = 1) {
  Job job(Functions(), {.timeout = std::chrono::seconds(8)});
  if (job.rank() == 1) {
    const auto transport = internal::Transport::Get();
    transport->Barrier(internal::Meeting::kShutdown, std::chrono::seconds(60));
    transport->Barrier(internal::Meeting::kEnd, std::chrono::seconds(60));
    raise(SIGKILL);
  }
  EXPECT_THAT(Thrown<PeerFailedError>([&] { job.workers->shutdown(); })->what(),
              HasSubstr("worker1"));
}

RANK_TEST(RpcTest, ABarrierDoesNotPairWithAShutdown, 3) {
  Job job(Functions());
  std::string error;
  try {
    job.rank() == 1 ? job.workers->shutdown() : job.workers->barrier();
  } catch (const ConfigurationError& own) {
    error = own.what();
  } catch (const PeerFailedError& of_another) {  // whose report came first
    error = of_another.what();
  }
  EXPECT_THAT(error,
              AllOf(HasSubstr("worker worker1 is in shutdown()"), HasSubstr("is in barrier()")));
}

// The last error of a program whose ranks ran different numbers of batches. The group's timeout is
// 30 minutes.
void EndOneRankEarly(bool in_barrier) {
  Job job(Functions());
  at::Tensor x = at::ones({4});
  for (int step = 0; step < 2; ++step) job.group->all_reduce(x);
  if (job.rank() == 0) {
    // The other rank ends with its error, and says so.
    EXPECT_THAT(Thrown<PeerFailedError>([&] {
                  in_barrier ? job.workers->barrier() : job.workers->shutdown();
                })->what(),
                HasSubstr("worker worker1 failed: "));
    return;
  }
  const auto error = Thrown<CommunicationError>([&] { job.group->all_reduce(x); });
  EXPECT_THAT(error->what(), AllOf(HasSubstr("rank 1 is in collective "),
                                   HasSubstr(std::string("rank 0 is in rpc::Workers::") +
                                             (in_barrier ? "barrier()" : "shutdown()")),
                                   HasSubstr("ddp::Join")));
}

RANK_TEST(RpcTest, ARankInShutdownEndsTheCollectiveOfAnother, 2) { EndOneRankEarly(false); }

RANK_TEST(RpcTest, ARankInABarrierEndsTheCollectiveOfAnother, 2) { EndOneRankEarly(true); }

// A worker that is no rank of the group waits in shutdown() while the group works.
RANK_TEST(RpcTest, AServerMayWaitInShutdownWhileTheOthersReduce, 3) {
  Job job(Functions());
  const auto trainers = job.group->new_group({0, 1});
  if (trainers != nullptr) {
    at::Tensor x = at::ones({4});
    trainers->all_reduce(x);
    EXPECT_EQ(x[0].item<int>(), 2);
  }
  job.workers->shutdown();
}

RANK_TEST(RpcInitTest, DifferentSizesAreNamed, 3) {
  const auto group = init_process_group();
  const auto error = Thrown<ConfigurationError>([&] {
    init(NameOf(group->rank()), group->store(),
         {.rank = group->rank(), .world_size = group->rank() == 2 ? 4 : 3});
  });
  EXPECT_THAT(error->what(), AllOf(HasSubstr("has world_size 3"), HasSubstr("has world_size 4"),
                                   HasSubstr("worker2")));
}

RANK_TEST(RpcInitTest, AWorkerThatDoesNotComeIsNamed, 2) {
  const auto group = init_process_group();
  if (group->rank() == 1) return;
  EXPECT_THAT(Thrown<CommunicationError>([&] {
                init("worker0", group->store(),
                     {.rank = 0, .world_size = 2, .timeout = std::chrono::milliseconds(50)});
              })->what(),
              HasSubstr("worker worker0 could not connect to the 2 workers: ranks 1 did not come"));
}

// For ThreadSanitizer: a watchdog's thread reports while the main thread shuts down.
RANK_TEST(RpcTest, AFailureReportMayComeDuringShutdown, 2) {
  Job job(Functions());
  std::atomic<bool> over = false;
  std::thread watchdog([&] {
    while (job.rank() == 1 && !over) job.workers->report_failure("the watchdog barks");
  });
  EXPECT_THAT(Thrown<PeerFailedError>([&] { job.workers->shutdown(); })->what(),
              HasSubstr("worker worker1 failed: the watchdog barks"));
  over = true;
  watchdog.join();
}

// TensorPipe sees nothing of a worker that gives up: the notice alone ends the waits.
RANK_TEST(RpcTest, AFailureReportEndsAllWaits, 3) {
  std::promise<void> never;
  Job job(Deadly(never.get_future().share()));
  if (job.rank() == 1) {
    job.workers->barrier();
    job.workers->report_failure("its disk is full");
    EXPECT_THROW(job.workers->barrier(), PeerFailedError);
    return;
  }
  const auto error = Thrown<PeerFailedError>([&] {
    job.workers->barrier();  // its end may come after the report
    if (job.rank() == 0) sync<void>("worker2", "wait");
    job.workers->barrier();
  });
  EXPECT_EQ(error->rank(), 1);
  EXPECT_THAT(error->what(), HasSubstr("worker worker1 failed: its disk is full"));
  never.set_value();
}

RANK_TEST(RpcTest, AWorkerThatLeavesEndsAllWaits, 2) {
  std::optional<Job> job(Functions());
  if (job->rank() == 1) return job.reset();
  EXPECT_THAT(Thrown<PeerFailedError>([&] { job->workers->shutdown(); })->what(),
              HasSubstr("worker1"));
}

}  // namespace

// ---- Cores.

namespace internal {
namespace {

TEST(PendingSendsTest, EndsPendingAndLaterMessagesOnce) {
  const auto sends = std::make_shared<PendingSends>([](const PendingSends::Receiver& receiver,
                                                       PendingSends::Future& failed,
                                                       std::optional<PendingSends::Lost>* lost) {
    *lost = {.worker = receiver.worker, .text = failed.tryRetrieveErrorMessage()};
    return std::make_exception_ptr(std::runtime_error("to " + receiver.name));
  });
  std::vector<int> told;
  sends->OnLost([&](const PendingSends::Lost& lost) { told.push_back(lost.worker); });
  const auto make = [] { return c10::make_intrusive<PendingSends::Future>(c10::AnyType::get()); };
  const auto first = make();
  const auto second = make();
  const auto third = make();
  const auto one = sends->Track({1, "one"}, [&] { return first; });
  auto kept = std::make_shared<int>(2);
  const std::weak_ptr<int> watched = kept;
  const auto two = sends->Track(
      {2, "two"}, [&] { return second; }, std::move(kept));
  two->addCallback([&](PendingSends::Future&) { EXPECT_FALSE(watched.expired()); });
  const auto three = sends->Track({3, "three"}, [&] { return third; });
  first->markCompleted(7);
  EXPECT_EQ(one->value().toInt(), 7);
  second->setError(std::make_exception_ptr(std::runtime_error("eof")));
  EXPECT_TRUE(watched.expired());
  EXPECT_EQ(two->tryRetrieveErrorMessage(), "to two");
  EXPECT_EQ(sends->lost()->worker, 2);
  EXPECT_EQ(sends->lost()->text, "eof");
  EXPECT_THAT(told, ElementsAre(2));
  EXPECT_FALSE(three->completed());
  sends->End(std::make_exception_ptr(std::runtime_error("over")));
  EXPECT_EQ(three->tryRetrieveErrorMessage(), "over");
  third->markCompleted(7);  // too late, and harmless
  const auto four = sends->Track({4, "four"}, [&]() -> PendingSends::FuturePtr {
    ADD_FAILURE() << "sent after the end";
    return make();
  });
  EXPECT_EQ(four->tryRetrieveErrorMessage(), "over");
}

}  // namespace
}  // namespace internal
}  // namespace ddp::rpc
