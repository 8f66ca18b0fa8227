// A model, its optimizers and a training process, for the tests of Checkpointer.
#ifndef DDP_ELASTIC_CHECKPOINT_CHECKPOINTER_FIXTURE_H_
#define DDP_ELASTIC_CHECKPOINT_CHECKPOINTER_FIXTURE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include "elastic/checkpoint/checkpointer.h"
#include "elastic/data/elastic_sampler.h"
#include "gtest/gtest.h"

namespace ddp::elastic {

// A network whose training depends on strides (a convolution in channels-last), buffers (batch
// norm) and random numbers (dropout).
struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t hidden = 6);

  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d norm;
  torch::nn::Linear fc;
  torch::nn::Linear head;
};
TORCH_MODULE(Net);

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(Net&)>;

// Make optimizers with two parameter groups of different options.
MakeOptimizer Sgd();
MakeOptimizer Adam();
MakeOptimizer AdamW();

// A training process.
class Trainer {
 public:
  explicit Trainer(const MakeOptimizer& make_optimizer, uint64_t seed = 1,
                   torch::Device device = torch::kCPU);

  void Train(int steps);

  std::vector<torch::Tensor> Values() const;  // copies on the CPU

  torch::Device device;

  Net net{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<ElasticSampler> sampler;
  TrainingState state;
};

void ExpectEqual(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b);

class CheckpointerFixture : public ::testing::Test {
 protected:
  CheckpointerFixture();

  Checkpointer::Options Options(uint64_t generation = 1) const;

  static std::string Contents(const std::string& path);

  // Returns the names in a folder, unordered, without the file system of the code under test.
  static std::vector<std::string> NamesIn(const std::string& folder);

  std::string ErrorOfSave(Checkpointer& checkpointer, const TrainingState& state);

  std::string ErrorOfRestore(TrainingState& state);

  // Checks that interrupted training gives the same bits as uninterrupted training.
  void ExpectResumesExactly(const MakeOptimizer& make_optimizer,
                            torch::Device device = torch::kCPU);

  std::string folder_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_CHECKPOINTER_FIXTURE_H_
