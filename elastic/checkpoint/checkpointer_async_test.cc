// Tests Checkpointer::save_async(): the moment of the copy, the order of saves, buffers, ends of
// the Checkpointer and of the process.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/unique_fd.h"
#include "elastic/checkpoint/checkpointer.h"
#include "elastic/checkpoint/checkpointer_fixture.h"
#include "elastic/checkpoint/group/faulty_store.h"
#include "elastic/checkpoint/group/in_process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"

extern "C" char** environ;

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

using State = SaveStatus::State;

class CheckpointerAsyncTest : public CheckpointerFixture {
 protected:
  // Options for one of two ranks. Rank 0's writer waits for rank 1, so that a test decides when a
  // save of rank 0 may end.
  Checkpointer::Options OfTwo(int rank) const {
    Checkpointer::Options options = Options();
    options.rank = rank;
    options.world_size = 2;
    options.generation_nonce = "two";
    options.store = store_;
    return options;
  }

  const c10::intrusive_ptr<c10d::HashStore> store_ = c10::make_intrusive<c10d::HashStore>();
};

// A model of tensors that share memory in every way: two views that overlap, a transposed view, a
// strided one, and a parameter of its own.
struct Views {
  explicit Views(float value) {
    whole = torch::full({16}, value);
    own = module->register_parameter("own", torch::full({5}, value), /*requires_grad=*/false);
    module->register_buffer("head", whole.narrow(0, 0, 10));
    module->register_buffer("tail", whole.narrow(0, 6, 10));
    module->register_buffer("turned", whole.narrow(0, 0, 12).view({3, 4}).t());
    module->register_buffer("strided", whole.slice(0, 0, 16, 3));
    state.model = module.get();
  }

  // Changes every tensor where it lies.
  void Fill(float value) {
    whole.fill_(value);
    own.fill_(value);
  }

  bool AllAre(float value) const {
    for (const auto& item : module->named_buffers()) {
      if (!item.value().eq(value).all().item<bool>()) return false;
    }
    return own.eq(value).all().item<bool>();
  }

  std::shared_ptr<torch::nn::Module> module = std::make_shared<torch::nn::Module>();
  torch::Tensor whole, own;
  TrainingState state;
};

TEST_F(CheckpointerAsyncTest, ChangesAfterStagedAreNotInTheCheckpoint) {
  std::promise<void> changed;
  testing::RunThreads(2, [&](int rank) {
    Checkpointer checkpointer(OfTwo(rank));
    Views views(1);
    if (rank == 1) changed.get_future().wait();
    const PendingSave save = checkpointer.save_async(views.state);
    save.staged();
    views.Fill(2);
    if (rank == 0) {
      EXPECT_EQ(save.status().state, State::kWriting) << "saved without rank 1";
      changed.set_value();
    }
    EXPECT_EQ(save.durable(), folder_ + "/step-000000000000.g0001");
    EXPECT_EQ(save.status().state, State::kSaved);
    EXPECT_EQ(save.status().folder, folder_ + "/step-000000000000.g0001");
    EXPECT_EQ(checkpointer.stats().saved, 1);
  });
  Views restored(3);
  ASSERT_TRUE(Checkpointer(Options(2)).restore(restored.state).has_value());
  EXPECT_TRUE(restored.AllAre(1));
}

TEST_F(CheckpointerAsyncTest, EqualStateGivesTheSameFilesAsASave) {
  Trainer trainer(AdamW());
  trainer.Train(3);
  Checkpointer blocking(Options(1));
  const std::string by_save = blocking.save(trainer.state);
  Checkpointer checkpointer(Options(2));
  const std::string by_async = checkpointer.save_async(trainer.state).durable();
  EXPECT_NE(by_save, by_async);
  const std::vector<std::string> names = NamesIn(by_save);
  EXPECT_EQ(names.size(), 4u);
  EXPECT_THAT(NamesIn(by_async), ::testing::UnorderedElementsAreArray(names));
  for (const std::string& name : names) {
    if (name == "MANIFEST.json") continue;
    EXPECT_EQ(Contents(absl::StrCat(by_save, "/", name)),
              Contents(absl::StrCat(by_async, "/", name)))
        << name;
  }
}

TEST_F(CheckpointerAsyncTest, TheDestructorWaitsAndAHandleOutlivesIt) {
  Views views(1);
  std::optional<PendingSave> save;
  {
    Checkpointer checkpointer(Options());
    save = checkpointer.save_async(views.state);
  }
  EXPECT_EQ(save->status().state, State::kSaved);
  EXPECT_EQ(save->durable(), save->status().folder);
  EXPECT_EQ(save->step(), 0);
}

TEST_F(CheckpointerAsyncTest, OtherCallsComeAfterTheSavesUnderWay) {
  Checkpointer checkpointer(Options());
  Views views(1);
  views.state.step = 1;
  const PendingSave first = checkpointer.save_async(views.state);
  views.Fill(2);
  views.state.step = 2;
  EXPECT_EQ(checkpointer.save(views.state), folder_ + "/step-000000000002.g0001");
  EXPECT_EQ(first.status().state, State::kSaved);
  views.Fill(3);
  views.state.step = 3;
  const PendingSave third = checkpointer.save_async(views.state);
  views.Fill(4);
  EXPECT_EQ(checkpointer.restore(views.state)->step, 3);
  EXPECT_EQ(third.status().state, State::kSaved);
  EXPECT_TRUE(views.AllAre(3));
}

// Rank 0 has one buffer, which its first save uses until rank 1 comes.
TEST_F(CheckpointerAsyncTest, WithoutAFreeBufferAllRanksSkipTheSave) {
  std::promise<void> skipped;
  testing::RunThreads(2, [&](int rank) {
    Checkpointer::Options options = OfTwo(rank);
    options.staging_buffers = rank == 0 ? 1 : 2;
    Checkpointer checkpointer(options);
    Views views(1);
    if (rank == 1) skipped.get_future().wait();
    std::vector<PendingSave> saves;
    for (views.state.step = 1; views.state.step <= 2; ++views.state.step) {
      saves.push_back(checkpointer.save_async(views.state));
    }
    if (rank == 0) skipped.set_value();
    EXPECT_THAT(saves[0].durable(), HasSubstr("step-000000000001"));
    EXPECT_EQ(saves[1].durable(), "");
    EXPECT_EQ(saves[1].status().state, State::kSkipped);
    EXPECT_THAT(saves[1].status().error, HasSubstr("rank 0: no staging buffer was free"));
    EXPECT_THAT(checkpointer.save_async(views.state).durable(), HasSubstr("step-000000000003"));
    EXPECT_EQ(checkpointer.stats().no_buffer, 1);
    EXPECT_EQ(checkpointer.stats().saved, 2);
    EXPECT_EQ(checkpointer.stats().failed, 0);
  });
  EXPECT_THAT(NamesIn(folder_),
              UnorderedElementsAre(".owner", "step-000000000001.g0001", "step-000000000003.g0001"));
}

// With Options::gather the ranks agree before the copy, and their writers need not.
TEST_F(CheckpointerAsyncTest, RanksThatGatherSkipTogetherAtOnce) {
  InProcessMeeting meeting(2);
  std::promise<void> skipped;
  std::shared_future<void> has_skipped = skipped.get_future().share();
  std::atomic<int> skips = 0;
  testing::RunThreads(2, [&](int rank) {
    Checkpointer::Options options = OfTwo(rank);
    options.staging_buffers = 1;
    // Rank 1's writer reaches the store only after the second save was skipped on both ranks.
    options.store = c10::make_intrusive<FaultyStore>(
        store_, [rank, has_skipped](const std::string& call, const std::string& key) {
          if (rank == 1 && call == "set" && key.ends_with("/value/1")) has_skipped.wait();
          return false;
        });
    options.gather = [&meeting, rank](const std::string& mine) {
      const auto join = [](const std::vector<std::string>& all) {
        return absl::StrJoin(all, "\x1e");
      };
      return std::vector<std::string>(absl::StrSplit(*meeting.Decide(rank, mine, join), '\x1e'));
    };
    Checkpointer checkpointer(options);
    Views views(1);
    views.state.step = 1;
    const PendingSave first = checkpointer.save_async(views.state);
    views.state.step = 2;
    const PendingSave second = checkpointer.save_async(views.state);
    EXPECT_EQ(second.status().state, State::kSkipped);
    EXPECT_THAT(second.status().error, HasSubstr("no staging buffer was free"));
    if (++skips == 2) skipped.set_value();
    EXPECT_THAT(first.durable(), HasSubstr("step-000000000001"));
    EXPECT_EQ(checkpointer.stats().no_buffer, 1);
    views.state.step = 3;
    EXPECT_THAT(checkpointer.save_async(views.state).durable(), HasSubstr("step-000000000003"));
  });
}

TEST_F(CheckpointerAsyncTest, WithoutAFreeBufferASaveMayWait) {
  testing::RunThreads(2, [&](int rank) {
    Checkpointer::Options options = OfTwo(rank);
    options.staging_buffers = 1;
    options.when_busy = Checkpointer::WhenBusy::kWait;
    options.retention.keep_last = RetentionPolicy::kAll;
    Checkpointer checkpointer(options);
    Views views(0);
    std::vector<PendingSave> saves;
    for (views.state.step = 1; views.state.step <= 5; ++views.state.step) {
      views.Fill(static_cast<float>(views.state.step));
      saves.push_back(checkpointer.save_async(views.state));
    }
    for (const PendingSave& save : saves) EXPECT_NE(save.durable(), "") << save.status().error;
  });
  Views restored(0);
  EXPECT_EQ(Checkpointer(Options(2)).restore(restored.state)->step, 5);
  EXPECT_TRUE(restored.AllAre(5));
}

TEST_F(CheckpointerAsyncTest, AFaultIsTheResultOfItsSaveAndNotAnException) {
  Checkpointer checkpointer(Options());
  auto module = std::make_shared<torch::nn::Module>();
  module->register_buffer("sparse", torch::eye(3).to_sparse());
  TrainingState state{.model = module.get()};
  const PendingSave save = checkpointer.save_async(state);
  EXPECT_THROW(save.durable(), CheckpointError);
  EXPECT_EQ(save.status().state, State::kFailed);
  EXPECT_THAT(save.status().error, HasSubstr("tensor sparse is sparse"));
  Views views(1);
  EXPECT_EQ(checkpointer.stats().failed, 1);
}

// ---- A process that is killed ----

constexpr char kChildFolder[] = "DDP_TEST_CHILD_FOLDER";
constexpr int64_t kValues = 400'000;

// Two tensors in one file and their copy in another: 4.8 MB in all.
struct Large {
  Large() {
    a = module->register_parameter("a", torch::zeros({kValues}), /*requires_grad=*/false);
    b = module->register_parameter("b", torch::zeros({kValues}), /*requires_grad=*/false);
    c = module->register_buffer("c", torch::zeros({kValues}));
    state.model = module.get();
  }
  void Step() {
    for (torch::Tensor* tensor : {&a, &b, &c}) tensor->add_(1);
    ++state.step;
  }
  std::shared_ptr<torch::nn::Module> module = std::make_shared<torch::nn::Module>();
  torch::Tensor a, b, c;
  TrainingState state;
};

// The process that the next test starts. Writes a byte after each save that it has begun.
TEST_F(CheckpointerAsyncTest, DISABLED_ChildThatSavesUntilItIsKilled) {
  Checkpointer::Options options = Options();
  options.folder = std::getenv(kChildFolder);
  Checkpointer checkpointer(options);
  Large large;
  checkpointer.restore(large.state);
  while (true) {
    large.Step();
    (void)checkpointer.save_async(large.state);
    if (write(STDOUT_FILENO, "s", 1) != 1) return;
  }
}

TEST_F(CheckpointerAsyncTest, AKilledProcessLeavesTheOldOrTheNewCheckpoint) {
  std::mt19937 random(1);
  ASSERT_EQ(setenv(kChildFolder, folder_.c_str(), 1), 0);
  int64_t step = 0;
  for (int round = 0; round < 8; ++round) {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const UniqueFd output(ends[0]);
    UniqueFd input(ends[1]);
    posix_spawn_file_actions_t actions;
    ASSERT_EQ(posix_spawn_file_actions_init(&actions), 0);
    ASSERT_EQ(posix_spawn_file_actions_adddup2(&actions, input.get(), STDOUT_FILENO), 0);
    std::string program = "/proc/self/exe";
    std::string filter = "--gtest_filter=*DISABLED_ChildThatSavesUntilItIsKilled";
    std::string also = "--gtest_also_run_disabled_tests";
    std::string brief = "--gtest_brief=1";
    char* const arguments[] = {program.data(), filter.data(), also.data(), brief.data(), nullptr};
    pid_t child = -1;
    ASSERT_EQ(posix_spawn(&child, program.c_str(), &actions, nullptr, arguments, environ), 0);
    (void)posix_spawn_file_actions_destroy(&actions);
    input = UniqueFd();
    // The child writes other text too. Each byte is another moment.
    char byte = 0;
    for (uint32_t bytes = 300 + random() % 200; bytes > 0; --bytes) {
      if (read(output.get(), &byte, 1) != 1) break;
    }
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child has ended by itself";

    Large large;
    Checkpointer checkpointer(Options());
    const std::optional<RestoredCheckpoint> restored = checkpointer.restore(large.state);
    if (!restored.has_value()) continue;
    EXPECT_THAT(restored->passed_over, ElementsAre());
    EXPECT_GE(restored->step, step) << "an older checkpoint than before";
    step = restored->step;
    for (const torch::Tensor* tensor : {&large.a, &large.b, &large.c}) {
      EXPECT_TRUE(tensor->eq(static_cast<float>(step)).all().item<bool>())
          << "a mix of steps at " << step;
    }
  }
  EXPECT_GT(step, 0) << "no round saved anything";
}

}  // namespace
}  // namespace ddp::elastic
