// Tests Checkpointer on several ranks, over a c10d::Store.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/types.h>
#include <torch/utils.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "ddp/optim/zero_trainer.h"
#include "ddp/process_group.h"
#include "elastic/checkpoint/checkpointer.h"
#include "elastic/checkpoint/checkpointer_fixture.h"
#include "elastic/checkpoint/group/faulty_store.h"
#include "elastic/checkpoint/group/in_process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"
#include "testing/backend/thread_ranks.h"
#include "testing/fake_clock.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using CheckpointerRanksTest = CheckpointerFixture;

// Runs `body` on one thread per rank. (All ranks share the CPU's generator.)
void RunRanks(int world_size, Checkpointer::Options options,
              const std::function<void(Checkpointer&, int)>& body) {
  options.world_size = world_size;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    options.rank = rank;
    threads.emplace_back([options, rank, &body] {
      Checkpointer checkpointer(options);
      body(checkpointer, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CheckpointerRanksTest, RanksSaveAndRestoreTogetherThroughAStore) {
  Checkpointer::Options options = Options();
  options.store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (int rank = 0; rank < 3; ++rank) {
    trainers.push_back(std::make_unique<Trainer>(AdamW()));
    trainers.back()->Train(2);
  }
  const std::vector<torch::Tensor> saved = trainers[0]->Values();
  // A group, then a second group on the same store, then a generation of another size.
  for (const int world_size : {3, 3, 2}) {
    options.generation = world_size == 3 ? 1 : 2;
    RunRanks(world_size, options, [&](Checkpointer& checkpointer, int rank) {
      Trainer& trainer = *trainers[static_cast<size_t>(rank)];
      EXPECT_EQ(checkpointer.restore(trainer.state).has_value(),
                world_size == 2 || trainer.state.step > 2);
      const std::string folder = checkpointer.save(trainer.state);
      EXPECT_EQ(folder, absl::StrCat(folder_, "/step-00000000000", trainer.state.step, ".g000",
                                     options.generation));
      ++trainer.state.step;
      checkpointer.save(trainer.state);
    });
    options.store->getNumKeys();
    options.generation_nonce = absl::StrCat("world-", world_size);
  }
  ExpectEqual(trainers[1]->Values(), saved);
}

// Gives the parameters values that are the same in every network, and returns them.
std::vector<torch::Tensor> FillAndList(Net& net) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> parameters = net->parameters();
  for (torch::Tensor& parameter : parameters) {
    parameter.copy_(torch::arange(parameter.numel()).sin().view(parameter.sizes()));
  }
  return parameters;
}

void StepOnce(const std::vector<torch::Tensor>& parameters, torch::optim::Optimizer& optimizer) {
  for (const torch::Tensor& parameter : parameters) {
    parameter.mutable_grad() = (parameter.detach() * 3).cos();
  }
  optimizer.step();
}

// Returns the bytes of a checkpoint's tensors, by file.
std::map<std::string, std::string> TensorFiles(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("model-") && !name.starts_with("optimizer-")) continue;
    std::ifstream stream(entry.path(), std::ios::binary);
    files[name] = std::string(std::istreambuf_iterator<char>(stream), {});
  }
  return files;
}

// A plain optimizer, and a sharded one in each mode, on `group`'s ranks.
std::vector<MakeOptimizer> ShardedOnes(const MakeOptimizer& plain,
                                       const std::shared_ptr<ProcessGroup>& group) {
  std::vector<MakeOptimizer> all = {plain};
  for (const auto shard :
       {ZeroRedundancyOptions::Shard::kEven, ZeroRedundancyOptions::Shard::kWhole}) {
    all.push_back([=](Net& net) -> std::unique_ptr<torch::optim::Optimizer> {
      const auto model = plain(net);
      const auto copy = [plain](std::vector<torch::optim::OptimizerParamGroup> groups) {
        Net other;
        auto made = plain(other);
        made->param_groups().clear();
        for (const auto& added : groups) made->add_param_group(added);
        return made;
      };
      return std::make_unique<ZeroRedundancyOptimizerBase>(copy, model->param_groups(), group,
                                                           ZeroRedundancyOptions{.shard = shard});
    });
  }
  return all;
}

// The files of a sharded optimizer are those of the plain one. They are restored into either, on
// three ranks and on two.
TEST_F(CheckpointerRanksTest, AShardedOptimizerIsSavedAsThePlainOne) {
  int kind = 0;
  for (const MakeOptimizer& plain : {Sgd(), Adam(), AdamW()}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const std::string root = absl::StrCat(folder_, ".", kind++);
    ddp::testing::RunThreadRanks({.world_size = 3}, [&](std::shared_ptr<ProcessGroup> group) {
      const auto pair = group->new_group({0, 1});
      const auto checkpointer = [&](const std::shared_ptr<ProcessGroup>& of, int number) {
        Checkpointer::Options options;
        options.folder = absl::StrCat(root, ".", number);
        options.rank = of->rank();
        options.world_size = of->size();
        options.generation = of == pair ? 2 : 1;
        options.store = c10::make_intrusive<c10d::PrefixStore>(absl::StrCat(of->size()), store);
        return std::make_unique<Checkpointer>(options);
      };
      std::vector<std::map<std::string, std::string>> files;
      const std::vector<MakeOptimizer> saving = ShardedOnes(plain, group);
      for (size_t i = 0; i < saving.size(); ++i) {
        Net net;
        const auto parameters = FillAndList(net);
        const auto optimizer = saving[i](net);
        for (int step = 0; step < 3; ++step) StepOnce(parameters, *optimizer);
        const auto saver = checkpointer(group, static_cast<int>(i));
        TrainingState state{.model = net.get(), .optimizer = optimizer.get(), .step = 3};
        files.push_back(TensorFiles(saver->save(state)));
      }
      EXPECT_FALSE(files[0].empty());
      EXPECT_EQ(files[1], files[0]);
      EXPECT_EQ(files[2], files[0]);
      if (!pair) return;
      std::vector<std::vector<torch::Tensor>> results;
      const std::vector<MakeOptimizer> restoring = ShardedOnes(plain, pair);
      for (size_t i = 0; i < restoring.size(); ++i) {
        Net net;
        const auto optimizer = restoring[i](net);
        TrainingState state{.model = net.get(), .optimizer = optimizer.get()};
        const auto restored = checkpointer(pair, (static_cast<int>(i) + 1) % 3)->restore(state);
        EXPECT_EQ(restored->step, 3);
        StepOnce(net->parameters(), *optimizer);
        if (auto* zero = dynamic_cast<ZeroRedundancyOptimizerBase*>(optimizer.get())) zero->wait();
        results.push_back(net->parameters());
      }
      for (size_t i = 1; i < results.size(); ++i) {
        for (size_t p = 0; p < results[0].size(); ++p) {
          EXPECT_TRUE(torch::equal(results[i][p], results[0][p])) << i << " " << p;
        }
      }
    });
  }
}

// Counts the ranks that collect the state of each parameter.
class CountingZero : public ZeroRedundancyOptimizerBase {
 public:
  using Counts = std::vector<std::atomic<int>>;
  CountingZero(const Factory& make, const Groups& groups, std::shared_ptr<ProcessGroup> group,
               Counts* counts)
      : ZeroRedundancyOptimizerBase(make, groups, std::move(group)), counts_(counts) {}
  void FillState(torch::optim::Optimizer& whole, const std::vector<bool>& needed) override {
    ASSERT_EQ(needed.size(), counts_->size());
    for (size_t i = 0; i < needed.size(); ++i) (*counts_)[i] += needed[i] ? 1 : 0;
    ZeroRedundancyOptimizerBase::FillState(whole, needed);
  }

 private:
  Counts* const counts_;
};

TEST_F(CheckpointerRanksTest, ARankCollectsTheStateThatItWrites) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  CountingZero::Counts counts(ddp::testing::Net().parameters().size());
  ddp::testing::RunThreadRanks({.world_size = 3}, [&](std::shared_ptr<ProcessGroup> group) {
    ddp::testing::Net net;
    CountingZero zero(ddp::testing::AdamW(), ddp::testing::GroupsOf(net, ddp::testing::AdamW()),
                      group, &counts);
    for (const torch::Tensor& parameter : net.parameters()) {
      parameter.mutable_grad() = torch::ones_like(parameter);
    }
    zero.step();
    Checkpointer::Options options = Options();
    options.rank = group->rank();
    options.world_size = 3;
    options.store = store;
    EXPECT_NE(Checkpointer(options).save({.model = &net, .optimizer = &zero, .step = 1}), "");
  });
  for (const std::atomic<int>& count : counts) EXPECT_EQ(count, 1);
}

// Trains on three ranks, continues on two from a checkpoint, and ends as the plain optimizer that
// has moved likewise. The checkpoint is saved while values of the last step are on their way.
TEST_F(CheckpointerRanksTest, AScatteredAndOverlappedOptimizerMovesAsThePlainOne) {
  using Trained = ddp::testing::Trainer;
  for (const auto& [name, make] : ddp::testing::Optimizers()) {
    if (name != "SGD" && name != "Adam" && name != "AdamW") continue;
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const std::string root = absl::StrCat(folder_, ".", name);
    ddp::testing::RunThreadRanks({.world_size = 3}, [&](std::shared_ptr<ProcessGroup> group) {
      const auto pair = group->new_group({0, 1});
      const auto trainer = [&](const std::shared_ptr<ProcessGroup>& of, bool sharded) {
        return sharded ? Trained::Zero(of, make,
                                       {.scatter_gradients = true,
                                        .overlap_with_forward = true,
                                        .bucket_cap_mb = 0.001})
                       : Trained::Plain(of, make);
      };
      const auto checkpointer = [&](const std::shared_ptr<ProcessGroup>& of, bool sharded) {
        Checkpointer::Options options;
        options.folder = absl::StrCat(root, sharded ? ".sharded" : ".plain");
        options.rank = of->rank();
        options.world_size = of->size();
        options.generation = of == pair ? 2 : 1;
        options.store = c10::make_intrusive<c10d::PrefixStore>(absl::StrCat(of->size()), store);
        return std::make_unique<Checkpointer>(options);
      };
      std::vector<std::map<std::string, std::string>> files;
      for (const bool sharded : {false, true}) {
        Trained three = trainer(group, sharded);
        for (int step = 0; step < 4; ++step) three.Step(step);
        TrainingState state{
            .model = three.net.get(), .optimizer = three.optimizer.get(), .step = 4};
        files.push_back(TensorFiles(checkpointer(group, sharded)->save(state)));
      }
      EXPECT_EQ(files[1], files[0]) << name;
      if (!pair) return;
      std::vector<Trained> moved;
      for (const bool sharded : {false, true}) {
        moved.push_back(trainer(pair, sharded));
        Trained& two = moved.back();
        EXPECT_EQ(two.zero != nullptr && two.zero->scatters_gradients(), sharded);
        TrainingState state{.model = two.net.get(), .optimizer = two.optimizer.get()};
        EXPECT_EQ(checkpointer(pair, sharded)->restore(state)->step, 4);
        two.Steps(4, 8);
      }
      ExpectEqual(moved[0], moved[1], name);
    });
  }
}

TEST_F(CheckpointerRanksTest, RankThatDoesNotComeIsNamed) {
  Checkpointer::Options options = Options();
  options.store = c10::make_intrusive<c10d::HashStore>();
  options.timeout = std::chrono::milliseconds(300);
  Trainer trainer(Sgd());
  RunRanks(3, options, [&](Checkpointer& checkpointer, int rank) {
    if (rank == 1) return;
    try {
      checkpointer.save(trainer.state);
      ADD_FAILURE() << "saved without rank 1";
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), HasSubstr(rank == 0 ? "for rank 1" : "for rank 0"));
    }
  });
  EXPECT_FALSE(Checkpointer(Options()).has_checkpoint());
}

// The store fails once, in one call of one rank in the first save. No rank waits for that rank, and
// no rank throws. The ranks may disagree on whether the first save has succeeded. The second save,
// of the same state, succeeds on every rank.
TEST_F(CheckpointerRanksTest, OneFaultOfTheStoreFailsOneSaveAtMost) {
  struct Fault {
    int rank;
    std::string call;
    std::string key;  // the end of it: attempt, round, name
  };
  int number = 0;
  for (const Fault& fault : {Fault{1, "set", "/1/0/value/1"}, Fault{1, "multiGet", "/1/0/answer"},
                             Fault{1, "set", "/1/1/value/1"}, Fault{1, "deleteKey", "/value/1"},
                             Fault{1, "multiGet", "/1/1/answer"}, Fault{0, "set", "/1/0/answer"},
                             Fault{0, "deleteKey", "/answer"}, Fault{0, "set", "/1/1/answer"}}) {
    const auto shared = c10::make_intrusive<c10d::HashStore>();
    const std::string folder = absl::StrCat(folder_, ".", number++);
    const Trainer trainer(Sgd());
    std::atomic<int> faults = 0;
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([&, rank] {
        Checkpointer::Options options = Options();
        options.folder = folder;
        options.rank = rank;
        options.world_size = 3;
        options.store = c10::make_intrusive<FaultyStore>(
            shared, [&, rank](const std::string& call, const std::string& key) {
              return rank == fault.rank && call == fault.call && absl::EndsWith(key, fault.key) &&
                     ++faults == 1;
            });
        Checkpointer checkpointer(options);
        const std::string saved = absl::StrCat(folder, "/step-000000000000.g0001");
        try {
          EXPECT_THAT(checkpointer.save(trainer.state), ::testing::AnyOf("", saved));
          EXPECT_EQ(checkpointer.save(trainer.state, Checkpointer::Urgency::kLast), saved);
        } catch (const CheckpointError& error) {
          ADD_FAILURE() << error.what();
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
    EXPECT_GE(faults, 1) << fault.call << " of " << fault.key;
    EXPECT_THAT(NamesIn(folder),
                ::testing::UnorderedElementsAre(".owner", "step-000000000000.g0001"));
  }
}

// Two ranks whose store is away for 15 minutes of their clocks. A call to the store then takes 5 s
// and throws. The ranks gather texts without the store.
class OutageTest : public CheckpointerRanksTest {
 protected:
  struct Rank {
    testing::FakeClock clock;
    std::vector<std::string> results;  // of its saves
    absl::Duration longest_save;
    SaveStats stats;
  };
  static constexpr absl::Duration kOutage = absl::Minutes(15);

  // Trains `steps` steps of 1 s on each rank and saves every 25th. The last save is urgent. The
  // store goes away after the 30th.
  void Run(int steps) {
    const auto shared = c10::make_intrusive<c10d::HashStore>();
    InProcessMeeting meeting(2);
    testing::RunThreads(2, [&](int rank) {
      Rank& self = ranks_[rank];
      const absl::Time gone = self.clock.Now() + absl::Seconds(30);
      Checkpointer::Options options = Options();
      options.rank = rank;
      options.world_size = 2;
      options.clock = &self.clock;
      options.store = c10::make_intrusive<FaultyStore>(
          shared, [&self, gone](const std::string&, const std::string&) {
            const bool away = self.clock.Now() >= gone && self.clock.Now() < gone + kOutage;
            if (away) self.clock.Advance(absl::Seconds(5));
            return away;
          });
      options.gather = [&meeting, rank](const std::string& mine) {
        const auto join = [](const std::vector<std::string>& all) {
          return absl::StrJoin(all, "\x1e");
        };
        return std::vector<std::string>(absl::StrSplit(*meeting.Decide(rank, mine, join), '\x1e'));
      };
      Trainer trainer(Sgd());
      Checkpointer checkpointer(options);
      for (trainer.state.step = 1; trainer.state.step <= steps; ++trainer.state.step) {
        self.clock.Advance(absl::Seconds(1));
        if (trainer.state.step % 25 != 0) continue;
        const bool last = trainer.state.step == steps;
        const absl::Time start = self.clock.Now();
        self.results.push_back(checkpointer.save(
            trainer.state, last ? Checkpointer::Urgency::kLast : Checkpointer::Urgency::kRoutine));
        self.longest_save = std::max(self.longest_save, self.clock.Now() - start);
      }
      self.stats = checkpointer.stats();
    });
  }

  std::array<Rank, 2> ranks_;
};

TEST_F(OutageTest, SkipsSavesOnAllRanksTogetherAndSavesAfterwards) {
  Run(/*steps=*/1500);
  for (const Rank& rank : ranks_) {
    EXPECT_EQ(rank.results, ranks_[0].results);
    EXPECT_LE(rank.longest_save, absl::Seconds(10));
    EXPECT_THAT(rank.results.front(), HasSubstr("step-000000000025"));
    EXPECT_THAT(rank.results[1], "");
    EXPECT_THAT(rank.results.back(), HasSubstr("step-000000001500"));
    EXPECT_GE(rank.stats.failed, 3);
    EXPECT_GE(rank.stats.held_back, 10);
    EXPECT_EQ(rank.stats.failed_in_a_row, 0);
    EXPECT_EQ(rank.stats.saved + rank.stats.failed + rank.stats.held_back, 60);
    EXPECT_THAT(rank.stats.last_error, HasSubstr("cannot reach the others through the store"));
  }
}

TEST_F(OutageTest, TheLastSaveNeedsNoStore) {
  Run(/*steps=*/100);
  for (const Rank& rank : ranks_) {
    EXPECT_THAT(rank.results, ElementsAre(HasSubstr("step-000000000025"), "", "",
                                          HasSubstr("step-000000000100")));
  }
  Trainer trainer(Sgd());
  EXPECT_EQ(Checkpointer(Options(2)).restore(trainer.state)->step, 100);
}

}  // namespace
}  // namespace ddp::elastic
