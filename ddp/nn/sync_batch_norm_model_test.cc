// Tests models with SyncBatchNorm under DistributedDataParallel: every rank's parameters after some
// steps are those of one process that trains on the joint batch. The ranks are threads on a fake
// backend; in two cases they are processes, on Gloo.
//
// Length: each mode of a model with converted layers stands beside its failures.
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <torch/torch.h>

#include "ddp/common/error.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/join.h"
#include "ddp/mixed_precision.h"
#include "ddp/nn/convert_sync_batchnorm.h"
#include "ddp/nn/test_models.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/random_numbers.h"
#include "testing/backend/thread_ranks.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::AllRanks;
using ::ddp::testing::ErrorOf;
using ::ddp::testing::ExpectSame;
using ::ddp::testing::FailAt;
using ::ddp::testing::Flatten;
using ::ddp::testing::Gradients;
using ::ddp::testing::Input;
using ::ddp::testing::LossOf;
using ::ddp::testing::MakeConverted;
using ::ddp::testing::MakeNet;
using ::ddp::testing::Net;
using ::ddp::testing::Place;
using ::ddp::testing::ReferenceStep;
using ::ddp::testing::SameOnAllRanks;
using ::ddp::testing::Step;
using ::ddp::testing::Throws;
using ::ddp::testing::Way;
using ::testing::HasSubstr;

// Trains three steps as `options` say, and compares.
void Train(const std::shared_ptr<ProcessGroup>& group,
           const DistributedDataParallelOptions& options, const Way& way = {}) {
  Net net = MakeConverted();
  Net reference = MakeNet();
  net->way = way;
  DistributedDataParallel<Net> model(net, group, options);
  EXPECT_TRUE(model.logging_data().has_sync_bn);
  for (int step = 0; step < 3; ++step) {
    LossOf(model(Input(group->rank(), step).requires_grad_())).backward();
    Step(*net);
    ReferenceStep(reference, AllRanks(*group), step, group->size());
  }
  ExpectSame(*group, net, reference);
}

THREAD_RANK_TEST(SyncBatchNormModelTest, TrainsAsOneProcess, 2, 3) {
  Train(group, {});
  Train(group, {.broadcast_buffers = false});
  Train(group, {.bucket_cap_mb = 0.00001});
  Train(group, {.static_graph = true});
  Train(group, {.find_unused_parameters = true});
  Train(group, {.broadcast_buffers = false, .gradient_as_bucket_view = true});
}

THREAD_RANK_TEST(SyncBatchNormModelTest, ARankMayHaveNoSample, 3) {
  const std::vector<int64_t> batches = {2, 0, 3};
  const auto input = [&](int rank, int step) {
    return testing::RandomNumbers(100 * step + rank, {batches[rank], 3});
  };
  Net net = MakeConverted();
  Net reference = MakeNet();
  DistributedDataParallel<Net> model(net, group);
  for (int step = 0; step < 3; ++step) {
    LossOf(model(input(group->rank(), step))).backward();
    Step(*net);
    const torch::Tensor all = torch::cat({input(0, step), input(1, step), input(2, step)});
    (LossOf(reference->forward(all)) / 3).backward();
    Step(*reference);
  }
  ExpectSame(*group, net, reference);
}

THREAD_RANK_TEST(SyncBatchNormModelTest, TheRecomputationOfACheckpointKeepsTheStatistics, 2) {
  Train(group, {}, {.checkpoint = true});
  Train(group, {.find_unused_parameters = true}, {.checkpoint = true});
  Train(group, {.static_graph = true}, {.reentrant = true, .checkpoint = true});
}

THREAD_RANK_TEST(SyncBatchNormModelTest, ALayerCountsACheckpointedBatchOnce, 2) {
  for (const auto& own : {std::shared_ptr<ProcessGroup>(), group}) {
    testing::SyncNet net(own);
    DistributedDataParallel<testing::SyncNet> model(net, group);
    EXPECT_TRUE(has_sync_batch_norm(*net));
    LossOf(model(Input(group->rank(), 0))).backward();
    EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 1);
    EXPECT_TRUE(SameOnAllRanks(*group, Flatten(net->buffers())));
  }
}

THREAD_RANK_TEST(SyncBatchNormModelTest, AccumulatesUnderNoSync, 2) {
  for (const bool buffers : {true, false}) {
    Net net = MakeConverted();
    Net reference = MakeNet();
    DistributedDataParallel<Net> model(net, group, {.broadcast_buffers = buffers});
    for (int step = 0; step < 4; ++step) {
      auto guard = model.no_sync(step % 2 == 0);
      LossOf(model(Input(group->rank(), step))).backward();
      const torch::Tensor all = torch::cat({Input(0, step), Input(1, step)});
      (LossOf(reference->forward(all)) / 2).backward();
      if (step % 2 == 0) continue;
      Step(*net);
      Step(*reference);
    }
    ExpectSame(*group, net, reference);
  }
}

THREAD_RANK_TEST(SyncBatchNormModelTest, TakesItsStatisticsWithoutGradients, 2) {
  Net net = MakeConverted();
  Net reference = MakeNet();
  DistributedDataParallel<Net> model(net, group);
  const torch::NoGradGuard no_grad;
  const torch::Tensor y = model(Input(group->rank(), 0));
  const torch::Tensor all = reference->forward(torch::cat({Input(0, 0), Input(1, 0)}));
  EXPECT_TRUE(y.allclose(group->rank() == 0 ? all.narrow(0, 0, 2) : all.narrow(0, 2, 3), 1e-5));
  ExpectSame(*group, net, reference);
  model.eval();
  reference->eval();
  // In eval() a rank may run alone.
  if (group->rank() == 0) {
    EXPECT_TRUE(model(Input(0, 1)).allclose(reference->forward(Input(0, 1)), 1e-5));
  }
}

THREAD_RANK_TEST(SyncBatchNormModelTest, RanksMayUseDifferentParameters, 2, 3) {
  Net net = MakeConverted();
  Net reference = MakeNet();
  DistributedDataParallel<Net> model(net, group,
                                     {.bucket_cap_mb = 0.00001, .find_unused_parameters = true});
  for (int step = 0; step < 4; ++step) {
    net->way.branch = (group->rank() + step) % 2;
    LossOf(model(Input(group->rank(), step))).backward();
    std::vector<torch::Tensor> inputs;
    for (const int rank : AllRanks(*group)) inputs.push_back(Input(rank, step));
    const torch::Tensor body = reference->Body(torch::cat(inputs));
    torch::Tensor loss = torch::zeros({});
    int64_t row = 0;
    for (const int rank : AllRanks(*group)) {
      const torch::Tensor part = body.narrow(0, row, inputs[rank].size(0));
      row += inputs[rank].size(0);
      auto& head = (rank + step) % 2 == 0 ? reference->head : reference->other;
      loss = loss + LossOf(head->forward(part));
    }
    (loss / group->size()).backward();
    Step(*net);
    Step(*reference);
  }
  ExpectSame(*group, net, reference);
}

// ---- Join.

// Several Joins in turn; in each, `lengths` are the ranks' numbers of inputs.
void TrainUnderJoins(const std::shared_ptr<ProcessGroup>& group,
                     const std::vector<std::vector<int>>& joins,
                     const DistributedDataParallelOptions& options, const Way& way = {}) {
  Net net = MakeConverted();
  Net reference = MakeNet();
  net->way = way;
  DistributedDataParallel<Net> model(net, group, options);
  int step = 0;
  for (const std::vector<int>& lengths : joins) {
    const int longest = *std::max_element(lengths.begin(), lengths.end());
    Join join({&model});
    for (int i = 0; i < lengths[group->rank()]; ++i) {
      auto guard = model.no_sync(i == 0 && longest > 2);
      LossOf(model(Input(group->rank(), step + i).requires_grad_())).backward();
      if (i > 0 || longest <= 2) Step(*net);
    }
    join.finish();
    net->zero_grad();
    for (int i = 0; i < longest; ++i) {
      std::vector<torch::Tensor> inputs;
      for (const int rank : AllRanks(*group)) {
        if (i < lengths[rank]) inputs.push_back(Input(rank, step + i));
      }
      (LossOf(reference->forward(torch::cat(inputs))) / group->size()).backward();
      if (i > 0 || longest <= 2) Step(*reference);
    }
    step += longest;
    ExpectSame(*group, net, reference);
  }
}

// Every rank that has had the first inputs is still there for the second ones: what a rank
// accumulates under no_sync() is lost when it joins.
const std::vector<std::vector<int>>& ThreeJoins() {
  static const auto& joins =
      *new std::vector<std::vector<int>>{{2, 2, 2}, {4, 2, 3}, {2, 2, 2}, {0, 2, 1}, {2, 4, 2}};
  return joins;
}

THREAD_RANK_TEST(SyncBatchNormModelTest, JoinedRanksTakePart, 3) {
  TrainUnderJoins(group, ThreeJoins(), {});
  TrainUnderJoins(group, ThreeJoins(), {.broadcast_buffers = false});
  TrainUnderJoins(group, ThreeJoins(), {.broadcast_buffers = false, .bucket_cap_mb = 0.00001});
  TrainUnderJoins(group, ThreeJoins(), {.static_graph = true});
  TrainUnderJoins(group, ThreeJoins(), {.find_unused_parameters = true});
  TrainUnderJoins(group, ThreeJoins(), {}, {.checkpoint = true});
}

THREAD_RANK_TEST(SyncBatchNormModelTest, AJoinTakesForwardsWithoutGradients, 2) {
  Net net = MakeConverted();
  DistributedDataParallel<Net> model(net, group);
  Join join({&model});
  for (int i = 0; i < 1 + group->rank(); ++i) {
    const torch::NoGradGuard no_grad;
    model(Input(group->rank(), i));
  }
  join.finish();
  EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 2);
  EXPECT_TRUE(SameOnAllRanks(*group, Flatten(net->buffers())));
}

RANK_TEST(SyncBatchNormModelTest, TrainsOverGloo, 3) {
  const std::shared_ptr<ProcessGroup> group = init_process_group();
  Train(group, {.bucket_cap_mb = 0.00001});
  TrainUnderJoins(group, ThreeJoins(), {.broadcast_buffers = false});
}

// ---- Groups.

THREAD_RANK_TEST(SyncBatchNormModelTest, FollowsTheModelToAnotherGroup, 3) {
  Net net = MakeConverted();
  DistributedDataParallel<Net> model(net, group);
  LossOf(model(Input(group->rank(), 0))).backward();
  net->zero_grad();
  const std::shared_ptr<ProcessGroup> pair = group->new_group({0, 1});
  if (!pair) return;
  model.update_process_group(pair);
  Net reference = MakeNet();
  {
    const torch::NoGradGuard no_grad;
    for (const auto& item : reference->named_buffers()) {
      item.value().copy_(net->named_buffers()[item.key()]);
    }
  }
  LossOf(model(Input(group->rank(), 1))).backward();
  Step(*net);
  ReferenceStep(reference, {0, 1}, 1, 2);
  ExpectSame(*pair, net, reference);
}

THREAD_RANK_TEST(SyncBatchNormModelTest, MayHaveAGroupOfItsOwn, 4) {
  const int first = group->rank() / 2 * 2;
  const std::shared_ptr<ProcessGroup> pair = group->new_group({first, first + 1});
  Net net = MakeConverted(pair);
  Net reference = MakeNet();
  DistributedDataParallel<Net> model(net, group, {.broadcast_buffers = false});
  LossOf(model(Input(group->rank(), 0))).backward();
  for (const int start : {0, 2}) {
    Net half = MakeNet();
    (LossOf(half->forward(torch::cat({Input(start, 0), Input(start + 1, 0)}))) / 4).backward();
    for (size_t i = 0; i < half->parameters().size(); ++i) {
      torch::Tensor& gradient = reference->parameters()[i].mutable_grad();
      const torch::Tensor part = half->parameters()[i].grad();
      gradient = gradient.defined() ? gradient + part : part;
    }
  }
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    EXPECT_TRUE(net->parameters()[i].grad().allclose(reference->parameters()[i].grad(), 1e-4, 1e-5))
        << i;
  }
  EXPECT_TRUE(SameOnAllRanks(*pair, Flatten(net->buffers())));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { Join join({&model}); }),
              HasSubstr("which joined ranks do not know"));
}

THREAD_RANK_TEST(SyncBatchNormModelTest, RefusesAGroupLargerThanTheModels, 2) {
  Net net = MakeConverted(group);
  const std::shared_ptr<ProcessGroup> alone = group->new_group({group->rank()});
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { DistributedDataParallel<Net> model(net, alone); }),
              HasSubstr("a SyncBatchNorm has a process group of 2 ranks, and the "
                        "DistributedDataParallel one of 1"));
}

THREAD_RANK_TEST(SyncBatchNormModelTest, RefusesAnUpdateToAGroupSmallerThanALayers, 3) {
  Net net = MakeConverted(group);
  DistributedDataParallel<Net> model(net, group);
  const std::shared_ptr<ProcessGroup> pair = group->new_group({0, 1});
  if (!pair) return;
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { model.update_process_group(pair); }),
              HasSubstr("a SyncBatchNorm has a process group of 3 ranks, and the "
                        "DistributedDataParallel one of 2"));
}

THREAD_RANK_TEST(SyncBatchNormModelTest, ALayersGroupMayBecomeTheModels, 3) {
  const auto own = group->new_group(group->rank() < 2 ? std::vector<int>{0, 1} : std::vector{2});
  Net net = MakeConverted(own);
  DistributedDataParallel<Net> model(net, group);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { Join join({&model}); }),
              HasSubstr("which joined ranks do not know"));
  model.update_process_group(own);
  join({&model}, {}, [&] {
    for (int step = 0; step <= group->rank(); ++step) {
      LossOf(model(Input(group->rank(), step))).backward();
    }
  });
  EXPECT_TRUE(SameOnAllRanks(*own, Flatten(net->buffers())));
}

THREAD_RANK_TEST(SyncBatchNormModelTest, RefusesAGroupThatCameAfterTheWrapper, 2) {
  Net net = MakeConverted();
  DistributedDataParallel<Net> model(net, group);
  const std::shared_ptr<ProcessGroup> own = group->new_group({0, 1});
  convert_sync_batchnorm(*net, own);
  const std::string error =
      ErrorOf<std::exception>([&] { static_cast<void>(model(Input(group->rank(), 0))); });
  EXPECT_THAT(error, HasSubstr("got its process group after the DistributedDataParallel"));
}

THREAD_RANK_TEST(SyncBatchNormModelTest, RefusesALayerThatCameAfterTheWrapper, 2) {
  Net net = MakeNet();
  DistributedDataParallel<Net> model(net, group);
  EXPECT_FALSE(model.logging_data().has_sync_bn);
  convert_sync_batchnorm(*net);
  try {
    model(Input(group->rank(), 0));
    ADD_FAILURE() << "no error";
  } catch (const ConfigurationError& error) {
    EXPECT_THAT(error.what(), HasSubstr("constructed before the layer"));
  } catch (const CommunicationError& error) {
    EXPECT_THAT(error.what(), HasSubstr("constructed before the layer"));
  }
}

// ---- Failures.

// `layers`: the group of the layers. Its ranks have a collective with rank 1 in every mode.
void FailAndGoOn(const std::shared_ptr<ProcessGroup>& group, ProcessGroup& layers, Net net) {
  const int rank = group->rank();
  DistributedDataParallel<Net> model(net, group, {.broadcast_buffers = false});
  for (const Place place : {Place::kForward, Place::kNoSync, Place::kNoGrad, Place::kBackward,
                            Place::kBackwardNoSync}) {
    SCOPED_TRACE(static_cast<int>(place));
    const bool thrown = Throws(rank, [&] { FailAt(model, place, rank); });
    if (!thrown) {
      EXPECT_GE(rank, layers.size());
      EXPECT_TRUE(Throws(rank, [&] { LossOf(model(Input(rank, 0))).backward(); }));
    }
    net->way = {};
    net->zero_grad();
    {
      const torch::NoGradGuard no_grad;
      model(Input(rank, 1));
    }
    for (int step = 0; step < 2; ++step) LossOf(model(Input(rank, step))).backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
    EXPECT_TRUE(SameOnAllRanks(layers, Flatten(net->buffers())));
  }
}

THREAD_RANK_TEST(
    SyncBatchNormModelTest, EveryRankThrowsOnceForAFailureInEachMode, 2, 3,
    /*not_on_device=*/"a rank is ahead of its sums there; step_failure_test has its failures") {
  FailAndGoOn(group, *group, MakeConverted());
}

THREAD_RANK_TEST(
    SyncBatchNormModelTest, EveryRankThrowsOnceWithGroupsOfTheLayers, 4,
    /*not_on_device=*/"a rank is ahead of its sums there; step_failure_test has its failures") {
  const int first = group->rank() / 2 * 2;
  const std::shared_ptr<ProcessGroup> pair = group->new_group({first, first + 1});
  FailAndGoOn(group, *pair, MakeConverted(pair));
}

// Rank 3 gets the news of the failure when it launches a bucket. Rank 2 waits for it in a layer.
THREAD_RANK_TEST(
    SyncBatchNormModelTest, AFailedLaunchEndsTheWaitOfALayersGroup, 4,
    /*not_on_device=*/"a rank is ahead of its sums there; step_failure_test has its failures") {
  const int rank = group->rank();
  const int first = rank / 2 * 2;
  const std::shared_ptr<ProcessGroup> pair = group->new_group({first, first + 1});
  Net net = MakeConverted(pair);
  DistributedDataParallel<Net> model(net, group, {.bucket_cap_mb = 0.00001});
  LossOf(model(Input(rank, 0))).backward();
  const auto fail = [&] {
    net->way.explosive = rank == 1;
    const torch::Tensor y = model(Input(rank, 1));
    if (rank == 3) {
      y.register_hook([&](const torch::Tensor&) {
        while (!group->failed()) std::this_thread::yield();
      });
    }
    LossOf(y).backward();
  };
  EXPECT_TRUE(Throws(rank, fail));
  net->way = {};
  net->zero_grad();
  LossOf(model(Input(rank, 2))).backward();
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
}

THREAD_RANK_TEST(SyncBatchNormModelTest, AnExceptionInEvalStaysOnItsRank, 2) {
  Net net = MakeConverted();
  DistributedDataParallel<Net> model(net, group);
  const int rank = group->rank();
  LossOf(model(Input(rank, 0))).backward();
  model.eval();
  if (rank == 1) {
    EXPECT_TRUE(Throws(rank, [&] { FailAt(model, Place::kBackwardNoSync, rank); }));
  }
  model.train();
  net->way = {};
  net->zero_grad();
  LossOf(model(Input(rank, 1))).backward();
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
}

THREAD_RANK_TEST(
    SyncBatchNormModelTest, EveryRankThrowsForAFailureUnderAJoin, 3,
    /*not_on_device=*/"a rank is ahead of its sums there; step_failure_test has its failures") {
  Net net = MakeConverted();
  DistributedDataParallel<Net> model(net, group);
  const int rank = group->rank();
  const auto loop = [&](bool fails) {
    join({&model}, {}, [&] {
      for (int step = 0; step < 3 - rank; ++step) {
        if (fails && rank == 1 && step == 1) {
          net->way.between = [] { throw std::runtime_error("rank 1 has a bad day"); };
        }
        LossOf(model(Input(rank, step))).backward();
      }
    });
  };
  EXPECT_TRUE(Throws(rank, [&] { loop(true); }));
  net->way = {};
  net->zero_grad();
  LossOf(model(Input(rank, 0))).backward();
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  loop(false);
  EXPECT_TRUE(SameOnAllRanks(*group, Flatten(net->buffers())));
}

THREAD_RANK_TEST(SyncBatchNormModelTest, OtherLayersOnAnotherRankAreNamedUnderAJoin, 3) {
  DistributedDataParallel<testing::Crossed> model(testing::Crossed(), group);
  const auto run = [&] {
    join({&model}, {}, [&] {
      if (group->rank() < 2) model(Input(group->rank(), 0), group->rank() == 0).backward();
    });
  };
  EXPECT_THAT(
      ErrorOf<CommunicationError>(run),
      HasSubstr("rank 0: a SyncBatchNorm adds up 24 numbers, and that of rank 1 adds up 18"));
}

THREAD_RANK_TEST(SyncBatchNormModelTest, WorksWithMixedPrecision, 2) {
  Net net = MakeConverted();
  DistributedDataParallel<Net> model(
      net, group,
      {.broadcast_buffers = false,
       .mixed_precision = MixedPrecision{.param_dtype = torch::kBFloat16}});
  for (int step = 0; step < 2; ++step) {
    const torch::Tensor y = model(Input(group->rank(), step));
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    LossOf(y).backward();
    Step(*net);
  }
  EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 2);
  EXPECT_TRUE(SameOnAllRanks(*group, Flatten(net->parameters())));
  EXPECT_TRUE(SameOnAllRanks(*group, Flatten(net->buffers())));
}

RANK_TEST(
    SyncBatchNormModelTest, FailsAndGoesOnOverGloo, .world_size = 2,
    .not_on_device = "a rank is ahead of its sums there; step_failure_test has its failures") {
  const std::shared_ptr<ProcessGroup> group = init_process_group();
  FailAndGoOn(group, *group, MakeConverted());
}

THREAD_RANK_TEST(SyncBatchNormModelTest, RefusesABackwardOfAnotherIncarnation, 2) {
  for (const bool checkpointed : {false, true}) {
    SCOPED_TRACE(checkpointed);
    Net net = MakeConverted();
    net->way.checkpoint = checkpointed;
    DistributedDataParallel<Net> model(net, group);
    const torch::Tensor loss = LossOf(model(Input(group->rank(), 0)));
    group->renew();
    const std::string error = ErrorOf<std::exception>([&] { loss.backward(); });
    EXPECT_THAT(error,
                HasSubstr("renewed between the forward and the backward of a SyncBatchNorm"));
    net->zero_grad();
    group->renew();
    LossOf(model(Input(group->rank(), 0))).backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  }
}

}  // namespace
}  // namespace ddp
