// Compares LibTorch's sampler for several ranks with ours: the fourteenth defect of docs/parity.md.
#include <torch/data/samplers/distributed.h>

#include <algorithm>
#include <iostream>
#include <numeric>
#include <set>
#include <vector>

#include "elastic/data/elastic_sampler.h"
#include "gtest/gtest.h"

namespace ddp::testing {
namespace {

// Returns the samples that all ranks of LibTorch's sampler draw in one epoch.
std::vector<size_t> DrawnByLibTorch(size_t size, size_t replicas, bool allow_duplicates,
                                    size_t epoch) {
  std::vector<size_t> drawn;
  for (size_t rank = 0; rank < replicas; ++rank) {
    torch::data::samplers::DistributedRandomSampler sampler(size, replicas, rank, allow_duplicates);
    sampler.set_epoch(epoch);
    sampler.reset();
    while (const auto batch = sampler.next(4)) {
      drawn.insert(drawn.end(), batch->begin(), batch->end());
    }
  }
  return drawn;
}

std::vector<int64_t> DrawnByOurs(int64_t size, int replicas, uint64_t seed, uint32_t epoch) {
  std::vector<int64_t> drawn;
  for (int rank = 0; rank < replicas; ++rank) {
    elastic::ElasticSampler sampler({.dataset_size = size, .global_batch_size = 4, .seed = seed},
                                    rank, replicas);
    sampler.set_epoch(epoch);
    while (const auto batch = sampler.next_batch()) {
      drawn.insert(drawn.end(), batch->indices.begin(), batch->indices.end());
    }
  }
  return drawn;
}

TEST(DefectsTest, Defect14SamplerVisitsEverySampleOnce) {
  // LibTorch's sampler (2.11) never draws the last two of eleven samples. With one sample and four
  // ranks, it draws indices that do not exist.
  std::set<size_t> seen;
  for (size_t epoch = 0; epoch < 50; ++epoch) {
    for (const size_t index : DrawnByLibTorch(11, 3, /*allow_duplicates=*/false, epoch)) {
      seen.insert(index);
    }
  }
  std::cout << "LibTorch, 11 samples on 3 ranks without duplicates: " << seen.size()
            << " of them seen in 50 epochs\n";
  EXPECT_EQ(seen.size(), 9u);
  const std::vector<size_t> padded = DrawnByLibTorch(1, 4, /*allow_duplicates=*/true, 0);
  std::cout << "LibTorch, 1 sample on 4 ranks with duplicates: index "
            << *std::max_element(padded.begin(), padded.end()) << " is drawn\n";
  EXPECT_GT(*std::max_element(padded.begin(), padded.end()), 0u);

  // Our sampler draws every sample once in every epoch, in an order that depends on the seed.
  for (const int64_t size : {1, 11, 12}) {
    for (uint32_t epoch = 0; epoch < 3; ++epoch) {
      std::vector<int64_t> drawn = DrawnByOurs(size, 4, 1, epoch);
      std::sort(drawn.begin(), drawn.end());
      std::vector<int64_t> all(static_cast<size_t>(size));
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(drawn, all) << size << " samples, epoch " << epoch;
    }
  }
  EXPECT_NE(DrawnByOurs(12, 2, 1, 0), DrawnByOurs(12, 2, 2, 0));
}

}  // namespace
}  // namespace ddp::testing
