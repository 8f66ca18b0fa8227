#include "elastic/training/training.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <future>
#include <set>
#include <stdexcept>

#include "ddp/ddp.h"
#include "elastic/checkpoint/group/faulty_store.h"
#include "testing/accelerator/accelerator.h"
#include "testing/accelerator/sim_group.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp::elastic {
namespace {

namespace fs = std::filesystem;
using ::ddp::testing::ErrorOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kAny = Training::Resume::kAny;
constexpr auto kNever = Training::Resume::kNever;
constexpr int64_t kSamples = 23;
constexpr int64_t kBatch = 5;  // 5 steps per epoch, the last of 3 samples

torch::Tensor Inputs(const std::vector<int64_t>& indices) {
  const torch::Tensor column = torch::tensor(indices, torch::kLong).reshape({-1, 1});
  return torch::empty(column.sizes(), torch::kDouble).copy_(column) / kSamples;
}

torch::Tensor Targets(const std::vector<int64_t>& indices) { return 3 * Inputs(indices) + 1; }

torch::nn::Linear Net() {
  torch::manual_seed(7);
  torch::nn::Linear net(1, 1);
  net->to(torch::kDouble);
  return net;
}

// The trainer of one rank, as a user writes it.
struct Trainer {
  Trainer(std::shared_ptr<ProcessGroup> ranks, Training::Options options)
      : group(std::move(ranks)), training(model, optimizer, WithData(std::move(options))) {}

  static Training::Options WithData(Training::Options options) {
    options.dataset_size = kSamples;
    options.global_batch_size = kBatch;
    options.seed = 3;
    return options;
  }

  torch::Tensor Loss(const std::vector<int64_t>& indices) {
    return torch::mse_loss(model->forward(Inputs(indices)), Targets(indices));
  }

  // Trains until the end, or until `steps` steps are done.
  void Run(int64_t steps = -1) {
    while (training.next_epoch()) {
      while (const auto batch = training.next_batch()) {
        if (training.steps() == steps) return;
        training.step(Loss(batch->indices));
      }
    }
  }

  std::shared_ptr<ProcessGroup> group;
  torch::nn::Linear net = Net();
  DistributedDataParallel<torch::nn::Linear> model{net, group};
  torch::optim::SGD optimizer{net->parameters(), 0.1};
  Training training;
};

// Makes a folder and returns the path of its subfolder, which does not exist. All ranks get the
// same path. Call it once in a body.
std::string Folder(ProcessGroup& group) {
  if (group.rank() == 0) {
    std::string path = ::testing::TempDir() + "/training_XXXXXX";
    EXPECT_NE(mkdtemp(path.data()), nullptr) << path;
    group.store()->set("test/folder", path);
  }
  return group.store()->get_to_str("test/folder") + "/checkpoints";
}

size_t Checkpoints(const std::string& folder) {
  size_t count = 0;
  if (!fs::exists(folder)) return 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename().string().rfind("step-", 0) == 0) ++count;
  }
  return count;
}

// Trains one process on whole batches. Any number of ranks must give the same result.
std::pair<torch::Tensor, double> Reference(int64_t epochs) {
  torch::nn::Linear net = Net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  ElasticSampler sampler({.dataset_size = kSamples, .global_batch_size = kBatch, .seed = 3}, 0, 1);
  double loss_sum = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    sampler.set_epoch(static_cast<uint32_t>(epoch));
    loss_sum = 0;
    while (const auto batch = sampler.next_batch()) {
      optimizer.zero_grad();
      const auto loss =
          torch::mse_loss(net->forward(Inputs(batch->indices)), Targets(batch->indices));
      loss.backward();
      optimizer.step();
      sampler.commit();
      loss_sum += loss.item<double>() * static_cast<double>(batch->indices.size());
    }
  }
  return {testing::Flatten(net->parameters()), loss_sum / kSamples};
}

// 3 ranks get shares of one or two samples, 4 ranks of none or one in the last batch.
RANK_TEST(TrainingTest, TrainsLikeOneProcess, {1, 3, 4}) {
  const auto group = init_process_group();
  for (const auto reduction : {Training::LossReduction::kMean, Training::LossReduction::kSum}) {
    Trainer trainer(group, {.epochs = 3, .loss = reduction});
    // step() finalizes the backward itself.
    trainer.model.set_require_manual_backward_finalization(reduction ==
                                                           Training::LossReduction::kSum);
    double mean_loss = 0;
    std::multiset<int64_t> seen;
    while (trainer.training.next_epoch()) {
      while (const auto batch = trainer.training.next_batch()) {
        torch::Tensor loss = trainer.Loss(batch->indices);
        if (reduction == Training::LossReduction::kSum) {
          loss = (trainer.model->forward(Inputs(batch->indices)) - Targets(batch->indices))
                     .pow(2)
                     .sum();
        }
        trainer.training.step(loss);
      }
      EXPECT_TRUE(trainer.training.epoch_complete());
      mean_loss = trainer.training.mean_loss();
    }
    const auto [weights, wanted_loss] = Reference(3);
    EXPECT_TRUE(torch::allclose(testing::Flatten(trainer.net->parameters()), weights, 0, 1e-12));
    EXPECT_NEAR(mean_loss, wanted_loss, 1e-12);
    EXPECT_EQ(trainer.training.steps(), 15);
  }
}

// A step that one rank leaves out is left out by all, with the others' steps as they were.
RANK_TEST(TrainingTest, AStepIsLeftOutOnAllRanks, {1, 2, 4}) {
  const auto group = init_process_group();
  int asked = 0;
  Trainer trainer(group, {.epochs = 2, .skip_step_if = [&](const at::Tensor& loss) {
                            EXPECT_TRUE(loss.isfinite().item<bool>()) << "asked without samples";
                            return ++asked == 3 && group->rank() == group->size() - 1;
                          }});
  int left_out = 0;
  while (trainer.training.next_epoch()) {
    while (const auto batch = trainer.training.next_batch()) {
      const torch::Tensor before = testing::Flatten(trainer.net->parameters()).clone();
      trainer.training.step(trainer.Loss(batch->indices));
      const torch::Tensor after = testing::Flatten(trainer.net->parameters());
      left_out += torch::equal(before, after) ? 1 : 0;
      EXPECT_TRUE(testing::SameOnAllRanks(*group, after));
    }
  }
  EXPECT_EQ(left_out, 1);
  EXPECT_EQ(trainer.training.steps(), 10);
}

// Trains with the parts of step(), over micro-batches of one sample.
RANK_TEST(TrainingTest, AccumulatesLikeOneProcess, {1, 4}) {
  const auto group = init_process_group();
  Trainer trainer(group, {.epochs = 1});
  while (trainer.training.next_epoch()) {
    while (const auto batch = trainer.training.next_batch()) {
      trainer.optimizer.zero_grad();
      torch::Tensor weighted = torch::zeros({}, torch::kDouble);
      for (const int64_t index : batch->indices) {
        weighted = weighted + trainer.training.scaled(trainer.Loss({index}), 1);
      }
      if (batch->indices.empty()) weighted = trainer.training.scaled(trainer.Loss({}));
      weighted.backward();
      trainer.optimizer.step();
      trainer.training.commit();
    }
    EXPECT_NEAR(trainer.training.mean_loss(), Reference(1).second, 1e-12);
  }
  EXPECT_TRUE(
      torch::allclose(testing::Flatten(trainer.net->parameters()), Reference(1).first, 0, 1e-12));
}

void ContinuesWhereACheckpointLies(bool in_background) {
  const auto group = init_process_group();
  const std::string folder = Folder(*group);
  const Training::Options options = {.epochs = 3,
                                     .checkpoint_folder = folder,
                                     .checkpoint_every = 4,
                                     .checkpoint_in_background = in_background,
                                     .resume = kAny};
  {
    Trainer stopped(group, options);
    EXPECT_FALSE(stopped.training.restored().has_value());
    stopped.Run(/*steps=*/9);
  }
  Trainer continued(group, options);
  EXPECT_EQ(continued.training.steps(), 8);
  EXPECT_EQ(continued.training.restored()->step, 8);
  continued.Run();
  EXPECT_EQ(continued.training.steps(), 15);
  // A restart of a completed job makes no step and no checkpoint.
  const size_t checkpoints = Checkpoints(folder);
  Trainer done(group, options);
  done.Run();
  EXPECT_EQ(done.training.steps(), 15);
  EXPECT_EQ(Checkpoints(folder), checkpoints);
  Trainer undisturbed(group, {.epochs = 3});
  undisturbed.Run();
  EXPECT_TRUE(torch::equal(testing::Flatten(done.net->parameters()),
                           testing::Flatten(undisturbed.net->parameters())));
}

RANK_TEST(TrainingTest, ContinuesWhereACheckpointLies, {1, 3}) {
  ContinuesWhereACheckpointLies(/*in_background=*/false);
}
RANK_TEST(TrainingTest, ContinuesWhereACheckpointFromTheBackgroundLies, {1, 3}) {
  ContinuesWhereACheckpointLies(/*in_background=*/true);
}

RANK_TEST(TrainingTest, SavesTheEndOfAnEpochAfterItsReport, 1) {
  const auto group = init_process_group();
  const std::string folder = Folder(*group);
  Trainer trainer(group, {.epochs = 2, .checkpoint_folder = folder, .checkpoint_every = 5});
  while (trainer.training.next_epoch()) {
    const size_t before = Checkpoints(folder);
    EXPECT_EQ(before, static_cast<size_t>(trainer.training.epoch()));
    while (const auto batch = trainer.training.next_batch()) {
      trainer.training.step(trainer.Loss(batch->indices));
    }
    EXPECT_EQ(Checkpoints(folder), before) << "the report of an epoch stands before its checkpoint";
  }
  EXPECT_EQ(Checkpoints(folder), 2u);
}

// The store fails once, in one call of one rank, in the save after the last step. Some or all ranks
// then miss that the checkpoint is saved, and all ranks save it again.
RANK_TEST(TrainingTest, AFaultOfTheStoreInTheLastSaveLosesNothing, 3) {
  struct Fault {
    int rank;
    std::string call;
    std::string key;  // the end of it: attempt, round, name. The restore is attempts 1 and 2.
  };
  const auto all = init_process_group();
  const std::string root = Folder(*all);
  int number = 0;
  for (const Fault& fault : {Fault{1, "set", "/3/0/value/1"}, Fault{1, "multiGet", "/3/1/answer"},
                             Fault{0, "set", "/3/1/answer"}}) {
    const std::string folder = root + std::to_string(number);
    const auto part = c10::make_intrusive<c10d::PrefixStore>(std::to_string(number), all->store());
    ++number;
    std::atomic<int> faults = 0;
    const auto store = c10::make_intrusive<FaultyStore>(
        part, [&, rank = all->rank()](const std::string& call, const std::string& key) {
          return rank == fault.rank && call == fault.call && key.ends_with(fault.key) &&
                 ++faults == 1;
        });
    const auto group = std::make_shared<ProcessGroup>(
        store, ProcessGroup::Place{
                   .rank = all->rank(), .size = 3, .local_rank = all->rank(), .local_size = 3});
    Training::Options options = {.epochs = 1, .checkpoint_folder = folder, .checkpoint_every = 5};
    {
      Trainer trainer(group, options);
      trainer.Run();
      EXPECT_EQ(faults > 0, all->rank() == fault.rank);
    }
    all->barrier();
    EXPECT_EQ(Checkpoints(folder), 1u);
    options.resume = kAny;
    Trainer done(all, options);
    EXPECT_EQ(done.training.steps(), 5);
    EXPECT_FALSE(done.training.next_epoch());
  }
}

RANK_TEST(TrainingTest, ARestartWithoutCheckpointsIsAnErrorInTheLog, 2) {
  const auto group = init_process_group();
  const std::string folder = Folder(*group);
  ASSERT_EQ(setenv("TORCHELASTIC_RESTART_COUNT", "1", 1), 0);
  ::testing::internal::CaptureStderr();
  Trainer trainer(group, {.epochs = 1, .checkpoint_folder = folder});
  const std::string log = ::testing::internal::GetCapturedStderr();
  const bool logged =
      log.find(folder + " holds no checkpoint: the training begins at step 0") != std::string::npos;
  EXPECT_EQ(logged, group->rank() == 0) << log;
}

// Under torchrun an agent counts the failures of its own workers only.
RANK_TEST(TrainingTest, ARestartThatOneAgentCountsIsARestartOfAllRanks, 2) {
  const auto group = init_process_group();
  const Training::Options options = {
      .epochs = 1, .checkpoint_folder = Folder(*group), .checkpoint_every = 3};
  for (const char* name : {"DDP_GENERATION", "DDP_GENERATION_NONCE"}) {
    ASSERT_EQ(unsetenv(name), 0);
  }
  Trainer(group, options).Run(/*steps=*/4);
  ASSERT_EQ(setenv("TORCHELASTIC_RESTART_COUNT", group->rank() == 1 ? "1" : "0", 1), 0);
  Trainer continued(group, options);
  EXPECT_EQ(continued.training.steps(), 3);
  ASSERT_TRUE(continued.training.restored().has_value());
}

RANK_TEST(TrainingTest, RefusesTheFolderOfAnotherJob, 1) {
  const auto group = init_process_group();
  const std::string folder = Folder(*group);
  Trainer(group, {.epochs = 1, .checkpoint_folder = folder}).Run();
  const std::string text = ErrorOf<std::invalid_argument>(
      [&] { Trainer other(group, {.epochs = 1, .checkpoint_folder = folder, .resume = kNever}); });
  EXPECT_THAT(text, HasSubstr(folder + " holds checkpoints already: resume from them, or name "
                                       "another checkpoint folder"));
}

// The same command runs again under the same --rdzv-id: after a requeue, or a power cut.
RANK_TEST(TrainingTest, ANewJobOfTheSameRunIdContinues, {1, 2}) {
  const auto group = init_process_group();
  Training::Options options = {
      .epochs = 1, .checkpoint_folder = Folder(*group), .checkpoint_every = 3};
  ASSERT_EQ(setenv("TORCHELASTIC_RUN_ID", "digits", 1), 0);
  Trainer(group, options).Run(/*steps=*/4);
  ASSERT_EQ(setenv("DDP_GENERATION_NONCE", "later", 1), 0);
  EXPECT_EQ(Trainer(group, options).training.steps(), 3);
  options.resume = kNever;
  EXPECT_THAT(ErrorOf<std::invalid_argument>([&] { Trainer never(group, options); }),
              HasSubstr("holds checkpoints already"));
  options.resume = Training::Resume::kSameRunId;
  for (const char* other : {"letters", "none", ""}) {
    ASSERT_EQ(setenv("TORCHELASTIC_RUN_ID", other, 1), 0);
    EXPECT_THAT(ErrorOf<std::invalid_argument>([&] { Trainer foreign(group, options); }),
                HasSubstr("holds checkpoints already"));
  }
}

// No file fits, so every save fails.
RANK_TEST(TrainingTest, AJobWithoutAnyCheckpointSaysSoAtItsEnd, 1) {
  const auto group = init_process_group();
  Training::Options options = {
      .epochs = 1, .checkpoint_folder = Folder(*group), .checkpoint_every = 2};
  Trainer quiet(group, options);
  options.require_last_checkpoint = true;
  Trainer strict(group, options);
  ASSERT_NE(signal(SIGXFSZ, SIG_IGN), SIG_ERR);
  const rlimit small = {.rlim_cur = 3000, .rlim_max = RLIM_INFINITY};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  ::testing::internal::CaptureStderr();
  quiet.Run();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("no checkpoint was saved, and 2 saves were tried: the steps after 0 are "
                        "lost: rank 0: cannot write"));
  EXPECT_THAT(ErrorOf<CheckpointError>([&] { strict.Run(); }),
              HasSubstr("no checkpoint was saved"));
}

RANK_TEST(TrainingTest, MistakesAreNamed, 1) {
  const auto group = init_process_group();
  Trainer trainer(group, {.epochs = 1});
  Training& training = trainer.training;
  const torch::Tensor loss = torch::zeros({}, torch::kDouble);
  EXPECT_THAT(ErrorOf<std::logic_error>([&] { training.step(loss); }),
              HasSubstr("step() without a batch: call next_batch()"));
  EXPECT_THAT(ErrorOf<std::logic_error>([&] { training.commit(); }),
              HasSubstr("commit() without a batch"));
  EXPECT_THAT(ErrorOf<std::logic_error>([&] { training.next_batch(); }),
              HasSubstr("next_batch() without an epoch: call next_epoch()"));
  EXPECT_TRUE(training.next_epoch());
  EXPECT_TRUE(training.next_batch().has_value());
  EXPECT_THAT(ErrorOf<std::logic_error>([&] { training.next_batch(); }),
              HasSubstr("the batch before was not trained"));
  // After an epoch's loop ended early, next_epoch() goes to the next epoch. This job has none.
  EXPECT_FALSE(training.next_epoch());
  EXPECT_EQ(training.steps(), 0);

  EXPECT_THAT(ErrorOf<std::invalid_argument>([&] { Trainer none(group, {.epochs = 0}); }),
              HasSubstr("epochs is 0"));
  EXPECT_THAT(
      ErrorOf<std::invalid_argument>([&] { Trainer none(group, {.checkpoint_every = -1}); }),
      HasSubstr("checkpoint_every is -1"));
  EXPECT_THAT(ErrorOf<std::invalid_argument>([&] { Trainer none(group, {.resume = kAny}); }),
              HasSubstr("resume is kAny without a checkpoint_folder"));
}

// A failure of rank 1 aborts the reduction of the third step, when all ranks have gone on to save.
RANK_TEST(TrainingTest, AStepThatAFailureHasTornOnTheDeviceIsNotSaved, 2) {
  std::atomic<bool> fails = false;
  std::shared_ptr<ProcessGroup> group;
  ddp::testing::InstallAccelerator({.on_collective = [&](int64_t) {
    if (!fails.exchange(false)) return;
    std::promise<void> never;
    const std::future<void> end = never.get_future();
    (void)end.wait_for(std::chrono::milliseconds(200));
    group->report_failure_and_throw_later("a test");
    (void)end.wait_for(std::chrono::seconds(1));
  }});
  group = init_process_group({.make_backend = ddp::testing::ConnectSimulatedDevices});
  const std::string folder = Folder(*group);
  torch::nn::Linear net = Net();
  net->to(group->device());
  DistributedDataParallel<torch::nn::Linear> model(net, group);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Training training(model, optimizer,
                    Trainer::WithData({.checkpoint_folder = folder, .checkpoint_every = 1}));
  const auto train = [&] {
    while (training.next_epoch()) {
      while (const auto batch = training.next_batch()) {
        fails = group->rank() == 1 && training.steps() == 2;
        training.step(model.forward(Inputs(batch->indices).to(group->device())).mean());
      }
    }
  };
  EXPECT_THROW(train(), CommunicationError);
  for (const auto& checkpoint : fs::directory_iterator(folder)) {
    EXPECT_THAT(checkpoint.path().filename(), Not(HasSubstr("step-000000000003")));
  }
}

}  // namespace
}  // namespace ddp::elastic
