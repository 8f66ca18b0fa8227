// Tests that every rank throws an error of one rank's step, once and with its reason. Tests that
// the next step starts again. The ranks are threads on a fake backend; where a rank ends its
// process, and where Gloo's tags matter, they are processes. The timeout is half an hour: a rank
// that waits for the timeout fails the test.
//
// Length: one case for each place of a step where a rank can fail, with the same helpers.
#include <sys/types.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/mutex.h"

#include "ddp/comm_hook.h"
#include "ddp/common/error.h"
#include "ddp/default_hooks.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/join.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/random_numbers.h"
#include "testing/backend/thread_ranks.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"
#include "testing/throw_in_backward.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::ErrorOfPeer;
using ::ddp::testing::Gradients;
using ::ddp::testing::Randomize;
using ::ddp::testing::RandomNumbers;
using ::ddp::testing::SameOnAllRanks;
using ::ddp::testing::ThrowInBackward;
using ::testing::AllOf;
using ::testing::HasSubstr;

torch::Tensor Explode(const torch::Tensor& x) {
  return ThrowInBackward(x, "not a number in the middle of the model");
}

enum class Fault { kNone, kForward, kBackwardAtOnce, kBackwardLater, kLeaveOut };

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(3, 4));
    last = register_module("last", torch::nn::Linear(4, 2));
    sometimes = register_module("sometimes", torch::nn::Linear(4, 2));
  }
  torch::Tensor forward(const torch::Tensor& x, Fault fault) {
    if (fault == Fault::kForward) throw std::runtime_error("a sample that cannot be read");
    torch::Tensor y = torch::tanh(first->forward(x));
    if (fault == Fault::kBackwardLater) y = Explode(y);
    torch::Tensor z = last->forward(y);
    if (fault != Fault::kLeaveOut) z = z + sometimes->forward(y);
    return fault == Fault::kBackwardAtOnce ? Explode(z) : z;
  }
  torch::nn::Linear first{nullptr}, last{nullptr}, sometimes{nullptr};
};
TORCH_MODULE(Net);

constexpr int kCulprit = 1;

// Runs one training step; returns the text of its exception. `fails`: the culprit has one.
template <typename Model>
std::string Step(Model& model, ProcessGroup& group, Fault fault, bool fails) {
  const bool culprit = group.rank() == kCulprit;
  const auto step = [&] {
    model->zero_grad();
    model.forward(RandomNumbers(group.rank(), {4, 3}), culprit ? fault : Fault::kNone)
        .pow(2)
        .mean()
        .backward();
  };
  std::string text =
      fails && !culprit ? ErrorOfPeer<std::exception>(group, step) : ErrorOf<std::exception>(step);
  // On a device, a step may have gone on with sums that were aborted. The next one says so, once.
  if (text.find("load model and optimizer") != text.npos) text = ErrorOf<std::exception>(step);
  return text;
}
template <typename Model>
std::string Step(Model& model, ProcessGroup& group, Fault fault) {
  return Step(model, group, fault, fault != Fault::kNone);
}

// Runs two good steps, and compares the ranks.
template <typename Model>
void ExpectHealthy(Model& model, ProcessGroup& group) {
  for (int step = 0; step < 2; ++step) {
    EXPECT_EQ(Step(model, group, Fault::kNone), "no error");
    EXPECT_TRUE(SameOnAllRanks(group, Gradients(*model.module())));
  }
}

const std::vector<DistributedDataParallelOptions>& Variants() {
  static const auto& variants = *new std::vector<DistributedDataParallelOptions>{
      {},
      {.bucket_cap_mb = 1e-5, .gradient_as_bucket_view = true},
      {.bucket_cap_mb = 1e-5, .find_unused_parameters = true},
      {.static_graph = true}};
  return variants;
}

THREAD_RANK_TEST(StepFailureTest, ExceptionsReachEveryRank, 2, 3) {
  for (const DistributedDataParallelOptions& options : Variants()) {
    Net net;
    DistributedDataParallel model(net, group, options);
    for (const auto& [fault, culprit_text, news] :
         std::vector<std::tuple<Fault, std::string, std::string>>{
             {Fault::kForward, "a sample that cannot be read",
              "the forward threw: a sample that cannot be read"},
             {Fault::kBackwardAtOnce, "not a number", "an exception ended the backward"},
             {Fault::kBackwardLater, "not a number", "for first.weight, first.bias"}}) {
      ExpectHealthy(model, *group);
      const std::string text = Step(model, *group, fault);
      if (group->rank() == kCulprit) {
        EXPECT_THAT(text, HasSubstr(culprit_text));
      } else {
        EXPECT_THAT(text, AllOf(HasSubstr("rank 1 failed"), HasSubstr(news)));
      }
    }
    ExpectHealthy(model, *group);
  }
}

THREAD_RANK_TEST(StepFailureTest, UnusedParameterOnOneRankIsFoundByTheNextForward, 2) {
  for (const bool view : {false, true}) {
    Net net;
    DistributedDataParallel model(net, group, {.gradient_as_bucket_view = view});
    ExpectHealthy(model, *group);
    std::string text = Step(model, *group, Fault::kLeaveOut);
    if (group->rank() == kCulprit) {
      EXPECT_EQ(text, "no error");  // its next forward finds the error
      text = Step(model, *group, Fault::kNone);
      EXPECT_THAT(text, HasSubstr("find_unused_parameters"));
    } else {
      EXPECT_THAT(text, HasSubstr("rank 1 failed"));
    }
    EXPECT_THAT(text, HasSubstr("no gradient came for sometimes.weight, sometimes.bias"));
    ExpectHealthy(model, *group);
  }
  // The error comes from the model's end, without a next forward, or from check_finished().
  for (const bool check : {false, true}) {
    Net net;
    std::string text;
    {
      DistributedDataParallel model(net, group);
      text = Step(model, *group, Fault::kLeaveOut);
      if (check && group->rank() == kCulprit) {
        text = ErrorOf<ReductionError>([&] { model.check_finished(); });
      }
    }
    if (check || group->rank() != kCulprit) {
      EXPECT_THAT(text, HasSubstr("no gradient came for sometimes.weight, sometimes.bias"));
    }
    Net next;
    DistributedDataParallel model(next, group);
    ExpectHealthy(model, *group);
  }
}

THREAD_RANK_TEST(StepFailureTest, HookThatThrows, 2) {
  Net net;
  DistributedDataParallel model(net, group);
  enum class Way { kFine, kThrow, kWrongType, kWrongShape, kFailLater, kNoFuture };
  Way way = Way::kFine;
  const auto hook = [&](const std::shared_ptr<ProcessGroup>& state, GradBucket& bucket) {
    const Way mine = state->rank() == kCulprit ? way : Way::kFine;
    if (mine == Way::kThrow) throw std::runtime_error("the hook has no memory");
    if (mine == Way::kNoFuture) return TensorFuture();
    const at::Tensor buffer = bucket.buffer().div_(state->size());
    const TensorFuture reduced = state->all_reduce_async(buffer);
    if (mine == Way::kFine) return reduced;
    return reduced->then(
        [mine, buffer](c10::ivalue::Future&) -> c10::IValue {
          if (mine == Way::kFailLater) throw std::runtime_error("decompression failed");
          if (mine == Way::kWrongType) return buffer.to(at::kDouble);
          return buffer.narrow(0, 0, 1).clone();
        },
        c10::TensorType::get());
  };
  model.register_comm_hook(group, hook);
  for (const auto& [next, news] :
       std::vector<std::pair<Way, std::string>>{{Way::kThrow, "the hook has no memory"},
                                                {Way::kWrongType, "ouble"},
                                                {Way::kWrongShape, "[1]"},
                                                {Way::kFailLater, "decompression failed"},
                                                {Way::kNoFuture, "no future"}}) {
    way = Way::kFine;
    ExpectHealthy(model, *group);
    way = next;
    std::string text = Step(model, *group, Fault::kNone, /*fails=*/true);
    // When the hook's own sum was complete, the other ranks may get the failure only in their next
    // step.
    if (text == "no error" && group->rank() != kCulprit) text = Step(model, *group, Fault::kNone);
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1"), HasSubstr(news), HasSubstr("last.weight")));
    EXPECT_EQ(text.find(news), text.rfind(news)) << text;
    if (group->rank() == kCulprit) {
      EXPECT_EQ(text.find("gradient bucket 0"), text.rfind("gradient bucket 0")) << text;
    }
  }
  way = Way::kFine;
  ExpectHealthy(model, *group);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { model.register_comm_hook(group, hook); }),
              HasSubstr("registered already"));
}

// The order of registration differs from that of the gradients, so the rebuilt buckets differ from
// the first ones.
struct TurnedImpl : torch::nn::Module {
  TurnedImpl() {
    last = register_module("last", torch::nn::Linear(4, 2));
    first = register_module("first", torch::nn::Linear(3, 4));
  }
  torch::Tensor forward(const torch::Tensor& x, Fault fault) {
    if (fault == Fault::kForward) throw std::runtime_error("a sample that cannot be read");
    torch::Tensor y = torch::tanh(first->forward(x));
    if (fault == Fault::kBackwardLater) y = Explode(y);
    return last->forward(y);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(Turned);

THREAD_RANK_TEST(StepFailureTest, LearnedBucketsOutliveAFailure, 2, 3) {
  for (const DistributedDataParallelOptions& options : std::vector<DistributedDataParallelOptions>{
           {.bucket_cap_mb = 1e-4},
           {.bucket_cap_mb = 1e-4, .gradient_as_bucket_view = true},
           {.bucket_cap_mb = 1e-4, .find_unused_parameters = true},
           {.bucket_cap_mb = 1e-4, .static_graph = true}}) {
    std::vector<torch::Tensor> results;
    for (const Fault fault : {Fault::kNone, Fault::kForward, Fault::kBackwardLater}) {
      Turned net;
      Randomize(*net, 11);
      DistributedDataParallel model(net, group, options);
      const auto initial = model.bucket_layout();
      // A failure in the step that rebuilds the buckets: some ranks may have got the new ones.
      if (fault != Fault::kNone) {
        EXPECT_NE(Step(model, *group, fault), "no error");
      }
      if (options.find_unused_parameters) {
        EXPECT_EQ(Step(model, *group, Fault::kNone), "no error");
        model.rebuild_buckets();
      }
      ExpectHealthy(model, *group);
      const auto learned = model.bucket_layout();
      EXPECT_NE(learned, initial);
      if (fault != Fault::kNone) {
        EXPECT_NE(Step(model, *group, fault), "no error");
      }
      EXPECT_EQ(Step(model, *group, Fault::kNone), "no error");
      EXPECT_EQ(model.bucket_layout(), learned);
      results.push_back(Gradients(*net));
      ExpectHealthy(model, *group);
      EXPECT_EQ(model.bucket_layout(), learned);
      EXPECT_TRUE(torch::equal(results.back(), results.front()));  // the same bits
    }
  }
}

RANK_TEST(StepFailureTest, BufferHookThatThrows, 2) {
  const auto group = init_process_group();
  Net net;
  net->register_buffer("seen", torch::zeros({1}));
  DistributedDataParallel model(net, group);
  bool fail = false;
  model.register_buffer_comm_hook(group, [&](const std::shared_ptr<ProcessGroup>& state,
                                             const std::map<std::string, torch::Tensor>& buffers) {
    if (fail && state->rank() == kCulprit) throw std::runtime_error("no such buffer");
    return std::vector<TensorFuture>{state->all_reduce_async(buffers.at("seen"))};
  });
  for (int round = 0; round < 2; ++round) {
    fail = false;
    ExpectHealthy(model, *group);
    fail = true;
    EXPECT_THAT(Step(model, *group, Fault::kNone, /*fails=*/true), HasSubstr("no such buffer"));
  }
  fail = false;
  ExpectHealthy(model, *group);
}

RANK_TEST(StepFailureTest, RankThatIsGoneIsNamedByEveryForward, 2) {
  const auto group = init_process_group();
  Net net;
  DistributedDataParallel model(net, group);
  ExpectHealthy(model, *group);
  if (group->rank() == kCulprit) _exit(0);
  EXPECT_THAT(Step(model, *group, Fault::kNone, /*fails=*/true), HasSubstr("rank"));
  for (int step = 0; step < 3; ++step) {
    model->zero_grad();
    EXPECT_THAT(ErrorOf<PeerFailedError>([&] {
                  model.forward(torch::randn({4, 3}), Fault::kNone);
                }),
                HasSubstr("rank 1"));
  }
}

// The most common mistake, on a model with a buffer: rank 1 has one batch less, and then does
// something else.
enum class Afterwards { kBarrier, kSum, kLeave, kExit };

void OneBatchLess(std::shared_ptr<ProcessGroup> group, Afterwards afterwards) {
  std::string text;
  {
    Net net;
    net->register_buffer("seen", torch::zeros({3}));
    DistributedDataParallel model(net, group);
    ExpectHealthy(model, *group);
    if (group->rank() != kCulprit) text = Step(model, *group, Fault::kNone);
  }
  if (group->rank() == kCulprit) {
    if (afterwards == Afterwards::kExit) _exit(0);
    if (afterwards == Afterwards::kBarrier) {
      text = ErrorOf<CommunicationError>([&] { group->barrier(); });
    } else if (afterwards == Afterwards::kSum) {
      text = ErrorOf<CommunicationError>([&] { group->all_reduce(torch::ones({3})); });
    } else {
      group.reset();
    }
  }
  if (afterwards == Afterwards::kLeave || afterwards == Afterwards::kExit) {
    if (!group || group->rank() == kCulprit) return;
    EXPECT_THAT(text, HasSubstr("because rank 1 failed: "));
    // On the fake backend the root of a broadcast waits for no rank, so it comes to the gradients.
    const bool exits = afterwards == Afterwards::kExit;
    EXPECT_THAT(text,
                HasSubstr(exits ? "the broadcast of buffers" : "it has left the process group"));
    if (!exits) {
      EXPECT_THAT(text,
                  AllOf(HasSubstr("was in collective 14, the all-reduce of gradient bucket 0"),
                        HasSubstr("ddp::Join")));
    }
    return;
  }
  EXPECT_THAT(text,
              AllOf(HasSubstr("rank 1 is in collective"),
                    HasSubstr(afterwards == Afterwards::kBarrier ? "a barrier (all-reduce"
                                                                 : "an all-reduce (all-red"),
                    HasSubstr("the broadcast of buffers (seen) (broadcast, 12 bytes of Byte)"),
                    HasSubstr("different numbers of batches"), HasSubstr("ddp::Join")));
}

THREAD_RANK_TEST(
    StepFailureTest, OneBatchLessThenABarrier, 2,
    /*not_on_device=*/"ranks in different collectives are named with shm and Gloo only") {
  OneBatchLess(std::move(group), Afterwards::kBarrier);
}

RANK_TEST(StepFailureTest, OneBatchLessThenASum, .world_size = 2,
          .not_on_device = "ranks in different collectives are named with shm and Gloo only") {
  OneBatchLess(init_process_group(), Afterwards::kSum);
}

THREAD_RANK_TEST(
    StepFailureTest, OneBatchLessThenTheEnd, 2,
    /*not_on_device=*/"ranks in different collectives are named with shm and Gloo only") {
  OneBatchLess(std::move(group), Afterwards::kLeave);
}

RANK_TEST(StepFailureTest, OneBatchLessThenExit, .world_size = 2,
          .not_on_device = "ranks in different collectives are named with shm and Gloo only") {
  OneBatchLess(init_process_group(), Afterwards::kExit);
}

// How a rank leaves out the backward of an iteration.
enum class LeftOut : uint8_t { kContinue, kException, kConstantLoss };

// Runs five iterations. `leaves_out`: this rank has no backward in iteration 3. Returns the number
// of iterations that ended.
int FiveIterations(DistributedDataParallel<torch::nn::LinearImpl>& model, int64_t width,
                   bool leaves_out, LeftOut way, int* ended, bool keeps_outputs = false) {
  std::vector<torch::Tensor> kept;
  for (*ended = 0; *ended < 5; ++*ended) {
    model.zero_grad();
    const torch::Tensor output = model.forward(torch::ones({2, width}));
    if (keeps_outputs) kept.push_back(output);
    if (*ended == 3) kept.clear();
    if (leaves_out && *ended == 2) {
      if (way == LeftOut::kContinue) continue;
      try {
        if (way == LeftOut::kException) throw std::runtime_error("a label is missing");
        torch::ones({}).requires_grad_().backward();
      } catch (const std::runtime_error&) {
      }
      continue;
    }
    output.sum().backward();
  }
  return *ended;
}

void ALeftOutBackwardIsNamed() {
  const auto group = init_process_group();
  for (const int64_t width : {8, 128}) {  // below and above 16 KiB
    for (const LeftOut way : {LeftOut::kContinue, LeftOut::kException, LeftOut::kConstantLoss}) {
      DistributedDataParallel model(torch::nn::Linear(width, width), group);
      int ended = 0;
      const std::string text = ErrorOf<CommunicationError>(
          [&] { FiveIterations(model, width, group->rank() == 1, way, &ended); });
      // Rank 1 notices at its next backward, the others in the backward that rank 1 left out.
      EXPECT_EQ(ended, group->rank() == 1 ? 3 : 2);
      EXPECT_THAT(text, AllOf(HasSubstr("rank 1 is in collective"),
                              HasSubstr("1 iteration(s) without a backward before iteration 4"),
                              HasSubstr("leave it out on all ranks: see ddp::all_agree()")));
      // A step that all ranks leave out together is no error, also when one of them keeps its
      // output, or drops it later.
      EXPECT_EQ(FiveIterations(model, width, /*leaves_out=*/true, way, &ended,
                               /*keeps_outputs=*/group->rank() == 0),
                5);
      EXPECT_TRUE(model->parameters()[0].grad().allclose(2 * torch::ones({width, width})));
    }
  }
}

RANK_TEST(StepFailureTest, ALeftOutBackwardIsNamedInMemory, .world_size = {2, 3, 4},
          .not_on_device = "ranks in different collectives are named with shm and Gloo only") {
  ALeftOutBackwardIsNamed();
}

RANK_TEST(StepFailureTest, ALeftOutBackwardIsNamedOnGloo, .world_size = {2, 3},
          .environment = {{"DDP_BACKEND", "gloo"}},
          .not_on_device = "ranks in different collectives are named with shm and Gloo only") {
  ALeftOutBackwardIsNamed();
}

THREAD_RANK_TEST(StepFailureTest, HooksThatDifferAreNamed, 2) {
  const auto halved = [](const std::shared_ptr<ProcessGroup>& state, GradBucket& bucket) {
    return fp16_compress_hook(state, bucket);
  };
  const auto register_hook = [&](auto& model, int which) {
    if (which == 1) model.register_comm_hook(group, allreduce_hook);
    if (which == 2) model.register_comm_hook(group, fp16_compress_hook);
    if (which == 3) model.register_comm_hook(group, halved, "mine");
  };
  for (const auto& [usual, odd, difference] : std::vector<std::tuple<int, int, std::string>>{
           {0, 1, "comm_hook is none on rank 0 and \"allreduce_hook\" on rank 1"},
           {2, 0, "comm_hook is \"fp16_compress_hook\" on rank 0 and none on rank 1"},
           {1, 2, "\"allreduce_hook\" on rank 0 and \"fp16_compress_hook\" on rank 1"},
           {2, 3, "\"fp16_compress_hook\" on rank 0 and \"mine\" on rank 1"}}) {
    {
      Net net;
      DistributedDataParallel model(net, group);
      register_hook(model, group->rank() == kCulprit ? odd : usual);
      EXPECT_THAT(Step(model, *group, Fault::kNone),
                  AllOf(HasSubstr("the ranks have different comm hooks"), HasSubstr(difference)));
    }
    group->ensure_usable();  // on a device, the backward has reported its exception
    Net next;
    DistributedDataParallel good(next, group);
    register_hook(good, usual);
    ExpectHealthy(good, *group);
  }
  Net net;
  net->register_buffer("seen", torch::zeros({1}));
  DistributedDataParallel model(net, group, {.forward_sync_buffers = true});
  model.register_buffer_comm_hook(
      group,
      [](const std::shared_ptr<ProcessGroup>&, const std::map<std::string, torch::Tensor>&) {
        return std::vector<TensorFuture>();
      },
      group->rank() == kCulprit ? BufferCommHookLocation::kPostForward
                                : BufferCommHookLocation::kPreForward);
  EXPECT_THAT(Step(model, *group, Fault::kNone),
              HasSubstr("buffer_comm_hook is before the forward on rank 0 and after the forward on "
                        "rank 1"));
}

// The hooks have the same name, and send different types.
RANK_TEST(StepFailureTest, HooksOfOneNameThatSendOtherTypes, .world_size = 2,
          .not_on_device = "ranks in different collectives are named with shm and Gloo only") {
  const auto group = init_process_group();
  Net net;
  DistributedDataParallel model(net, group);
  if (group->rank() == kCulprit) {
    model.register_comm_hook(group, fp16_compress_hook, "average");
  } else {
    model.register_comm_hook(group, allreduce_hook, "average");
  }
  EXPECT_THAT(
      Step(model, *group, Fault::kNone),
      AllOf(HasSubstr("rank 0 is in collective"), HasSubstr("of Float"),
            HasSubstr("rank 1 is in collective"), HasSubstr("of Half"), HasSubstr("comm hooks")));
}

// The calls of a store by one thread, while that thread is watched.
class WatchedCalls {
 public:
  void Watch() {
    MutexLock lock(mutex_);
    thread_ = std::this_thread::get_id();
  }
  void Note(const std::string& method) {
    MutexLock lock(mutex_);
    if (std::this_thread::get_id() == thread_) calls_.push_back(method);
  }
  // Ends the watch.
  std::vector<std::string> Take() {
    MutexLock lock(mutex_);
    thread_ = std::thread::id();
    return std::exchange(calls_, {});
  }

 private:
  Mutex mutex_;
  std::thread::id thread_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> calls_ ABSL_GUARDED_BY(mutex_);
};

// A store that notes the calls of each method, and forwards them.
class WatchedStore : public c10d::Store {
 public:
  using Bytes = std::vector<uint8_t>;

  WatchedStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<WatchedCalls> calls)
      : store_(std::move(store)), calls_(std::move(calls)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<WatchedStore>(Noted("clone").clone(), calls_);
  }
  void set(const std::string& key, const Bytes& value) override { Noted("set").set(key, value); }
  Bytes compareSet(const std::string& key, const Bytes& old, const Bytes& value) override {
    return Noted("compareSet").compareSet(key, old, value);
  }
  Bytes get(const std::string& key) override { return Noted("get").get(key); }
  int64_t add(const std::string& key, int64_t value) override {
    return Noted("add").add(key, value);
  }
  bool deleteKey(const std::string& key) override { return Noted("deleteKey").deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return Noted("check").check(keys); }
  int64_t getNumKeys() override { return Noted("getNumKeys").getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { Noted("wait").wait(keys); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    Noted("wait").wait(keys, timeout);
  }
  const std::chrono::milliseconds& getTimeout() const noexcept override {
    return store_->getTimeout();
  }
  void setTimeout(const std::chrono::milliseconds& timeout) override {
    store_->setTimeout(timeout);
  }
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    return Noted("multiGet").multiGet(keys);
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override {
    Noted("multiSet").multiSet(keys, values);
  }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }

 private:
  c10d::Store& Noted(const std::string& method) {
    calls_->Note(method);
    return *store_;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<WatchedCalls> calls_;
};

// The objects of rank 1 when its program throws.
enum class Held { kGroup, kJoin, kUnfinishedPass };

// Returns the exception of rank 0; of rank 1, which throws, the calls of the store that its thread
// made between the throw and the catch.
std::string UnwindThrough(Held held, ProcessGroup& outer) {
  const auto calls = std::make_shared<WatchedCalls>();
  const auto store = c10::make_intrusive<WatchedStore>(
      c10::make_intrusive<c10d::PrefixStore>(std::to_string(static_cast<int>(held)), outer.store()),
      calls);
  std::string text = "no error";
  try {
    const auto group = std::make_shared<ProcessGroup>(
        store, ProcessGroup::Place{
                   .rank = outer.rank(), .size = 2, .local_rank = outer.rank(), .local_size = 2});
    using Model = decltype(DistributedDataParallel(Net(), group));
    std::optional<Model> model;
    std::optional<Join> join;
    if (held != Held::kGroup) {
      model.emplace(Net(), group);
      ExpectHealthy(*model, *group);
    }
    const auto begin_join = [&] {
      if (held == Held::kJoin) join.emplace(std::vector<JoinableRef>{&*model});
    };
    if (group->rank() == kCulprit) {
      begin_join();
      if (held == Held::kUnfinishedPass) Step(*model, *group, Fault::kLeaveOut);
      calls->Watch();
      throw std::runtime_error("ends the program");
    }
    text = ErrorOfPeer<PeerFailedError>(*group, [&] {
      if (!join.has_value()) begin_join();  // may find the failure already
      if (!model.has_value()) return group->barrier();
      torch::manual_seed(0);
      model->forward(torch::randn({4, 3}), Fault::kNone).pow(2).mean().backward();
    });
    if (join.has_value()) join->abandon("a peer failed");
  } catch (const std::runtime_error&) {
    text = ::testing::PrintToString(calls->Take());
  }
  return text;
}

// The destructors of a group, a Join and a reducer report to the peers, and must not wait for the
// network while an exception unwinds their thread: another thread writes the report.
RANK_TEST(StepFailureTest, AnUnwindingThreadDoesNotCallTheStore, 2) {
  const auto outer = init_process_group();
  for (const auto& [held, report] : std::vector<std::pair<Held, std::string>>{
           {Held::kGroup, "an exception ended the program of rank 1"},
           {Held::kJoin, "an exception ended the loop under a Join on rank 1"},
           {Held::kUnfinishedPass, "rank 1 failed"}}) {
    const std::string text = UnwindThrough(held, *outer);
    if (outer->rank() == kCulprit) {
      EXPECT_EQ(text, "{}") << report;
    } else {
      EXPECT_THAT(text, HasSubstr(report));
    }
  }
}

}  // namespace
}  // namespace ddp
