// Tests backwards over several workers that fail: exceptions, deaths, and messages that are lost or
// late. Workers are processes; trainers have a process group of their own, on Gloo.
//
// Length: one case for each way in which such a backward fails, on the same two modules.
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/message.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "ddp/rpc/rpc.h"
#include "ddp/rpc/test_context_job.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"
#include "testing/ranks/rank_test.h"

namespace ddp::rpc {
namespace {

NOT_ON_DEVICE("RPC carries tensors of the CPU only");

using ::ddp::rpc::testing::Bomb;
using ::ddp::rpc::testing::ExpectEqual;
using ::ddp::rpc::testing::Faults;
using ::ddp::rpc::testing::Ids;
using ::ddp::rpc::testing::Job;
using ::ddp::rpc::testing::kRate;
using ::ddp::rpc::testing::MixOn;
using ::ddp::rpc::testing::Net;
using ::ddp::rpc::testing::Shard;
using ::ddp::rpc::testing::Stall;
using ::ddp::rpc::testing::UsesSpare;
using ::ddp::testing::ErrorOf;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using torch::distributed::autograd::DistAutogradContainer;

constexpr auto kForward = torch::distributed::rpc::FORWARD_AUTOGRAD_REQ;
constexpr auto kBackward = torch::distributed::rpc::BACKWARD_AUTOGRAD_REQ;
constexpr auto kCleanup = torch::distributed::rpc::CLEANUP_AUTOGRAD_CONTEXT_REQ;

// ---- Failures.

// The trainer whose graph fails throws the server's words; the other one gets a failure report.
// Both train on in the next context.
RANK_TEST(ContextFailuresTest, AnExceptionOnTheServerHangsNobody, 3) {
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
RANK_TEST(ContextFailuresTest, AnExceptionBeforeTheModelHangsNobody, 3) {
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

RANK_TEST(ContextFailuresTest, AnExceptionOnATrainerHangsNobody, 3) {
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

RANK_TEST(ContextFailuresTest, TheServersDeathEndsTheBackward, .world_size = 3, .killed_rank = 2) {
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
RANK_TEST(ContextFailuresTest, APlainBackwardThroughACallIsRefused, 3) {
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
RANK_TEST(ContextFailuresTest, AFailureReportEndsABackward, 3) {
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

RANK_TEST(ContextFailuresTest, ALostCallNamesTheWorker, 3) {
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
RANK_TEST(ContextFailuresTest, ALostMessageOfABackwardNamesTheWorker, 3) {
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
RANK_TEST(ContextFailuresTest, AFailureBehindTheServerNamesTheRightWorker, .world_size = 3,
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
RANK_TEST(ContextFailuresTest, ALostMessageEndsTheReductionOfAllTrainers, 3) {
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
RANK_TEST(ContextFailuresTest, ALateMessageOfABackwardIsWaitedFor, 2) {
  Registry registry;
  std::shared_ptr<Faults> faults;
  registry.function("await_held", [&faults] {
    while (!faults->holds()) std::this_thread::yield();
  });
  registry.function("release", [&faults] { faults->Release(); });
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
    // A backward of trainer 1 sends through trainer 0 too: that message is not the one to hold.
    if (job.rank() == 1) sync<void>("worker0", "await_held");
    context.backward(loss);
    EXPECT_TRUE(torch::equal(context.grad(x), torch::full({2}, 3.0)));
    if (job.rank() == 1) sync<void>("worker0", "release");
  }
  job.workers->shutdown();
}

// The message comes when the trainer has given up, and when its context has ended.
RANK_TEST(ContextFailuresTest, AMessageOfABackwardThatIsTooLateDoesNothing, 3) {
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
RANK_TEST(ContextFailuresTest, AContextOutlivesItsMessages, 3) {
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
RANK_TEST(ContextFailuresTest, TrainingWithLateMessagesEndsWithTheSameBits, 3) {
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
RANK_TEST(ContextFailuresTest, TrainingWithLostMessagesEndsWithTheSameBits, 3) {
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

}  // namespace
}  // namespace ddp::rpc
