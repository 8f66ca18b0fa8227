// ElasticDataLoader over datasets of LibTorch.
#include <cstdint>
#include <optional>
#include <vector>

#include <torch/data/datasets/base.h>
#include <torch/data/datasets/map.h>
#include <torch/data/example.h>
#include <torch/data/transforms/lambda.h>
#include <torch/data/transforms/stack.h>
#include <torch/data/transforms/tensor.h>
#include <torch/types.h>

#include "elastic/data/elastic_data_loader.h"
#include "elastic/data/elastic_sampler.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using torch::data::Example;

constexpr int64_t kSize = 23;

// Sample i is ([i, 2 i], i).
class Line : public torch::data::datasets::Dataset<Line> {
 public:
  Example<> get(size_t index) override {
    const auto value = static_cast<float>(index);
    return {torch::tensor({value, 2 * value}), torch::tensor(static_cast<int64_t>(index))};
  }
  std::optional<size_t> size() const override { return kSize; }
};

TEST(LibtorchDatasetTest, TransformsAndStackAsWithGetBatch) {
  auto dataset = Line()
                     .map(torch::data::transforms::Normalize<>(0.5, 2.0))
                     .map(torch::data::transforms::Stack<>());
  ElasticSampler sampler({.dataset_size = kSize, .global_batch_size = 4, .seed = 3}, 0, 1);
  ElasticDataLoader loader(dataset, sampler, {.workers = 3, .prefetch = 4});
  std::vector<int64_t> seen;
  while (const auto batch = sampler.next_batch()) {
    const std::optional<Example<>> data = loader.load(*batch);
    ASSERT_TRUE(data.has_value());
    const Example<> expected =
        dataset.get_batch(std::vector<size_t>(batch->indices.begin(), batch->indices.end()));
    EXPECT_TRUE(data->data.equal(expected.data));
    EXPECT_TRUE(data->target.equal(torch::tensor(batch->indices)));
    seen.insert(seen.end(), batch->indices.begin(), batch->indices.end());
    sampler.commit();
  }
  EXPECT_EQ(seen.size(), kSize);
}

TEST(LibtorchDatasetTest, WithoutStackABatchIsAVectorOfExamples) {
  ElasticSampler sampler({.dataset_size = kSize, .global_batch_size = 5, .shuffle = false}, 0, 1);
  ElasticDataLoader loader(Line(), sampler);
  const std::optional<std::vector<Example<>>> data = loader.load(*sampler.next_batch());
  ASSERT_TRUE(data.has_value());
  ASSERT_EQ(data->size(), 5);
  EXPECT_EQ((*data)[4].data[1].item<float>(), 8);
}

}  // namespace
}  // namespace ddp::elastic
