#include "ddp/model/nn_module_view.h"

#include <torch/torch.h>

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    scale = register_parameter("scale", torch::ones({2}));
    words = register_module("words",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true)));
    plain = register_module("plain", torch::nn::Embedding(4, 2));
    bag = register_module(
        "bag", torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(4, 2).sparse(true)));
    norm = register_module("norm",
                           torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(2).affine(false)));
  }
  torch::Tensor scale;
  torch::nn::Embedding words{nullptr}, plain{nullptr};
  torch::nn::EmbeddingBag bag{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

std::vector<std::string> NamesOf(const std::vector<NamedTensor>& items) {
  std::vector<std::string> names;
  for (const NamedTensor& item : items) names.push_back(item.name);
  return names;
}

TEST(NnModuleViewTest, ShowsTheModule) {
  Net net;
  const NnModuleView view(net.ptr());
  EXPECT_THAT(view.name(), HasSubstr("NetImpl"));
  EXPECT_THAT(NamesOf(view.parameters()),
              ElementsAre("scale", "words.weight", "plain.weight", "bag.weight"));
  EXPECT_THAT(NamesOf(view.buffers()),
              ElementsAre("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"));
  EXPECT_TRUE(view.is_training());
  net->eval();
  EXPECT_FALSE(view.is_training());
}

TEST(NnModuleViewTest, MarksSparseEmbeddings) {
  Net net;
  EXPECT_THAT(NnModuleView(net.ptr()).sparse_parameters(),
              UnorderedElementsAre(net->words->weight.unsafeGetTensorImpl(),
                                   net->bag->weight.unsafeGetTensorImpl()));
}

TEST(NnModuleViewTest, ReadsTheModuleAgain) {
  Net net;
  const NnModuleView view(net.ptr());
  EXPECT_TRUE(view.buffers()[0].tensor.is_same(net->norm->running_mean));
  net->register_buffer("late", torch::zeros({1}));
  EXPECT_EQ(view.buffers().size(), 4u);
}

}  // namespace
}  // namespace ddp::internal
