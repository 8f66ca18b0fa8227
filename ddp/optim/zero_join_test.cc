// A ZeroRedundancyOptimizer under a Join, compared with LibTorch's plain optimizers. The ranks are
// threads on a fake backend, and processes.
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>

#include <sstream>
#include <string>

#include "ddp/common/error.h"
#include "ddp/join.h"
#include "ddp/optim/zero_trainer.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/thread_ranks.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::AdamW;
using ::ddp::testing::ExpectEqual;
using ::ddp::testing::Modes;
using ::ddp::testing::Trainer;
using ::testing::HasSubstr;

// Trains with inputs of different lengths; `longest` has most. Then one step with all ranks.
void TrainUnevenly(Trainer& trainer, int longest, bool even_weights) {
  const int rank = trainer.group->rank();
  torch::optim::StepLR scheduler(*trainer.optimizer, 2, 0.5);
  join({&trainer.model, trainer.optimizer.get()}, {.divide_by_initial_world_size = even_weights},
       [&] {
         const int steps = rank == longest ? 5 : 1 + rank;
         for (int step = 0; step < steps; ++step) {
           trainer.Step(step);
           scheduler.step();
         }
       });
  trainer.Steps(7, 9);
}

THREAD_RANK_TEST(ZeroJoinTest, RanksWithoutInputsUpdateTheirPart, 2, 3) {
  for (const bool even_weights : {true, false}) {
    for (int longest = 0; longest < group->size(); ++longest) {
      for (const auto& [mode, options] : Modes(true)) {
        Trainer plain = Trainer::Plain(group, AdamW());
        Trainer zero = Trainer::Zero(group, AdamW(), options);
        TrainUnevenly(plain, longest, even_weights);
        TrainUnevenly(zero, longest, even_weights);
        ExpectEqual(plain, zero, mode);
        for (int g = 0; g < 2; ++g) {
          EXPECT_EQ(plain.optimizer->param_groups()[g].options().get_lr(),
                    zero.optimizer->param_groups()[g].options().get_lr())
              << mode;
        }
      }
    }
  }
}

// Rank 0 takes part in the steps of rank 1 only.
THREAD_RANK_TEST(ZeroJoinTest, AStateOfBeforeAJoinIsNotSaved, 2) {
  Trainer zero = Trainer::Zero(group, AdamW(), {});
  zero.Steps(0, 1);
  zero.zero->consolidate_state_dict(0);
  join({&zero.model, zero.zero}, {}, [&] {
    if (group->rank() == 1) zero.Step(1);
  });
  std::stringstream archive;
  EXPECT_THAT(testing::ErrorOf<ConfigurationError>([&] { torch::save(*zero.zero, archive); }),
              HasSubstr("call consolidate_state_dict(to)"));
}

RANK_TEST(ZeroJoinTest, JoinsInSharedMemory, 3) {
  const auto group = init_process_group({.backend = "shm"});
  Trainer plain = Trainer::Plain(group, AdamW());
  Trainer zero = Trainer::Zero(group, AdamW(), {});
  for (Trainer* const trainer : {&plain, &zero}) TrainUnevenly(*trainer, 1, true);
  ExpectEqual(plain, zero, "default options");
}

RANK_TEST(ZeroJoinTest, JoinsOnGloo, .world_size = 3,
          .not_on_device = "only the backend differs from another case's") {
  const auto group = init_process_group({.backend = "gloo"});
  Trainer plain = Trainer::Plain(group, AdamW());
  Trainer zero = Trainer::Zero(group, AdamW(), {});
  Trainer scattering = Trainer::Zero(group, AdamW(), {.scatter_gradients = true});
  EXPECT_FALSE(zero.zero->scatters_gradients());  // the default on Gloo
  EXPECT_TRUE(scattering.zero->scatters_gradients());
  for (Trainer* const trainer : {&plain, &zero, &scattering}) TrainUnevenly(*trainer, 1, true);
  ExpectEqual(plain, zero, "default options");
  EXPECT_TRUE(at::allclose(plain.net->first, scattering.net->first, 1e-4, 1e-6));
  EXPECT_TRUE(testing::SameOnAllRanks(*group, testing::Flatten(scattering.net->parameters())));
}

}  // namespace
}  // namespace ddp
