#include "elastic/data/elastic_data_loader.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;

// What the copies of a dataset share: which samples were read, and which may be.
class Shelf {
 public:
  // Blocks until sample `index` may be read.
  void Read(size_t index) {
    MutexLock lock(mutex_);
    while (held_.contains(index)) changed_.WaitFor(mutex_, absl::InfiniteDuration());
    read_.insert(index);
    changed_.NotifyAll();
    if (broken_.contains(index)) throw std::runtime_error("sample " + std::to_string(index));
  }

  void Hold(size_t index) {
    MutexLock lock(mutex_);
    held_.insert(index);
  }
  void Release(size_t index) {
    MutexLock lock(mutex_);
    held_.erase(index);
    changed_.NotifyAll();
  }
  void Break(size_t index, bool is_broken) {
    MutexLock lock(mutex_);
    is_broken ? (void)broken_.insert(index) : (void)broken_.erase(index);
  }
  // Blocks until sample `index` was read.
  void AwaitRead(size_t index) {
    MutexLock lock(mutex_);
    while (!read_.contains(index)) changed_.WaitFor(mutex_, absl::InfiniteDuration());
  }
  bool WasRead(size_t index) {
    MutexLock lock(mutex_);
    return read_.contains(index);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::set<size_t> held_ ABSL_GUARDED_BY(mutex_);
  std::set<size_t> broken_ ABSL_GUARDED_BY(mutex_);
  std::set<size_t> read_ ABSL_GUARDED_BY(mutex_);
};

// A sample is its index.
struct Numbers {
  using BatchType = std::vector<int64_t>;

  BatchType get_batch(const std::vector<size_t>& indices) {
    for (const size_t index : indices) shelf->Read(index);
    return {indices.begin(), indices.end()};
  }

  std::shared_ptr<Shelf> shelf = std::make_shared<Shelf>();
};

using Loader = ElasticDataLoader<Numbers>;

ElasticSampler InOrder(int64_t dataset_size, int64_t batch_size) {
  return ElasticSampler(
      {.dataset_size = dataset_size, .global_batch_size = batch_size, .shuffle = false}, 0, 1);
}

// A job of W ranks, each with a sampler and a loader of its own.
class Job {
 public:
  Job(const ElasticSampler::Options& options, int world_size, const Loader::Options& loading)
      : options_(options), loading_(loading) {
    Start(world_size);
  }

  void Resize(int world_size) {
    const SamplerState state = samplers_[0].state();
    Start(world_size);
    for (ElasticSampler& sampler : samplers_) sampler.restore(state);
  }

  // Rolls all ranks back to `state` without new processes.
  void Restore(const SamplerState& state) {
    for (ElasticSampler& sampler : samplers_) sampler.restore(state);
  }

  // Draws and loads one batch on every rank. Returns false at the end of the epoch.
  bool Load() {
    loaded_.clear();
    bool any = false;
    for (size_t rank = 0; rank < samplers_.size(); ++rank) {
      const std::optional<ElasticSampler::Batch> batch = samplers_[rank].next_batch();
      if (!batch.has_value()) continue;
      any = true;
      const std::optional<std::vector<int64_t>> data = loaders_[rank].load(*batch);
      EXPECT_EQ(data.has_value(), !batch->indices.empty());
      EXPECT_EQ(data.value_or(std::vector<int64_t>()), batch->indices);
      if (data.has_value()) loaded_.insert(loaded_.end(), data->begin(), data->end());
    }
    return any;
  }

  void Commit() {
    consumed_.insert(consumed_.end(), loaded_.begin(), loaded_.end());
    for (ElasticSampler& sampler : samplers_) sampler.commit();
  }

  void SetEpoch(uint32_t epoch) {
    for (ElasticSampler& sampler : samplers_) sampler.set_epoch(epoch);
  }

  const SamplerState& state() const { return samplers_[0].state(); }
  std::vector<int64_t> TakeConsumed() { return std::exchange(consumed_, {}); }

 private:
  void Start(int world_size) {
    loaders_.clear();
    samplers_.clear();
    for (int rank = 0; rank < world_size; ++rank) {
      samplers_.emplace_back(options_, rank, world_size);
    }
    for (const ElasticSampler& sampler : samplers_) {
      loaders_.emplace_back(Numbers(), sampler, loading_);
    }
  }

  const ElasticSampler::Options options_;
  const Loader::Options loading_;
  std::deque<ElasticSampler> samplers_;  // loaders point to them
  std::deque<Loader> loaders_;
  std::vector<int64_t> loaded_;
  std::vector<int64_t> consumed_;
};

void ExpectExactlyOnce(std::vector<int64_t> consumed, int64_t dataset_size) {
  ASSERT_EQ(static_cast<int64_t>(consumed.size()), dataset_size);
  std::sort(consumed.begin(), consumed.end());
  for (int64_t i = 0; i < dataset_size; ++i) ASSERT_EQ(consumed[static_cast<size_t>(i)], i);
}

// Random jobs are killed, resized and rolled back at random points, with batches that were read
// ahead, or loaded and not trained.
TEST(ElasticDataLoaderTest, ExactlyOnceThroughResizesAndKills) {
  std::mt19937_64 random(20260101);
  const auto below = [&random](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  for (int story = 0; story < 60; ++story) {
    const ElasticSampler::Options options = {
        .dataset_size = 1 + below(200), .global_batch_size = 1 + below(30), .seed = random()};
    const Loader::Options loading = {.workers = static_cast<int>(below(4)),
                                     .prefetch = static_cast<int>(1 + below(5))};
    Job job(options, static_cast<int>(1 + below(4)), loading);
    for (uint32_t epoch = 0; epoch < 2; ++epoch) {
      job.SetEpoch(epoch);
      int faults_left = 5;
      while (job.Load()) {
        if (faults_left > 0 && below(4) == 0) {
          --faults_left;
          if (below(2) == 0) job.Load();
          below(2) == 0 ? job.Resize(static_cast<int>(1 + below(4))) : job.Restore(job.state());
          continue;
        }
        job.Commit();
      }
      ExpectExactlyOnce(job.TakeConsumed(), options.dataset_size);
    }
  }
}

TEST(ElasticDataLoaderTest, TailPoliciesOfTheSamplerHold) {
  Job drop({.dataset_size = 10, .global_batch_size = 4, .drop_last = true}, 2, {.workers = 2});
  while (drop.Load()) drop.Commit();
  EXPECT_EQ(drop.TakeConsumed().size(), 8);
  Job shared({.dataset_size = 9, .global_batch_size = 4, .min_samples_per_rank = 2}, 2,
             {.workers = 2});
  while (shared.Load()) shared.Commit();
  ExpectExactlyOnce(shared.TakeConsumed(), 9);
}

TEST(ElasticDataLoaderTest, ReadsAheadAndNoFurther) {
  const Numbers numbers;
  ElasticSampler sampler = InOrder(10, 1);
  numbers.shelf->Hold(3);
  Loader loader(numbers, sampler, {.workers = 1, .prefetch = 3});
  EXPECT_EQ(loader.load(*sampler.next_batch()), std::vector<int64_t>{0});
  numbers.shelf->AwaitRead(1);
  numbers.shelf->AwaitRead(2);
  EXPECT_EQ(loader.batches_ahead(), 3);
  numbers.shelf->Release(3);
  numbers.shelf->AwaitRead(3);
  EXPECT_FALSE(numbers.shelf->WasRead(4));
}

TEST(ElasticDataLoaderTest, KeepsTheOrderWhenALaterBatchIsReadFirst) {
  const Numbers numbers;
  ElasticSampler sampler = InOrder(3, 1);
  numbers.shelf->Hold(1);
  Loader loader(numbers, sampler, {.workers = 2, .prefetch = 2});
  EXPECT_EQ(loader.load(*sampler.next_batch()), std::vector<int64_t>{0});
  numbers.shelf->AwaitRead(2);
  EXPECT_FALSE(numbers.shelf->WasRead(1));
  numbers.shelf->Release(1);
  EXPECT_EQ(loader.load(*sampler.next_batch()), std::vector<int64_t>{1});
  EXPECT_EQ(loader.load(*sampler.next_batch()), std::vector<int64_t>{2});
  EXPECT_EQ(loader.batches_ahead(), 0);
}

TEST(ElasticDataLoaderTest, AnErrorComesWithItsBatchWhichCanBeLoadedAgain) {
  for (const int workers : {0, 2}) {
    const Numbers numbers;
    ElasticSampler sampler = InOrder(4, 1);
    numbers.shelf->Break(1, true);
    Loader loader(numbers, sampler, {.workers = workers});
    EXPECT_EQ(loader.load(*sampler.next_batch()), std::vector<int64_t>{0});
    const ElasticSampler::Batch second = *sampler.next_batch();
    try {
      loader.load(second);
      ADD_FAILURE() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "sample 1");
    }
    numbers.shelf->Break(1, false);
    EXPECT_EQ(loader.load(second), std::vector<int64_t>{1});
    EXPECT_EQ(loader.load(*sampler.next_batch()), std::vector<int64_t>{2});
  }
}

TEST(ElasticDataLoaderTest, AReadThatDoesNotEndIsNamed) {
  const Numbers numbers;
  ElasticSampler sampler = InOrder(4, 2);
  numbers.shelf->Hold(1);
  Loader loader(numbers, sampler, {.timeout = std::chrono::milliseconds(1)});
  const ElasticSampler::Batch first = *sampler.next_batch();
  try {
    loader.load(first);
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_THAT(error.what(), HasSubstr("the 2 samples of the batch at position 0 of epoch 0 were "
                                        "not read within 1 ms"));
  }
  numbers.shelf->Release(1);
}

TEST(ElasticDataLoaderTest, ARankWithoutSamplesGetsNone) {
  ElasticSampler sampler({.dataset_size = 1, .global_batch_size = 4}, 0, 2);
  Loader loader(Numbers(), sampler);
  const ElasticSampler::Batch batch = *sampler.next_batch();
  ASSERT_TRUE(batch.indices.empty());
  EXPECT_EQ(loader.load(batch), std::nullopt);
}

TEST(ElasticDataLoaderTest, TheEndDropsWhatIsReadAhead) {
  const Numbers numbers;
  ElasticSampler sampler = InOrder(10, 1);
  {
    Loader loader(numbers, sampler, {.workers = 1, .prefetch = 8});
    loader.load(*sampler.next_batch());
  }
  EXPECT_EQ(numbers.shelf.use_count(), 1);
}

TEST(ElasticDataLoaderTest, RefusesOptionsThatMakeNoSense) {
  const ElasticSampler sampler = InOrder(1, 1);
  EXPECT_THROW(Loader(Numbers(), sampler, {.workers = -1}), std::invalid_argument);
  EXPECT_THROW(Loader(Numbers(), sampler, {.prefetch = 0}), std::invalid_argument);
  EXPECT_THROW(Loader(Numbers(), sampler, {.timeout = std::chrono::milliseconds(0)}),
               std::invalid_argument);
}

}  // namespace
}  // namespace ddp::elastic
