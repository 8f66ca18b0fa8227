#include "elastic/data/elastic_sampler.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A job of W samplers that make the same calls. Collects the samples that optimizer steps consume.
class Job {
 public:
  Job(ElasticSampler::Options options, int world_size) : options_(options) { Start(world_size); }

  // Starts a new generation of `world_size` ranks at the last committed position.
  void Resize(int world_size) {
    const SamplerState state = samplers_[0].state();
    Start(world_size);
    for (ElasticSampler& sampler : samplers_) sampler.restore(state);
  }

  // Draws one global batch on every rank. Returns false at the end of the epoch.
  bool Draw() {
    batch_.clear();
    bool any = false;
    size_t smallest = SIZE_MAX;
    size_t largest = 0;
    for (ElasticSampler& sampler : samplers_) {
      const std::optional<ElasticSampler::Batch> batch = sampler.next_batch();
      if (!batch.has_value()) continue;
      any = true;
      global_size_ = batch->global_size;
      smallest = std::min(smallest, batch->indices.size());
      largest = std::max(largest, batch->indices.size());
      batch_.insert(batch_.end(), batch->indices.begin(), batch->indices.end());
    }
    if (!any) return false;
    EXPECT_EQ(static_cast<int64_t>(batch_.size()), global_size_);
    EXPECT_LE(largest - smallest, 1u);
    return true;
  }

  void Commit() {
    consumed_.insert(consumed_.end(), batch_.begin(), batch_.end());
    for (ElasticSampler& sampler : samplers_) sampler.commit();
    for (const ElasticSampler& sampler : samplers_) {
      EXPECT_EQ(sampler.state(), samplers_[0].state());
    }
  }

  void RunEpoch(uint32_t epoch) {
    consumed_.clear();
    for (ElasticSampler& sampler : samplers_) sampler.set_epoch(epoch);
    while (Draw()) Commit();
  }

  const std::vector<int64_t>& consumed() const { return consumed_; }
  ElasticSampler& sampler(int rank) { return samplers_[static_cast<size_t>(rank)]; }

 private:
  void Start(int world_size) {
    samplers_.clear();
    for (int rank = 0; rank < world_size; ++rank) {
      samplers_.emplace_back(options_, rank, world_size);
    }
  }

  ElasticSampler::Options options_;
  std::vector<ElasticSampler> samplers_;
  std::vector<int64_t> batch_;
  int64_t global_size_ = 0;
  std::vector<int64_t> consumed_;
};

void ExpectExactlyOnce(std::vector<int64_t> consumed, int64_t dataset_size) {
  ASSERT_EQ(static_cast<int64_t>(consumed.size()), dataset_size);
  std::sort(consumed.begin(), consumed.end());
  for (int64_t i = 0; i < dataset_size; ++i) ASSERT_EQ(consumed[static_cast<size_t>(i)], i);
}

TEST(ElasticSamplerTest, UnshuffledSharesAreContiguous) {
  Job job({.dataset_size = 10, .global_batch_size = 5, .shuffle = false}, 2);
  EXPECT_THAT(job.sampler(0).next_batch()->indices, ElementsAre(0, 1));
  EXPECT_THAT(job.sampler(1).next_batch()->indices, ElementsAre(2, 3, 4));
  EXPECT_THAT(job.sampler(0).next_batch()->indices, ElementsAre(5, 6));
}

TEST(ElasticSamplerTest, EpochUsesEachSampleOnceForAnyWorldSize) {
  for (const int64_t dataset_size : {1, 2, 7, 64, 1000}) {
    for (const int64_t global_batch_size : {1, 3, 64, 4000}) {
      for (const int world_size : {1, 2, 3, 8, 64}) {
        Job job({.dataset_size = dataset_size, .global_batch_size = global_batch_size}, world_size);
        job.RunEpoch(0);
        ExpectExactlyOnce(job.consumed(), dataset_size);
      }
    }
  }
}

TEST(ElasticSamplerTest, OrderDoesNotDependOnWorldSize) {
  Job one({.dataset_size = 103, .global_batch_size = 16, .seed = 5}, 1);
  Job seven({.dataset_size = 103, .global_batch_size = 16, .seed = 5}, 7);
  one.RunEpoch(4);
  seven.RunEpoch(4);
  EXPECT_EQ(one.consumed(), seven.consumed());
}

TEST(ElasticSamplerTest, EpochsAndSeedsHaveTheirOwnOrders) {
  Job job({.dataset_size = 50, .global_batch_size = 10, .seed = 5}, 1);
  job.RunEpoch(0);
  const std::vector<int64_t> first = job.consumed();
  job.RunEpoch(1);
  EXPECT_NE(job.consumed(), first);
  Job other({.dataset_size = 50, .global_batch_size = 10, .seed = 6}, 1);
  other.RunEpoch(0);
  EXPECT_NE(other.consumed(), first);
}

// Random jobs are resized or killed at random points, often with a drawn batch that is then lost.
TEST(ElasticSamplerTest, ExactlyOnceThroughResizesAndKills) {
  std::mt19937_64 random(20260101);
  const auto below = [&random](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  for (int story = 0; story < 300; ++story) {
    const ElasticSampler::Options options = {
        .dataset_size = 1 + below(500), .global_batch_size = 1 + below(70), .seed = random()};
    Job job(options, static_cast<int>(1 + below(64)));
    int faults_left = 8;
    while (job.Draw()) {
      if (faults_left > 0 && below(4) == 0) {
        --faults_left;
        if (below(2) == 0) job.Draw();
        job.Resize(static_cast<int>(1 + below(64)));
        continue;
      }
      job.Commit();
    }
    ExpectExactlyOnce(job.consumed(), options.dataset_size);
  }
}

TEST(ElasticSamplerTest, DropLastLeavesOutTheIncompleteBatch) {
  Job job({.dataset_size = 10, .global_batch_size = 4, .drop_last = true}, 3);
  EXPECT_EQ(job.sampler(0).steps_per_epoch(), 2);
  job.RunEpoch(0);
  EXPECT_EQ(job.consumed().size(), 8u);
  Job all({.dataset_size = 10, .global_batch_size = 4}, 3);
  EXPECT_EQ(all.sampler(0).steps_per_epoch(), 3);
}

TEST(ElasticSamplerTest, RankWithoutSamplesStillGetsItsBatch) {
  Job job({.dataset_size = 2, .global_batch_size = 8}, 4);
  const std::optional<ElasticSampler::Batch> batch = job.sampler(0).next_batch();
  ASSERT_TRUE(batch.has_value());
  EXPECT_THAT(batch->indices, IsEmpty());
  EXPECT_EQ(batch->global_size, 2);
}

// Tries every size of a small dataset on 3 ranks. No rank gets fewer than two samples of a batch,
// and each sample is used once.
TEST(ElasticSamplerTest, LeastSamplesOfARankAreKeptToTheEndOfTheEpoch) {
  constexpr int kRanks = 3;
  constexpr int64_t kLeast = 2;
  for (const int64_t batch_size : {6, 7, 8, 11, 12, 13, 30}) {
    for (int64_t size = kRanks * kLeast; size <= 60; ++size) {
      SCOPED_TRACE(std::to_string(size) + " in batches of " + std::to_string(batch_size));
      std::vector<ElasticSampler> samplers;
      for (int rank = 0; rank < kRanks; ++rank) {
        samplers.emplace_back(ElasticSampler::Options{.dataset_size = size,
                                                      .global_batch_size = batch_size,
                                                      .min_samples_per_rank = kLeast},
                              rank, kRanks);
      }
      std::vector<int64_t> used;
      int64_t steps = 0;
      for (bool more = true; more; ++steps) {
        for (ElasticSampler& sampler : samplers) {
          const auto batch = sampler.next_batch();
          more = batch.has_value();
          if (!more) continue;
          EXPECT_GE(static_cast<int64_t>(batch->indices.size()), kLeast);
          EXPECT_LT(batch->global_size, batch_size + kLeast * kRanks);
          used.insert(used.end(), batch->indices.begin(), batch->indices.end());
          sampler.commit();
        }
      }
      EXPECT_EQ(steps - 1, samplers[0].steps_per_epoch());
      std::sort(used.begin(), used.end());
      ASSERT_EQ(static_cast<int64_t>(used.size()), size);
      for (int64_t i = 0; i < size; ++i) ASSERT_EQ(used[static_cast<size_t>(i)], i);
    }
  }
  // The constructor refuses options with which a batch cannot give each rank that many samples.
  const auto refused = [](int64_t dataset_size, int64_t batch_size) {
    try {
      ElasticSampler({.dataset_size = dataset_size,
                      .global_batch_size = batch_size,
                      .min_samples_per_rank = 2},
                     0, 3);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(refused(100, 5), HasSubstr("min_samples_per_rank=2 on 3 ranks"));
  EXPECT_THAT(refused(5, 100), HasSubstr("dataset_size=5"));
  EXPECT_EQ(refused(6, 6), "");
}

// The job is resized between the two batches that share the tail. Each sample is used exactly once.
TEST(ElasticSamplerTest, SharedTailIsUsedOnceThroughAResize) {
  Job job({.dataset_size = 25, .global_batch_size = 12, .seed = 3, .min_samples_per_rank = 2}, 3);
  EXPECT_TRUE(job.Draw());  // 12 samples; batches of 7 and 6 follow
  job.Commit();
  job.Resize(2);
  while (job.Draw()) job.Commit();
  std::vector<int64_t> used = job.consumed();
  std::sort(used.begin(), used.end());
  ASSERT_EQ(used.size(), 25u);
  EXPECT_EQ(std::unique(used.begin(), used.end()), used.end());
}

TEST(ElasticSamplerTest, SetEpochKeepsThePositionWithinTheEpochAndTakesBackDrawnBatches) {
  ElasticSampler sampler({.dataset_size = 10, .global_batch_size = 2, .shuffle = false}, 0, 1);
  sampler.set_epoch(3);
  sampler.next_batch();
  sampler.commit();
  sampler.next_batch();  // drawn, never committed
  sampler.set_epoch(3);
  EXPECT_EQ(sampler.state().cursor, 2);
  EXPECT_THAT(sampler.next_batch()->indices, ElementsAre(2, 3));
  sampler.set_epoch(4);
  EXPECT_EQ(sampler.state().cursor, 0);
}

TEST(ElasticSamplerTest, BatchesMayBeDrawnAheadOfTheirCommits) {
  ElasticSampler sampler({.dataset_size = 5, .global_batch_size = 2, .shuffle = false}, 0, 1);
  EXPECT_EQ(sampler.next_batch()->position, 0);
  EXPECT_EQ(sampler.next_batch()->position, 2);
  EXPECT_EQ(sampler.next_batch()->position, 4);
  EXPECT_FALSE(sampler.next_batch().has_value());
  sampler.commit();
  EXPECT_EQ(sampler.state().cursor, 2);
  sampler.commit();
  sampler.commit();
  EXPECT_EQ(sampler.state().cursor, 5);
}

TEST(ElasticSamplerTest, RestoresAtBothEndsOfAnEpoch) {
  const ElasticSampler::Options options = {.dataset_size = 6, .global_batch_size = 2, .seed = 1};
  ElasticSampler source(options, 0, 1);
  source.set_epoch(2);
  ElasticSampler at_start(options, 0, 1);
  at_start.restore(source.state());
  EXPECT_EQ(at_start.next_batch()->indices, source.next_batch()->indices);
  source.commit();
  while (source.next_batch().has_value()) source.commit();
  ElasticSampler at_end(options, 0, 1);
  at_end.restore(source.state());
  EXPECT_EQ(at_end.epoch(), 2u);
  EXPECT_FALSE(at_end.next_batch().has_value());
  at_end.set_epoch(3);
  EXPECT_TRUE(at_end.next_batch().has_value());
}

TEST(ElasticSamplerTest, RestoreOfAnotherJobListsEveryDifference) {
  ElasticSampler sampler({.dataset_size = 10, .global_batch_size = 2, .seed = 1}, 0, 1);
  SamplerState other = sampler.state();
  other.dataset_size = 12;
  other.global_batch_size = 4;
  other.seed = 9;
  const SamplerState before = sampler.state();
  try {
    sampler.restore(other);
    FAIL() << "restored the state of another job";
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), HasSubstr("dataset_size is 12 in the checkpoint and 10 here"));
    EXPECT_THAT(error.what(), HasSubstr("global_batch_size is 4 in the checkpoint and 2 here"));
    EXPECT_THAT(error.what(), HasSubstr("seed is 9 in the checkpoint and 1 here"));
  }
  EXPECT_EQ(sampler.state(), before);
}

TEST(ElasticSamplerTest, RestoreRefusesALyingCursorAndAnUnknownOrder) {
  ElasticSampler sampler({.dataset_size = 10, .global_batch_size = 2}, 0, 1);
  SamplerState lying = sampler.state();
  lying.cursor = 11;
  EXPECT_THROW(sampler.restore(lying), std::invalid_argument);
  lying.cursor = -1;
  EXPECT_THROW(sampler.restore(lying), std::invalid_argument);
  SamplerState newer = sampler.state();
  newer.order_version = 77;
  EXPECT_THROW(sampler.restore(newer), std::invalid_argument);
}

TEST(ElasticSamplerTest, RefusesOptionsThatMakeNoSense) {
  const auto refused = [](ElasticSampler::Options options, int rank, int world_size) {
    EXPECT_THROW(ElasticSampler(options, rank, world_size), std::invalid_argument);
  };
  refused({.dataset_size = 0, .global_batch_size = 2}, 0, 1);
  refused({.dataset_size = 5, .global_batch_size = 0}, 0, 1);
  refused({.dataset_size = 5, .global_batch_size = 2}, 1, 1);
  refused({.dataset_size = 5, .global_batch_size = 2}, -1, 1);
  refused({.dataset_size = 5, .global_batch_size = 2}, 0, 0);
  refused({.dataset_size = 5, .global_batch_size = 6, .drop_last = true}, 0, 1);
}

TEST(ElasticSamplerDeathTest, CommitWithoutABatchIsAMistake) {
  ElasticSampler sampler({.dataset_size = 10, .global_batch_size = 2}, 0, 1);
  EXPECT_DEATH(sampler.commit(), "without a batch");
}

}  // namespace
}  // namespace ddp::elastic
