#include "ddp/reducer/arena/arena_allocator.h"

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules.h>

#include "ddp/comm/arena/arena.h"
#include "ddp/common/torch_versions.h"
#include "ddp/reducer/arena/gradient_block.h"

namespace ddp::internal {
namespace {

constexpr int64_t kSide = 64;
constexpr int64_t kCount = kSide * kSide;          // elements of a small gradient
constexpr size_t kBytes = kCount * sizeof(float);  // the smallest block

Arena& TheArena() { return Arena::OfProcess(); }

// Destroyed after main(): the arena and the allocator must still exist then.
at::Tensor& AliveAtExit() {
  static at::Tensor tensor;
  return tensor;
}

bool InArena(const at::Tensor& tensor) {
  return TheArena().Contains(tensor.storage().data(), tensor.storage().nbytes());
}

ArenaDemand Demand(std::vector<size_t> gradient_bytes, size_t capacity_bytes = 0) {
  auto demand = TheArena().AddDemand(
      {.gradient_bytes = std::move(gradient_bytes), .capacity_bytes = capacity_bytes});
  EXPECT_TRUE(demand.ok()) << demand.status();
  return *std::move(demand);
}

class ArenaAllocatorTest : public ::testing::Test {
 protected:
  ArenaAllocatorTest() { EXPECT_TRUE(InstallArenaAllocator()); }
};

TEST_F(ArenaAllocatorTest, ServesOnlyWhileArmedAndOnlySizesOfADemand) {
  {
    const ArmedArenaAllocator armed;
    EXPECT_FALSE(InArena(torch::empty({kCount}))) << "no demand";
  }
  const ArenaDemand demand = Demand({kBytes});
  EXPECT_FALSE(InArena(torch::empty({kCount}))) << "not armed";
  {
    const ArmedArenaAllocator armed;
    { const ArmedArenaAllocator twice; }
    const at::Tensor tensor = torch::empty({kCount});
    EXPECT_TRUE(InArena(tensor));
    EXPECT_TRUE(TheArena().BlockAt(tensor.data_ptr(), kBytes).has_value());
    EXPECT_FALSE(InArena(torch::empty({kCount + 1})));
    EXPECT_TRUE(InArena(torch::empty({kCount / 2}, torch::kFloat64)));
    const at::Tensor none = torch::empty({0});
    EXPECT_EQ(none.numel(), 0);
    EXPECT_FALSE(InArena(none));
  }
  EXPECT_FALSE(InArena(torch::empty({kCount})));
  EXPECT_EQ(TheArena().statistics().bytes_in_use, 0);
}

TEST_F(ArenaAllocatorTest, BeyondTheCapacityTheOtherAllocatorServes) {
  const ArenaDemand demand = Demand({kBytes});
  const ArmedArenaAllocator armed;
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 3; ++i) tensors.push_back(torch::full({kCount}, static_cast<float>(i)));
  EXPECT_TRUE(InArena(tensors[0]) && InArena(tensors[1]));
  EXPECT_FALSE(InArena(tensors[2]));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(tensors[i].min().item<int>(), i);
}

TEST_F(ArenaAllocatorTest, KeepsTheContractOfAnAllocator) {
  const ArenaDemand demand = Demand({kBytes});
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  ASSERT_NE(allocator.raw_deleter(), nullptr);
  for (const bool arm : {false, true}) {
    if (arm) ArmArenaAllocator();
    void* const raw = allocator.raw_allocate(kBytes);
    c10::DataPtr data = allocator.allocate(kBytes);
    std::memset(data.get(), 5, kBytes);
    const c10::DataPtr copy = allocator.clone(data.get(), kBytes);
    if (arm) DisarmArenaAllocator();
    EXPECT_EQ(TheArena().Contains(raw, kBytes), arm);
    EXPECT_EQ(TheArena().Contains(data.get(), kBytes), arm);
    EXPECT_EQ(data.get_deleter(), allocator.raw_deleter());
    EXPECT_EQ(copy.get_deleter(), allocator.raw_deleter());
    EXPECT_TRUE(allocator.is_simple_data_ptr(data));
    EXPECT_EQ(data.device(), c10::Device(c10::kCPU));
    EXPECT_EQ(std::memcmp(data.get(), copy.get(), kBytes), 0);
    allocator.raw_deallocate(raw);
  }
  int context;
  const c10::DataPtr wrapped(TheArena().base(), &context, &c10::NoDelete, c10::kCPU);
  EXPECT_FALSE(allocator.is_simple_data_ptr(wrapped));
  EXPECT_EQ(TheArena().statistics().bytes_in_use, 0);
}

TEST_F(ArenaAllocatorTest, TensorsChangeTheirStorage) {
  const ArenaDemand demand = Demand({kBytes, kBytes});
  const ArmedArenaAllocator armed;
  at::Tensor tensor = torch::arange(kCount, torch::kFloat32);
  ASSERT_TRUE(InArena(tensor));
  tensor.resize_({2 * kCount});
  EXPECT_FALSE(InArena(tensor)) << "another size";
  EXPECT_TRUE(tensor.slice(0, 0, kCount).equal(torch::arange(kCount, torch::kFloat32)));
  EXPECT_EQ(TheArena().statistics().bytes_in_use, 0);

  at::Tensor first = torch::full({kCount}, 1.0f);
  at::Tensor second = torch::full({2 * kCount}, 2.0f);
  c10::DataPtr data = first.storage().set_data_ptr(second.storage().set_data_ptr({}));
  second.storage().set_data_ptr(std::move(data));
  EXPECT_FALSE(InArena(first));
  EXPECT_EQ(TheArena().statistics().bytes_in_use, kBytes);
  second.reset();
  EXPECT_EQ(TheArena().statistics().bytes_in_use, 0);
}

TEST_F(ArenaAllocatorTest, ATensorOutlivesItsDemandAndDiesOnAnotherThread) {
  at::Tensor tensor;
  {
    const ArenaDemand demand = Demand({kBytes});
    const ArmedArenaAllocator armed;
    tensor = torch::full({kCount}, 3.0f);
    AliveAtExit() = torch::full({kCount}, 4.0f);
  }
  ASSERT_TRUE(InArena(tensor) && InArena(AliveAtExit()));
  EXPECT_EQ(tensor.sum().item<float>(), 3.0f * kCount);
  EXPECT_EQ(TheArena().statistics().bytes_touched, 2 * kBytes);
  std::thread([gone = std::move(tensor)]() mutable { gone.reset(); }).join();
  EXPECT_EQ(TheArena().statistics().bytes_touched, kBytes) << "the block was given back";
}

// Counts the memory that LibTorch's profiler is told of.
class MemoryReport : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    (bytes > 0 ? allocated : freed) += bytes;
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t allocated = 0;
  int64_t freed = 0;
};

TEST_F(ArenaAllocatorTest, TheProfilerSeesTheBlocks) {
  const ArenaDemand demand = Demand({kBytes});
  const auto report = std::make_shared<MemoryReport>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, report);
  const ArmedArenaAllocator armed;
  at::Tensor tensor = torch::empty({kCount});
  ASSERT_TRUE(InArena(tensor));
  EXPECT_EQ(report->allocated, static_cast<int64_t>(kBytes));
  tensor.reset();
  EXPECT_EQ(report->freed, -static_cast<int64_t>(kBytes));
}

TEST_F(ArenaAllocatorTest, AnAllocatorOfTheProgramStays) {
  EXPECT_TRUE(InstallArenaAllocator()) << "again";
  c10::Allocator* const ours = c10::GetCPUAllocator();
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
  EXPECT_EQ(c10::GetCPUAllocator(), c10::GetDefaultCPUAllocator()) << "the priority was not raised";
  EXPECT_FALSE(InstallArenaAllocator());
  EXPECT_EQ(c10::GetCPUAllocator(), c10::GetDefaultCPUAllocator());
  c10::SetCPUAllocator(ours);
}

// The rule of gradient_block.h
//
// Each case runs twice. The second time, each gradient that the rule allows to be reduced in place
// is overwritten with NaN inside its hook. All other values of the case must stay as the first
// time.

// The facts that a hook sees.
struct Fact {
  size_t uses = 0;  // of the gradient's storage
  bool in_place = false;
};

struct Case {
  std::vector<at::Tensor> parameters;
  std::function<void()> backward;
  // Tensors that the user keeps, filled during the backward and compared at its end.
  std::shared_ptr<std::vector<at::Tensor>> kept = {};
};

// The treatment of a gradient that the reducer must copy.
enum class Copied { kStays, kIsReplaced };

class Hook : public torch::autograd::FunctionPostHook {
 public:
  explicit Hook(std::function<void(const at::Tensor&)> hook) : hook_(std::move(hook)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    hook_(inputs.at(0));
    return outputs;
  }

 private:
  const std::function<void(const at::Tensor&)> hook_;
};

class InPlaceRuleTest : public ArenaAllocatorTest {
 protected:
  // Returns the uses and the verdict for each parameter.
  std::string Verdicts(const std::function<Case()>& make, Copied copied = Copied::kStays) {
    const std::vector<at::Tensor> expected = Run(make, copied, /*overwrite=*/false);
    const std::vector<at::Tensor> actual = Run(make, copied, /*overwrite=*/true);
    EXPECT_EQ(expected.size(), actual.size());
    for (size_t i = 0; i < expected.size() && i < actual.size(); ++i) {
      EXPECT_TRUE(expected[i].equal(actual[i])) << "value " << i << " was overwritten";
    }
    std::string verdicts;
    for (const Fact& fact : facts_) {
      if (!verdicts.empty()) verdicts += ' ';
      verdicts += std::to_string(fact.uses) + (fact.in_place ? " in place," : " copy,");
    }
    verdicts.pop_back();
    return verdicts;
  }

  // Returns the gradients as the hooks saw them, and the tensors that the user keeps.
  std::vector<at::Tensor> Run(const std::function<Case()>& make, Copied copied, bool overwrite) {
    torch::manual_seed(3);
    // The sizes of all parameters below. The capacity suffices for all intermediate results too.
    const ArenaDemand demand =
        Demand({kBytes, 2 * kBytes, 3 * kBytes, 4 * kBytes, 36 * 1024, 64 * kBytes}, 64 << 20);
    Case c = make();
    const uint64_t pass = ++passes_;
    facts_.assign(c.parameters.size(), {});
    std::vector<at::Tensor> values(c.parameters.size());
    std::vector<torch_versions::NodePtr> accumulators;
    for (size_t i = 0; i < c.parameters.size(); ++i) {
      accumulators.push_back(torch::autograd::impl::grad_accumulator(c.parameters[i]));
      accumulators.back()->add_post_hook(std::make_unique<Hook>([&, i](const at::Tensor& input) {
        const at::AutoGradMode no_grad(false);
        at::Tensor& gradient = c.parameters[i].mutable_grad();
        const auto block = SoleBlockOf(TheArena(), gradient, input);
        facts_[i] = {.uses = gradient.storage().use_count(),
                     .in_place = block.has_value() && TheArena().Claim(*block, pass)};
        values[i] = gradient.detach().clone();
        if (!facts_[i].in_place) {
          if (copied == Copied::kIsReplaced) gradient = values[i].clone();
        } else if (overwrite) {
          gradient.detach().fill_(std::numeric_limits<float>::quiet_NaN());
        }
      }));
    }
    {
      const ArmedArenaAllocator armed;
      c.backward();
    }
    // With create_graph, a parameter and its gradient own each other.
    for (at::Tensor& parameter : c.parameters) parameter.mutable_grad().reset();
    if (c.kept != nullptr) {
      for (const at::Tensor& kept : *c.kept) values.push_back(kept.detach().clone());
    }
    return values;
  }

  std::vector<Fact> facts_;
  uint64_t passes_ = 0;
};

at::Tensor Parameter(at::IntArrayRef sizes = {kSide, kSide}) {
  return torch::randn(sizes).set_requires_grad(true);
}

// A loss whose gradient depends on every element.
at::Tensor Loss(const at::Tensor& output) { return output.pow(2).sum(); }

// A backward through a layer. `output` gets the output of the layer, or of one like it.
template <typename Module>
std::function<Case()> Layer(std::function<Module()> make,
                            std::function<at::Tensor(Module&)> output) {
  return [=] {
    auto module = std::make_shared<Module>(make());
    return Case{.parameters = (*module)->parameters(),
                .backward = [=] { Loss(output(*module)).backward(); }};
  };
}

// A backward through an expression of two parameters.
std::function<Case()> Pair(std::function<at::Tensor(at::Tensor, at::Tensor)> output) {
  return [=] {
    const at::Tensor p = Parameter(), q = Parameter();
    return Case{.parameters = {p, q}, .backward = [=] { Loss(output(p, q)).backward(); }};
  };
}

// A backward in which a tensor hook keeps what `keep` returns.
std::function<Case()> Keeping(std::function<at::Tensor(at::Tensor)> keep) {
  return [=] {
    const at::Tensor p = Parameter();
    const auto kept = std::make_shared<std::vector<at::Tensor>>();
    p.register_hook([=](const at::Tensor& gradient) { kept->push_back(keep(gradient)); });
    return Case{.parameters = {p}, .backward = [=] { Loss(p * 2).backward(); }, .kept = kept};
  };
}

// A backward that adds to gradients of an earlier one.
std::function<Case()> Again(std::function<at::Tensor(at::Tensor, at::Tensor)> first) {
  return [=] {
    const at::Tensor p = Parameter(), q = Parameter();
    const at::Tensor loss = Loss(first(p, q));
    {
      const ArmedArenaAllocator armed;
      loss.backward();
    }
    return Case{.parameters = {p, q}, .backward = [=] { Loss(p.mm(q)).backward(); }};
  };
}

at::Tensor Flat(const at::Tensor& tensor) { return tensor.view({kCount}); }

TEST_F(InPlaceRuleTest, OrdinaryLayersAreReducedInPlace) {
  namespace nn = torch::nn;
  EXPECT_EQ(Verdicts(Layer<nn::Linear>([] { return nn::Linear(64, kCount); },
                                       [](auto& linear) {
                                         return linear(torch::randn({3, 64}));
                                       })),
            "3 in place, 3 in place");
  EXPECT_EQ(Verdicts(Layer<nn::Linear>(
                [] { return nn::Linear(nn::LinearOptions(64, kCount).bias(false)); },
                [](auto& linear) {
                  return linear(torch::randn({3, 64}));
                })),
            "3 in place");
  EXPECT_EQ(Verdicts(Layer<nn::Conv2d>(
                [] { return nn::Conv2d(nn::Conv2dOptions(32, 32, 3).bias(false)); },
                [](auto& conv) {
                  return conv(torch::randn({2, 32, 8, 8}));
                })),
            "2 in place");
  const auto last = at::MemoryFormat::ChannelsLast;
  EXPECT_EQ(Verdicts(Layer<nn::Conv2d>(
                [=] {
                  nn::Conv2d conv(nn::Conv2dOptions(32, 32, 3).bias(false));
                  conv->weight.set_data(conv->weight.contiguous(last));
                  return conv;
                },
                [=](auto& conv) {
                  return conv(torch::randn({2, 32, 8, 8}).contiguous(last));
                })),
            "2 in place");
  EXPECT_EQ(Verdicts(Layer<nn::Embedding>(
                [] { return nn::Embedding(512, 16); },
                [](auto& table) { return table(torch::randint(512, {40}, torch::kInt64)); })),
            "2 in place");
  EXPECT_EQ(Verdicts(Layer<nn::LayerNorm>(
                [] {
                  return nn::LayerNorm(nn::LayerNormOptions({kSide, kSide}));
                },
                [](auto& norm) {
                  return norm(torch::randn({3, kSide, kSide}));
                })),
            "2 in place, 2 in place");
  EXPECT_EQ(Verdicts(Layer<nn::BatchNorm1d>([] { return nn::BatchNorm1d(kCount); },
                                            [](auto& norm) {
                                              return norm(torch::randn({3, kCount}));
                                            })),
            "2 in place, 2 in place");
  EXPECT_EQ(Verdicts(Layer<nn::LSTM>([] { return nn::LSTM(nn::LSTMOptions(64, 64).bias(false)); },
                                     [](auto& lstm) {
                                       return std::get<0>(lstm(torch::randn({5, 2, 64})));
                                     })),
            "2 in place, 2 in place");
  EXPECT_EQ(Verdicts(Layer<nn::GRU>([] { return nn::GRU(nn::GRUOptions(64, 64).bias(false)); },
                                    [](auto& gru) {
                                      return std::get<0>(gru(torch::randn({5, 2, 64})));
                                    })),
            "3 in place, 2 in place");
  EXPECT_EQ(
      Verdicts(Layer<nn::MultiheadAttention>(
          [] { return nn::MultiheadAttention(nn::MultiheadAttentionOptions(64, 4).bias(false)); },
          [](auto& attention) {
            const at::Tensor x = torch::randn({5, 2, 64});
            return std::get<0>(attention(x, x, x));
          })),
      "3 in place, 3 in place");
}

TEST_F(InPlaceRuleTest, GradientsOfTheirOwnAreReducedInPlace) {
  EXPECT_EQ(Verdicts(Pair([](auto p, auto q) { return p.mm(p).mm(q); })), "2 in place, 2 in place");
  EXPECT_EQ(Verdicts(Pair([](auto p, auto q) { return p.t() * q.t(); })), "3 in place, 3 in place");
  EXPECT_EQ(Verdicts(Again([](auto p, auto q) { return p.mm(q); })), "1 in place, 1 in place");
  // Autograd clones each of these.
  EXPECT_EQ(Verdicts(Pair([](auto p, auto q) { return p + q; })), "1 in place, 2 in place");
  EXPECT_EQ(Verdicts(Pair([](auto p, auto q) {
              return at::cat({p, q}, 1);
            })),
            "1 in place, 1 in place");
  EXPECT_EQ(Verdicts(Pair([](auto p, auto q) { return p.sum() + q.sum(); })),
            "1 in place, 1 in place");
  EXPECT_EQ(Verdicts(Keeping([](auto gradient) { return gradient; })), "1 in place");
  EXPECT_EQ(Verdicts(Keeping([](auto gradient) { return Flat(gradient); })), "1 in place");
  EXPECT_EQ(Verdicts([] {
              const at::Tensor p = Parameter(), q = Parameter();
              return Case{.parameters = {p, q},
                          .backward = [=] { Loss(p.mm(q)).backward({}, true, true); }};
            }),
            "1 in place, 1 in place");
}

TEST_F(InPlaceRuleTest, GradientsThatOthersUseAreCopied) {
  const auto sum_of_views = [](at::Tensor p, at::Tensor q) { return Flat(p) + Flat(q); };
  EXPECT_EQ(Verdicts(Pair(sum_of_views)), "3 copy, 4 copy");
  EXPECT_EQ(Verdicts(Again(sum_of_views)), "2 copy, 2 copy");
  EXPECT_EQ(Verdicts(Pair([](auto p, auto q) { return at::cat({p, q}, 0); })), "4 copy, 4 copy");
  EXPECT_EQ(Verdicts(Pair([](auto p, auto q) { return at::stack({p, q}); })), "4 copy, 4 copy");
  EXPECT_EQ(Verdicts(Keeping([](auto gradient) { return gradient.detach(); })), "3 copy");
  EXPECT_EQ(Verdicts([] {
              const at::Tensor p = Parameter();
              const auto kept = std::make_shared<std::vector<at::Tensor>>();
              return Case{.parameters = {p},
                          .backward =
                              [=] {
                                kept->push_back(torch::randn({kCount}));
                                Flat(p).backward(kept->back());
                              },
                          .kept = kept};
            }),
            "3 copy");
}

TEST_F(InPlaceRuleTest, AnActivationsGradientIsCopiedUntilItsNodeHasRun) {
  // Autograd runs first the node that was made last.
  EXPECT_EQ(Verdicts(Pair([](auto w, auto position) {
              const at::Tensor x = w.tanh();
              return Flat(x) + Flat(position);
            })),
            "2 in place, 4 copy");
  EXPECT_EQ(Verdicts(Pair([](auto w, auto position) {
              const at::Tensor view = Flat(position);
              return w.tanh().sigmoid().view({kCount}) + view;
            })),
            "2 in place, 3 in place");
}

// A reducer that gives the parameter the copy as its gradient frees the shared storage for others.
TEST_F(InPlaceRuleTest, OnceACopyReplacesAGradientTheLastUserIsAlone) {
  EXPECT_EQ(Verdicts(Pair([](auto p, auto q) { return Flat(p) + Flat(q); }), Copied::kIsReplaced),
            "3 copy, 3 in place");
}

TEST_F(InPlaceRuleTest, LazyCopiesAndNegativeViewsAreCopied) {
  const ArenaDemand demand = Demand({kBytes, 2 * kBytes});
  const ArmedArenaAllocator armed;
  const at::Tensor gradient = torch::ones({kCount});
  const auto alone = [](const at::Tensor& tensor) {
    return SoleBlockOf(TheArena(), tensor, at::Tensor()).has_value();
  };
  EXPECT_TRUE(alone(gradient));
  EXPECT_FALSE(alone(gradient.expand({2, kCount})));
  EXPECT_FALSE(alone(gradient.slice(0, 0, kCount / 2)));
  EXPECT_FALSE(alone(torch::ones({kCount}).to_sparse()));
  EXPECT_FALSE(alone(torch::_neg_view(torch::ones({kCount}))));
  EXPECT_FALSE(alone(torch::ones({kCount}, torch::kComplexFloat).conj()));
  EXPECT_TRUE(alone(gradient)) << "the views are gone";
  const at::Tensor lazy = gradient._lazy_clone();
  EXPECT_FALSE(alone(gradient));
  EXPECT_FALSE(alone(lazy));
}

}  // namespace
}  // namespace ddp::internal
