#include "testing/oracle/models.h"

#include <torch/torch.h>

#include "ddp/activation_checkpoint.h"

namespace ddp::testing {
namespace {

namespace nn = torch::nn;
namespace functional = torch::nn::functional;
using torch::Tensor;

// Modules inside a model have no loss of their own.
struct AttentionImpl : nn::Module {
  AttentionImpl(int64_t width, int64_t heads) : heads(heads) {
    qkv = register_module("qkv", nn::Linear(width, 3 * width));
    out = register_module("out", nn::Linear(width, width));
  }
  Tensor forward(const Tensor& x) {
    const int64_t samples = x.size(0), length = x.size(1), width = x.size(2);
    const Tensor all = qkv->forward(x).view({samples, length, 3, heads, width / heads});
    const std::vector<Tensor> parts = all.permute({2, 0, 3, 1, 4}).unbind(0);
    const Tensor weights =
        torch::softmax(torch::matmul(parts[0], parts[1].transpose(-2, -1)) * 0.5, -1);
    const Tensor mixed = torch::matmul(weights, parts[2]).transpose(1, 2);
    return out->forward(mixed.reshape({samples, length, width}));
  }
  const int64_t heads;
  nn::Linear qkv{nullptr}, out{nullptr};
};
TORCH_MODULE(Attention);

struct BlockImpl : nn::Module {
  BlockImpl(int64_t width, int64_t heads) {
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})));
    attention = register_module("attention", Attention(width, heads));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})));
    fc1 = register_module("fc1", nn::Linear(width, 2 * width));
    fc2 = register_module("fc2", nn::Linear(2 * width, width));
  }
  Tensor forward(const Tensor& input) {
    const Tensor x = input + attention->forward(norm1->forward(input));
    return x + fc2->forward(torch::gelu(fc1->forward(norm2->forward(x))));
  }
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  Attention attention{nullptr};
  nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Block);

struct SegmentImpl : nn::Module {
  SegmentImpl() { fc = register_module("fc", nn::Linear(8, 8)); }
  Tensor forward(const Tensor& x) { return torch::tanh(fc->forward(x)); }
  nn::Linear fc{nullptr};
};
TORCH_MODULE(Segment);

class Mlp : public OracleModel {
 public:
  Mlp() {
    fc1_ = register_module("fc1", nn::Linear(8, 16));
    fc2_ = register_module("fc2", nn::Linear(16, 16));
    fc3_ = register_module("fc3", nn::Linear(16, 4));
  }
  Tensor forward(const Tensor& x, int rank, int step) override {
    const Tensor hidden = torch::relu(fc1_->forward(x));
    return fc3_->forward(torch::tanh(fc2_->forward(hidden)));
  }
  Tensor Loss(const Tensor& outputs, const Tensor& y) const override {
    return functional::mse_loss(outputs, y);
  }

 private:
  nn::Linear fc1_{nullptr}, fc2_{nullptr}, fc3_{nullptr};
};

class ConvNet : public OracleModel {
 public:
  ConvNet() {
    conv1_ = register_module("conv1", nn::Conv2d(nn::Conv2dOptions(1, 4, 3).padding(1)));
    norm1_ = register_module("norm1", nn::BatchNorm2d(4));
    conv2_ = register_module("conv2", nn::Conv2d(nn::Conv2dOptions(4, 6, 3)));
    norm2_ = register_module("norm2", nn::BatchNorm2d(6));
    fc_ = register_module("fc", nn::Linear(24, 5));
  }
  Tensor forward(const Tensor& input, int rank, int step) override {
    Tensor x = torch::max_pool2d(torch::relu(norm1_->forward(conv1_->forward(input))), 2);
    x = torch::relu(norm2_->forward(conv2_->forward(x)));
    return fc_->forward(x.flatten(1));
  }
  Tensor Loss(const Tensor& outputs, const Tensor& y) const override {
    return functional::cross_entropy(outputs, y);
  }

 private:
  nn::Conv2d conv1_{nullptr}, conv2_{nullptr};
  nn::BatchNorm2d norm1_{nullptr}, norm2_{nullptr};
  nn::Linear fc_{nullptr};
};

class Transformer : public OracleModel {
 public:
  Transformer() {
    position_ = register_parameter("position", torch::zeros({6, 8}));
    embed_ = register_module("embed", nn::Embedding(12, 8));
    block1_ = register_module("block1", Block(8, 2));
    block2_ = register_module("block2", Block(8, 2));
    norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({8})));
  }
  Tensor forward(const Tensor& input, int rank, int step) override {
    const Tensor x = embed_->forward(input) + position_;
    return functional::linear(norm_->forward(block2_->forward(block1_->forward(x))),
                              embed_->weight);
  }
  Tensor Loss(const Tensor& outputs, const Tensor& y) const override {
    return functional::cross_entropy(outputs.flatten(0, 1), y.flatten());
  }

 private:
  Tensor position_;
  nn::Embedding embed_{nullptr};
  Block block1_{nullptr}, block2_{nullptr};
  nn::LayerNorm norm_{nullptr};
};

class SparseEmbedding : public OracleModel {
 public:
  SparseEmbedding() {
    embed_ = register_module("embed", nn::Embedding(nn::EmbeddingOptions(20, 6).sparse(true)));
    fc_ = register_module("fc", nn::Linear(6, 3));
  }
  Tensor forward(const Tensor& x, int rank, int step) override {
    return fc_->forward(torch::tanh(embed_->forward(x).mean(1)));
  }
  Tensor Loss(const Tensor& outputs, const Tensor& y) const override {
    return functional::mse_loss(outputs, y);
  }

 private:
  nn::Embedding embed_{nullptr};
  nn::Linear fc_{nullptr};
};

class Branches : public OracleModel {
 public:
  Branches() {
    trunk_ = register_module("trunk", nn::Linear(6, 8));
    left_ = register_module("left", nn::Linear(8, 8));
    right_ = register_module("right", nn::Linear(8, 8));
    never_ = register_module("never", nn::Linear(8, 8));
    head_ = register_module("head", nn::Linear(8, 3));
  }
  Tensor forward(const Tensor& input, int rank, int step) override {
    Tensor x = torch::tanh(trunk_->forward(input));
    if (rank == 0) x = x + torch::tanh(left_->forward(x));
    if (step % 2 == 1) x = x + torch::tanh(right_->forward(x));
    return head_->forward(x);
  }
  Tensor Loss(const Tensor& outputs, const Tensor& y) const override {
    return functional::mse_loss(outputs, y);
  }

 private:
  nn::Linear trunk_{nullptr}, left_{nullptr}, right_{nullptr}, never_{nullptr}, head_{nullptr};
};

class Checkpointed : public OracleModel {
 public:
  Checkpointed() {
    first_ = register_module("first", nn::Linear(6, 8));
    segment_ = register_module("segment", Segment());
    spare_ = register_module("spare", nn::Linear(8, 8));
    last_ = register_module("last", nn::Linear(8, 3));
  }
  Tensor forward(const Tensor& input, int rank, int step) override {
    const CheckpointOptions reentrant{.use_reentrant = true};
    Tensor x = torch::tanh(first_->forward(input));
    x = checkpoint(reentrant, segment_, x);
    x = checkpoint(reentrant, segment_, x);
    return last_->forward(x);
  }
  Tensor Loss(const Tensor& outputs, const Tensor& y) const override {
    return functional::mse_loss(outputs, y);
  }

 private:
  nn::Linear first_{nullptr}, spare_{nullptr}, last_{nullptr};
  Segment segment_{nullptr};
};

class Wide : public OracleModel {
 public:
  Wide() {
    layers_ = register_module("layers", nn::ModuleList());
    for (int layer = 0; layer < 8; ++layer) layers_->push_back(nn::Linear(300, 300));
    torch::NoGradGuard no_grad;
    for (Tensor& parameter : parameters()) parameter.zero_();
  }
  Tensor forward(const Tensor& input, int rank, int step) override {
    Tensor x = input.expand({-1, 300});
    for (size_t layer = 0; layer < layers_->size(); ++layer) {
      x = layers_->at<nn::LinearImpl>(layer).forward(x);
    }
    return x;
  }
  Tensor Loss(const Tensor& outputs, const Tensor& y) const override { return outputs.sum(); }

 private:
  nn::ModuleList layers_{nullptr};
};

}  // namespace

std::shared_ptr<OracleModel> MakeOracleModel(const std::string& name) {
  if (name == "mlp") return std::make_shared<Mlp>();
  if (name == "conv") return std::make_shared<ConvNet>();
  if (name == "transformer") return std::make_shared<Transformer>();
  if (name == "embedding") return std::make_shared<SparseEmbedding>();
  if (name == "branches") return std::make_shared<Branches>();
  if (name == "checkpointed") return std::make_shared<Checkpointed>();
  if (name == "wide") return std::make_shared<Wide>();
  return nullptr;
}

}  // namespace ddp::testing
