// Length: both kinds of checkpoint pass the same cases, over the same models.
#include "ddp/activation_checkpoint.h"

#include <torch/torch.h>

#include <ATen/autocast_mode.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "ddp/common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    first = register_module("first", torch::nn::Linear(6, 12));
    last = register_module("last", torch::nn::Linear(12, 6));
    dropout = register_module("dropout", torch::nn::Dropout(0.5));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    ++calls;
    const torch::Tensor hidden = torch::tanh(first->forward(x));
    activation = hidden.storage().getWeakStorageImpl();
    return last->forward(dropout->forward(hidden)) + x;
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::Dropout dropout{nullptr};
  int calls = 0;
  std::optional<Weak> activation;  // of the newest call
};
TORCH_MODULE(Block);

std::string MessageOf(const std::function<void()>& run) {
  try {
    run();
  } catch (const ConfigurationError& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

// Returns the gradients of the input and of the modules' parameters after a backward of `run`.
std::vector<torch::Tensor> Gradients(const std::vector<Block>& blocks,
                                     const std::function<torch::Tensor(torch::Tensor)>& run) {
  torch::manual_seed(1);
  torch::Tensor x = torch::randn({4, 6}, torch::requires_grad());
  for (Block block : blocks) block->zero_grad();
  run(x * 2).pow(2).sum().backward();
  std::vector<torch::Tensor> gradients = {x.grad()};
  for (const Block& block : blocks) {
    for (const torch::Tensor& parameter : block->parameters()) {
      gradients.push_back(parameter.grad().clone());
    }
  }
  gradients.push_back(torch::rand({3}));  // shows that the generator advanced equally
  return gradients;
}

void ExpectSame(const std::vector<torch::Tensor>& actual,
                const std::vector<torch::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << i;
    if (actual[i].defined()) {
      EXPECT_TRUE(torch::equal(actual[i], expected[i])) << i;
    }
  }
}

class CheckpointTest : public ::testing::TestWithParam<bool> {
 protected:
  CheckpointTest() { torch::manual_seed(7); }
  const CheckpointOptions options_{.use_reentrant = GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Kinds, CheckpointTest, ::testing::Bool(), [](const auto& info) {
  return info.param ? "Reentrant" : "NotReentrant";
});

TEST_P(CheckpointTest, GivesTheGradientsOfTheSegmentToTheBit) {
  Block a, b;  // with dropout
  const auto expected = Gradients({a, b}, [&](auto x) { return b->forward(a->forward(x)); });
  const auto actual = Gradients(
      {a, b}, [&](auto x) { return checkpoint(options_, b, checkpoint(options_, a.ptr(), x)); });
  ExpectSame(actual, expected);
  EXPECT_EQ(a->calls, 3);
}

TEST_P(CheckpointTest, KeepsNoActivation) {
  Block block;
  const torch::Tensor x = torch::randn({4, 6}, torch::requires_grad());
  torch::Tensor y = block->forward(x);
  EXPECT_FALSE(block->activation->expired());
  y = checkpoint(options_, block, x);
  EXPECT_TRUE(block->activation->expired());
  EXPECT_TRUE(y.requires_grad());
  y.sum().backward();
  EXPECT_TRUE(block->activation->expired());

  // The graph releases the input after the backward, as for any operation.
  torch::Tensor input = x * 2;
  const Weak weak_input = input.storage().getWeakStorageImpl();
  y = checkpoint(options_, block, input);
  input.reset();
  EXPECT_FALSE(weak_input.expired());
  y.sum().backward();
  EXPECT_TRUE(weak_input.expired());
}

TEST_P(CheckpointTest, NestsAndRepeats) {
  Block a, b;
  const auto plain = [&](torch::Tensor x) {
    return a->forward(b->forward(a->forward(a->forward(x))));
  };
  const auto checkpointed = [&](torch::Tensor x) {
    x = checkpoint(options_, a, x);
    const CheckpointOptions outer{.use_reentrant = GetParam(), .parameters = [&] {
                                    auto both = a->parameters();
                                    for (const auto& p : b->parameters()) both.push_back(p);
                                    return both;
                                  }()};
    x = checkpoint(
        outer,
        [this, a, b](const torch::Tensor& h) {
          return checkpoint(options_, b, checkpoint(options_, a, h));
        },
        x);
    return checkpoint(options_, a, x);
  };
  const auto expected = Gradients({a, b}, plain);
  const auto actual = Gradients({a, b}, checkpointed);
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    // The three gradients of a's parameters may be added in another order.
    EXPECT_TRUE(torch::allclose(actual[i], expected[i], 1e-5, 1e-6)) << i;
  }
}

TEST_P(CheckpointTest, TakesAndReturnsMoreThanATensor) {
  struct Result {
    std::map<std::string, torch::Tensor> named;
    std::vector<torch::Tensor> list;
    int rows;
  };
  const auto segment = [](const std::vector<torch::Tensor>& xs, double factor,
                          const std::optional<torch::Tensor>& extra,
                          const torch::Tensor& undefined) {
    EXPECT_FALSE(undefined.defined());
    const torch::Tensor product = xs[0] * xs[1] * factor;
    const torch::Tensor index = product.argmax(1);
    return Result{{{"product", product}, {"again", product}, {"index", index}},
                  {extra ? xs[0] + *extra : xs[0], torch::Tensor(), xs[0]},
                  static_cast<int>(product.size(0))};
  };
  const auto run = [&](bool with_checkpoint, bool with_extra) {
    torch::manual_seed(3);
    const torch::Tensor a = torch::randn({3, 2}, torch::requires_grad());
    const torch::Tensor b = torch::randn({3, 2}, torch::requires_grad());
    std::optional<torch::Tensor> extra;
    if (with_extra) extra = torch::ones({3, 2});
    const std::vector<torch::Tensor> xs = {a, b};
    const Result result = with_checkpoint
                              ? checkpoint(options_, segment, xs, 1.5, extra, torch::Tensor())
                              : segment(xs, 1.5, extra, torch::Tensor());
    EXPECT_EQ(result.rows, 3);
    EXPECT_FALSE(result.named.at("index").requires_grad());
    EXPECT_EQ(result.named.at("index").scalar_type(), torch::kLong);
    EXPECT_FALSE(result.list[1].defined());
    (result.named.at("product") * result.list[0] + result.named.at("again") + result.list[2])
        .sum()
        .backward();
    return std::vector<torch::Tensor>{a.grad(), b.grad()};
  };
  ExpectSame(run(true, true), run(false, true));
  ExpectSame(run(true, false), run(false, false));
}

TEST_P(CheckpointTest, RunsTheModulesOfLibTorch) {
  torch::nn::Sequential sequential(torch::nn::Linear(6, 6), torch::nn::ReLU());
  torch::nn::LSTM lstm(6, 4);
  torch::nn::Embedding words(torch::nn::EmbeddingOptions(5, 6).sparse(true));
  const torch::Tensor indices = torch::tensor({1, 3, 1});
  const auto run = [&](bool with_checkpoint) {
    for (torch::Tensor parameter : sequential->parameters()) parameter.mutable_grad().reset();
    for (torch::Tensor parameter : lstm->parameters()) parameter.mutable_grad().reset();
    words->weight.mutable_grad().reset();
    const torch::Tensor scale = torch::ones({}, torch::requires_grad());
    auto look_up = [words](const torch::Tensor& which, const torch::Tensor& factor) mutable {
      return words->forward(which) * factor;
    };
    const CheckpointOptions options{.use_reentrant = GetParam(), .parameters = {words->weight}};
    torch::Tensor x =
        with_checkpoint ? checkpoint(options, look_up, indices, scale) : look_up(indices, scale);
    x = with_checkpoint ? checkpoint(options_, sequential, x) : sequential->forward(x);
    const auto [y, state] = with_checkpoint ? checkpoint(options_, lstm, x.unsqueeze(1))
                                            : lstm->forward(x.unsqueeze(1));
    (y.sum() + std::get<1>(state).sum()).backward();
    EXPECT_TRUE(words->weight.grad().is_sparse());
    std::vector<torch::Tensor> gradients = {words->weight.grad().to_dense(), scale.grad()};
    for (const torch::Tensor& parameter : sequential->parameters()) {
      gradients.push_back(parameter.grad().clone());
    }
    for (const torch::Tensor& parameter : lstm->parameters()) {
      gradients.push_back(parameter.grad().clone());
    }
    return gradients;
  };
  const auto expected = run(false);
  ExpectSame(run(true), expected);
}

TEST_P(CheckpointTest, OneOfTheOutputsMayGoUnused) {
  const auto segment = [](const torch::Tensor& x) { return std::tuple(x * 2, x * 3); };
  const torch::Tensor x = torch::ones({2}, torch::requires_grad());
  const auto [two, three] = checkpoint(options_, segment, x);
  three.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({2}, 3.0)));
}

TEST_P(CheckpointTest, KeepsTheGraphWhenAsked) {
  Block block;
  block->eval();  // no dropout
  const torch::Tensor x = torch::randn({4, 6}, torch::requires_grad());
  const torch::Tensor loss = checkpoint(options_, block, x).sum();
  loss.backward({}, /*retain_graph=*/true);
  const torch::Tensor once = block->first->weight.grad().clone();
  loss.backward();
  EXPECT_TRUE(torch::equal(block->first->weight.grad(), once * 2));
  EXPECT_THROW(loss.backward(), c10::Error);  // freed
}

TEST_P(CheckpointTest, JustCallsWhenNothingIsRecorded) {
  Block block;
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(checkpoint(options_, block, torch::randn({4, 6})).requires_grad());
  }
  EXPECT_EQ(block->calls, 1);
}

TEST_P(CheckpointTest, RecomputesUnderTheAutocastOfTheForward) {
  Block block;
  block->eval();
  std::vector<torch::ScalarType> types;
  const auto segment = [&types, block](const torch::Tensor& x) mutable {
    const torch::Tensor y = block->forward(x);
    types.push_back(block->first->forward(x).scalar_type());
    return y;
  };
  const CheckpointOptions options{.use_reentrant = GetParam(), .parameters = block->parameters()};
  const auto run = [&](const std::function<torch::Tensor(torch::Tensor)>& function) {
    torch::manual_seed(5);
    block->zero_grad();
    const torch::Tensor x = torch::randn({4, 6}, torch::requires_grad());
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const torch::Tensor y = function(x);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    y.sum().backward();
    return std::vector<torch::Tensor>{x.grad(), block->first->weight.grad()};
  };
  const auto expected = run([&](torch::Tensor x) { return block->forward(x); });
  const auto actual = run([&](torch::Tensor x) { return checkpoint(options, segment, x); });
  EXPECT_EQ(types, std::vector<torch::ScalarType>({torch::kBFloat16, torch::kBFloat16}));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  ExpectSame(actual, expected);
}

TEST_P(CheckpointTest, WithoutItsStateTheGeneratorGoesOn) {
  const auto segment = [](const torch::Tensor& x) { return x * torch::rand({}).item<double>(); };
  const auto gradient = [&](bool preserve) {
    torch::manual_seed(11);
    const torch::Tensor x = torch::ones({}, torch::requires_grad());
    const torch::Tensor y =
        checkpoint({.use_reentrant = GetParam(), .preserve_rng_state = preserve}, segment, x);
    y.backward();
    return x.grad().item<double>() - y.item<double>();
  };
  EXPECT_EQ(gradient(true), 0);
  EXPECT_NE(gradient(false), 0);
}

// A loader, say, that draws from the process's generator all the time.
class Drawer {
 public:
  ~Drawer() { Stop(); }
  // Returns when the thread has drawn again.
  void Await() const {
    const int64_t before = count_;
    while (count_ < before + 2) std::this_thread::yield();
  }
  // Stops, and returns true when each number came once.
  bool EachNumberOnce() {
    Stop();
    return std::set<int64_t>(drawn_.begin(), drawn_.end()).size() == drawn_.size();
  }

 private:
  void Stop() {
    end_ = true;
    if (thread_.joinable()) thread_.join();
  }

  std::atomic<bool> end_{false};
  std::atomic<int64_t> count_{0};
  std::vector<int64_t> drawn_;  // 63 bits each
  std::thread thread_{[this] {
    for (; !end_; ++count_) {
      drawn_.push_back(torch::empty({1}, torch::kLong).random_().item<int64_t>());
    }
  }};
};

TEST_P(CheckpointTest, DrawsTheSameNumbersWhileAnotherThreadDraws) {
  Drawer drawer;
  std::vector<torch::Tensor> masks;
  const auto segment = [&](const torch::Tensor& h) {
    const torch::Tensor mask = torch::dropout(torch::ones_like(h), 0.5, /*train=*/true);
    drawer.Await();
    const torch::Tensor noise = torch::randn_like(h) + torch::rand(h.sizes());
    masks.push_back((mask * noise).detach());
    drawer.Await();
    return h * mask * noise;
  };
  const auto inner = [&](const torch::Tensor& h) { return checkpoint(options_, segment, h); };
  for (int step = 0; step < 20; ++step) {
    masks.clear();
    const torch::Tensor x = torch::ones({64, 64}, torch::requires_grad());
    checkpoint(options_, segment, x).sum().backward();
    ASSERT_EQ(masks.size(), 2U);
    EXPECT_TRUE(torch::equal(masks[0], masks[1]));
    EXPECT_TRUE(torch::equal(x.grad(), masks[0]));
    checkpoint(options_, inner, x * 1).sum().backward();
    ASSERT_EQ(masks.size(), 5U);  // the segment in `inner` is recomputed twice
    EXPECT_TRUE(torch::equal(masks[2], masks[3]));
    EXPECT_TRUE(torch::equal(masks[2], masks[4]));
    EXPECT_TRUE(torch::allclose(x.grad(), masks[0] + masks[2]));
  }
  EXPECT_TRUE(drawer.EachNumberOnce());
}

// A traced graph would keep the generator of the recording, and draw the same numbers for ever.
TEST_P(CheckpointTest, ATraceKeepsNoGenerator) {
  const auto segment = [](const torch::Tensor& h) { return h * torch::bernoulli(h.detach()); };
  const torch::jit::Stack inputs = {torch::ones({8}, torch::requires_grad())};
  const auto run = [&](torch::jit::Stack stack) -> torch::jit::Stack {
    return {checkpoint(options_, segment, stack[0].toTensor())};
  };
  const auto traced = torch::jit::tracer::trace(
      inputs, run, [](const torch::autograd::Variable&) { return ""; }, /*strict=*/true);
  const std::string graph = traced.first->graph->toString();
  EXPECT_THAT(graph, HasSubstr("aten::bernoulli"));
  EXPECT_THAT(graph, Not(HasSubstr("Generator")));
  const torch::Tensor drawn = traced.second[0].toTensor();  // x * mask, at ones
  drawn.sum().backward();
  EXPECT_TRUE(torch::equal(inputs[0].toTensor().grad(), drawn.detach()));
}

TEST_P(CheckpointTest, TheDefaultGeneratorMayBeNamed) {
  const torch::Tensor x = torch::ones({64}, torch::requires_grad());
  const auto segment = [](const torch::Tensor& h) {
    return h * torch::bernoulli(h.detach() / 2, at::detail::getDefaultCPUGenerator());
  };
  const torch::Tensor drawn = checkpoint(options_, segment, x);
  torch::rand({3});
  drawn.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), drawn.detach()));
}

TEST_P(CheckpointTest, ARecomputationThatDrawsMoreIsRefused) {
  const torch::Tensor x = torch::ones({4}, torch::requires_grad());
  int calls = 0;
  const auto segment = [&calls](const torch::Tensor& h) {
    return ++calls == 1 ? h * 2 : h * torch::bernoulli(h.detach());
  };
  const torch::Tensor y = checkpoint(options_, segment, x);
  EXPECT_THAT(MessageOf([&] { y.sum().backward(); }),
              HasSubstr("more random numbers are drawn again than were recorded"));
}

TEST_P(CheckpointTest, RefusesWhatItCouldNotRepeat) {
  const torch::Tensor x = torch::ones({2, 3}, torch::requires_grad());
  EXPECT_THAT(MessageOf([&] {
                checkpoint(
                    options_, [](torch::Tensor h) { return h.mul_(2); }, x * 1);
              }),
              AllOf(HasSubstr("input 0, Float[2, 3], in place"), HasSubstr("clone")));
  int calls = 0;
  const torch::Tensor y = checkpoint(
      options_, [&calls](const torch::Tensor& h) { return ++calls == 1 ? h * 2 : h.sum(); }, x);
  EXPECT_THAT(MessageOf([&] { y.sum().backward(); }),
              AllOf(HasSubstr("returned Float[]"), HasSubstr("Float[2, 3] in the forward")));
}

// --- Non-reentrant only.

TEST(NotReentrantCheckpointTest, AParametersGradientComesOnceAndItsHooksRunOnce) {
  Block block;
  block->eval();
  int hooks = 0;
  int accumulations = 0;
  block->first->weight.register_hook([&](const torch::Tensor&) { ++hooks; });
  const auto accumulator = torch::autograd::impl::grad_accumulator(block->first->weight);
  struct Counter : torch::autograd::FunctionPostHook {
    explicit Counter(int* count) : count(count) {}
    torch::autograd::variable_list operator()(
        const torch::autograd::variable_list& outputs,
        const torch::autograd::variable_list& inputs) override {
      ++*count;
      return outputs;
    }
    int* count;
  };
  accumulator->add_post_hook(std::make_unique<Counter>(&accumulations));
  int input_hooks = 0;
  const torch::Tensor x = torch::randn({4, 6}, torch::requires_grad()) * 2;
  x.register_hook([&](const torch::Tensor&) { ++input_hooks; });
  checkpoint(block, checkpoint(block, x)).sum().backward();
  EXPECT_EQ(hooks, 1);
  EXPECT_EQ(accumulations, 1);
  EXPECT_EQ(input_hooks, 1);
  EXPECT_EQ(torch::autograd::impl::grad_accumulator(block->first->weight), accumulator);
}

TEST(NotReentrantCheckpointTest, NeedsNoInputWithGradient) {
  Block block;
  block->eval();
  const torch::Tensor x = torch::randn({4, 6});
  block->forward(x).sum().backward();
  const torch::Tensor expected = block->first->weight.grad().clone();
  block->zero_grad();
  checkpoint(block, x).sum().backward();
  EXPECT_TRUE(torch::equal(block->first->weight.grad(), expected));
}

TEST(NotReentrantCheckpointTest, AnUnusedParameterKeepsNoGradient) {
  const torch::Tensor used = torch::ones({2}, torch::requires_grad());
  const torch::Tensor unused = torch::ones({2}, torch::requires_grad());
  checkpoint(
      {.parameters = {used, unused}}, [used](const torch::Tensor& x) { return x * used; },
      torch::ones({2}))
      .sum()
      .backward();
  EXPECT_TRUE(used.grad().defined());
  EXPECT_FALSE(unused.grad().defined());
}

TEST(NotReentrantCheckpointTest, FindsATensorThatWasNotNamed) {
  const torch::Tensor w = torch::ones({2, 5}, torch::requires_grad());
  const auto segment = [w](const torch::Tensor& x) { return x * w; };
  const torch::Tensor x = torch::ones({2, 5}, torch::requires_grad());
  const torch::Tensor y = checkpoint(segment, x);
  EXPECT_THAT(MessageOf([&] { y.sum().backward(); }),
              AllOf(HasSubstr("Float[2, 5]"), HasSubstr("CheckpointOptions::parameters")));
  const torch::Tensor computed = w * 2;
  EXPECT_THAT(MessageOf([&] { checkpoint({.parameters = {computed}}, segment, x); }),
              HasSubstr("computed from others"));
}

TEST(NotReentrantCheckpointTest, WorksWithGradAndHasSecondDerivatives) {
  const torch::Tensor w = torch::full({3}, 0.5, torch::requires_grad());
  const torch::Tensor x = torch::full({3}, 2.0, torch::requires_grad());
  const auto segment = [w](const torch::Tensor& h) { return (h * w).pow(3); };
  const auto run = [&](const torch::Tensor& y) {
    const auto first = torch::autograd::grad({y.sum()}, {x, w}, {}, std::nullopt,
                                             /*create_graph=*/true);
    const auto second = torch::autograd::grad({(first[0] * first[1]).sum()}, {x, w});
    return std::vector<torch::Tensor>{first[0], first[1], second[0], second[1]};
  };
  const auto expected = run(segment(x * 1));
  const auto actual = run(checkpoint({.parameters = {w}}, segment, x * 1));
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::allclose(actual[i], expected[i])) << i;
  }
  EXPECT_FALSE(w.grad().defined());
}

// --- Reentrant only.

TEST(ReentrantCheckpointTest, SaysWhatItDoesNotDo) {
  Block block;
  EXPECT_THAT(MessageOf([&] {
                checkpoint({.use_reentrant = true}, block, torch::randn({4, 6}));
              }),
              AllOf(HasSubstr("no input"), HasSubstr("use_reentrant to false")));
  const torch::Tensor x = torch::randn({4, 6}, torch::requires_grad());
  torch::Tensor y = checkpoint({.use_reentrant = true}, block, x).sum();
  EXPECT_THAT(MessageOf([&] { torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true); }),
              HasSubstr("backward() alone"));
  EXPECT_THAT(MessageOf([&] { y.backward({}, std::nullopt, /*create_graph=*/true); }),
              HasSubstr("no second derivatives"));
}

TEST(ReentrantCheckpointTest, ReachesWhatTheFunctionCaptured) {
  const torch::Tensor w = torch::full({2}, 3.0, torch::requires_grad());
  const torch::Tensor x = torch::ones({2}, torch::requires_grad());
  checkpoint(
      {.use_reentrant = true}, [w](const torch::Tensor& h) { return h * w; }, x)
      .sum()
      .backward();
  EXPECT_TRUE(torch::equal(w.grad(), torch::ones({2})));
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({2}, 3.0)));
}

}  // namespace
}  // namespace ddp
