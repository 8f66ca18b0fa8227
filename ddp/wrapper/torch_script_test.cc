// Tests DistributedDataParallel over TorchScript modules on real processes. The modules are built
// in C++, written to a file and loaded from there.
//
// Length: one case for each promise of the wrapper, and the modules in TorchScript that they need.
#include "ddp/torch_script.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <map>

#include "ddp/ddp.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"
#include "testing/temporary_folder.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::Flatten;
using ::ddp::testing::SameOnAllRanks;
using ::ddp::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using JitModule = torch::jit::Module;
using Units = std::shared_ptr<torch::jit::CompilationUnit>;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(4, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    last = register_module("last", torch::nn::Linear(8, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last->forward(torch::relu(norm->forward(first->forward(x))));
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

// Returns a TorchScript module with the tensors of `module` and of its submodules, under the same
// names. `forward` is the code of its forward.
JitModule Scripted(const torch::nn::Module& module, const std::string& forward,
                   const Units& unit = std::make_shared<torch::jit::CompilationUnit>()) {
  JitModule scripted("Net", unit, /*shouldMangle=*/true);
  scripted.register_attribute("training", c10::BoolType::get(), true);
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    scripted.register_parameter(item.key(), item.value().detach().clone().requires_grad_(), false);
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    scripted.register_buffer(item.key(), item.value().clone());
  }
  for (const auto& item : module.named_children()) {
    scripted.register_module(item.key(), Scripted(*item.value(), "", unit));
  }
  if (!forward.empty()) scripted.define(forward);
  return scripted;
}

// Writes the module to a file and loads it.
JitModule Reloaded(const JitModule& module) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/model.pt";
  module.save(path);
  return torch::jit::load(path);
}

constexpr char kNetForward[] = R"(
def forward(self, x):
    x = torch.linear(x, self.first.weight, self.first.bias)
    norm = self.norm
    if self.training:
        norm.num_batches_tracked.add_(1)
    x = torch.batch_norm(x, norm.weight, norm.bias, norm.running_mean, norm.running_var,
                         self.training, 0.1, 1e-5, True)
    return torch.linear(torch.relu(x), self.last.weight, self.last.bias)
)";

torch::Tensor Batch(int rank, int64_t step) {
  torch::manual_seed(1000 * step + rank);
  return torch::randn({5, 4});
}

// Returns the gradients of `parameters`; an undefined gradient counts as zero.
torch::Tensor GradientsOf(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> gradients;
  for (const torch::Tensor& parameter : parameters) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad()
                                                   : torch::zeros_like(parameter));
  }
  return Flatten(gradients);
}

torch::Tensor BuffersOf(const DistributedDataParallel<JitModule>& model) {
  std::vector<torch::Tensor> buffers;
  for (const torch::Tensor& buffer : model.buffers()) buffers.push_back(buffer);
  return Flatten(buffers);
}

// Returns the average over the ranks of the gradients that `backward(bare module, rank)` makes.
template <typename Backward>
torch::Tensor ExpectedGradients(const JitModule& module, int ranks, const Backward& backward) {
  JitModule alone = Reloaded(module);  // a deepcopy() would be part of the module's graph
  std::vector<torch::Tensor> parameters;
  for (const torch::Tensor& parameter : alone.parameters()) parameters.push_back(parameter);
  for (int rank = 0; rank < ranks; ++rank) backward(alone, rank);
  return GradientsOf(parameters) / ranks;
}

// The example of docs/parity.md.
void Train(const std::shared_ptr<ProcessGroup>& group, const std::string& from,
           const std::string& to) {
  ddp::DistributedDataParallel model(torch::jit::load(from), group);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    const torch::Tensor output = model(Batch(group->rank(), step)).toTensor();
    output.pow(2).mean().backward();
    optimizer.step();
  }
  if (group->rank() == 0) model->save(to);
}

RANK_TEST(TorchScriptTest, TrainsTheModelOfAFile, 2) {
  const auto group = init_process_group();
  const TemporaryFolder folder;
  const std::string from = folder.path() + "/model.pt", to = folder.path() + "/trained.pt";
  torch::manual_seed(1);
  const JitModule before = Scripted(*Net(), kNetForward);
  before.save(from);
  Train(group, from, to);
  if (group->rank() != 0) return;
  torch::jit::Module trained = torch::jit::load(to);
  const auto loss_of = [](JitModule module) {
    return module.forward({Batch(0, 0)}).toTensor().pow(2).mean().item<double>();
  };
  EXPECT_LT(loss_of(trained), 0.9 * loss_of(before));
}

RANK_TEST(TorchScriptTest, TrainsAsTheModuleWrittenInCpp, 2) {
  const auto group = init_process_group();
  for (const bool optimize : {false, true}) {
    // The optimizer of TorchScript has formulas of its own for some derivatives.
    torch::jit::setGraphExecutorOptimize(optimize);
    torch::manual_seed(7);
    Net net;
    const JitModule scripted = Scripted(*net, kNetForward);
    DistributedDataParallelOptions options{.bucket_cap_mb = 1e-4, .gradient_as_bucket_view = true};
    DistributedDataParallel wrapped(net, group, options);
    DistributedDataParallel<JitModule> model(Reloaded(scripted), group, options);
    torch::optim::SGD net_optimizer(wrapped->parameters(), 0.1);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int64_t step = 0; step < 5; ++step) {
      net_optimizer.zero_grad();
      optimizer.zero_grad();
      wrapped.forward(Batch(group->rank(), step)).pow(2).mean().backward();
      model(Batch(group->rank(), step)).toTensor().pow(2).mean().backward();
      const torch::Tensor gradients = GradientsOf(model->parameters());
      EXPECT_TRUE(SameOnAllRanks(*group, gradients)) << "step " << step;
      const torch::Tensor expected = GradientsOf(net->parameters());
      if (optimize) {
        EXPECT_TRUE(torch::allclose(gradients, expected, 1e-5, 1e-6)) << "step " << step;
      } else {
        EXPECT_TRUE(torch::equal(gradients, expected)) << "step " << step;
        EXPECT_TRUE(torch::equal(BuffersOf(model), Flatten(net->buffers()))) << "step " << step;
      }
      net_optimizer.step();
      optimizer.step();
    }
    EXPECT_EQ(model.bucket_layout(), wrapped.bucket_layout());
  }
}

RANK_TEST(TorchScriptTest, StartsAndGoesOnWithTheStateOfRankZero, 2) {
  const auto group = init_process_group();
  torch::manual_seed(group->rank());
  DistributedDataParallel model(Reloaded(Scripted(*Net(), kNetForward)), group);
  EXPECT_TRUE(SameOnAllRanks(*group, Flatten(model->parameters())));
  EXPECT_TRUE(SameOnAllRanks(*group, BuffersOf(model)));
  for (int64_t step = 0; step < 3; ++step) {
    model.zero_grad();
    model(Batch(group->rank(), step)).toTensor().sum().backward();
    EXPECT_FALSE(SameOnAllRanks(*group, BuffersOf(model)));
  }
  model.sync_buffers();
  EXPECT_TRUE(SameOnAllRanks(*group, BuffersOf(model)));

  model->eval();
  EXPECT_FALSE(model.is_training());
  const torch::Tensor buffers = BuffersOf(model);
  {
    const torch::NoGradGuard no_grad;
    model(Batch(0, 9));
  }
  EXPECT_TRUE(torch::equal(BuffersOf(model), buffers));
}

RANK_TEST(TorchScriptTest, AccumulatesUnderNoSync, 2) {
  const auto group = init_process_group();
  torch::manual_seed(3);
  DistributedDataParallel model(Reloaded(Scripted(*Net(), kNetForward)), group,
                                {.broadcast_buffers = false});
  for (int64_t step = 0; step < 3; ++step) {
    const torch::Tensor expected =
        ExpectedGradients(model.module(), group->size(), [&](JitModule& alone, int rank) {
          for (int64_t part : {0, 1}) {
            alone.forward({Batch(rank, 2 * step + part)}).toTensor().pow(2).mean().backward();
          }
        });
    model.zero_grad(/*set_to_none=*/step % 2 == 0);
    {
      const auto guard = model.no_sync();
      model(Batch(group->rank(), 2 * step)).toTensor().pow(2).mean().backward();
    }
    EXPECT_FALSE(SameOnAllRanks(*group, GradientsOf(model->parameters())));
    model(Batch(group->rank(), 2 * step + 1)).toTensor().pow(2).mean().backward();
    EXPECT_TRUE(torch::allclose(GradientsOf(model->parameters()), expected, 1e-4, 1e-6));
    EXPECT_TRUE(SameOnAllRanks(*group, GradientsOf(model->parameters())));
  }
}

struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    register_module("left", torch::nn::Linear(4, 2));
    register_module("right", torch::nn::Linear(4, 2));
    register_module("never", torch::nn::Linear(4, 2));
  }
};
TORCH_MODULE(Branches);

// Each form of result hides its tensors in other containers.
const std::map<std::string, std::string> kResults = {
    {"y", "a tensor"},
    {"(1, y)", "a tuple"},
    {"[y, y + 1]", "a list"},
    {"{'one': y}", "a dict"},
    {"{'one': [(y, 'two')]}", "a dict of lists of tuples"}};

torch::Tensor FirstTensor(const c10::IValue& value) {
  torch::Tensor first;
  for_each_tensor(value, [&](const torch::Tensor& tensor) {
    if (!first.defined()) first = tensor;
  });
  return first;
}

RANK_TEST(TorchScriptTest, UnusedParametersAreFoundInAnyResult, 2) {
  const auto group = init_process_group();
  for (const auto& [result, form] : kResults) {
    torch::manual_seed(3);
    const std::string forward = R"(
def forward(self, x, left: bool):
    if left:
        y = torch.linear(x, self.left.weight, self.left.bias)
    else:
        y = torch.linear(x, self.right.weight, self.right.bias)
    return )" + result + "\n";
    DistributedDataParallel model(Reloaded(Scripted(*Branches(), forward)), group,
                                  {.find_unused_parameters = true});
    for (int64_t step = 0; step < 4; ++step) {
      // First both ranks take one branch, then each takes another.
      const auto left = [step](int rank) { return step < 2 || rank == 0; };
      const torch::Tensor expected =
          ExpectedGradients(model.module(), group->size(), [&](JitModule& alone, int rank) {
            FirstTensor(alone.forward({Batch(rank, step), left(rank)})).pow(2).mean().backward();
          });
      model.zero_grad();
      const c10::IValue output = model(Batch(group->rank(), step), left(group->rank()));
      FirstTensor(output).pow(2).mean().backward();
      EXPECT_TRUE(torch::allclose(GradientsOf(model->parameters()), expected, 1e-4, 1e-6))
          << form << ", step " << step;
      for (const auto& item : model->named_parameters()) {
        EXPECT_EQ(item.value.grad().defined(),
                  item.name.starts_with("left") || (step > 1 && item.name.starts_with("right")))
            << item.name << ", " << form << ", step " << step;
      }
    }
  }
}

RANK_TEST(TorchScriptTest, MissingGradientsAreNamed, 2) {
  const auto group = init_process_group();
  DistributedDataParallel model(Reloaded(Scripted(*Branches(), R"(
def forward(self, x):
    return torch.linear(x, self.left.weight, self.left.bias)
)")),
                                group);
  model(Batch(0, 0)).toTensor().sum().backward();
  EXPECT_THAT(ErrorOf<ReductionError>([&] { model(Batch(0, 1)); }),
              AllOf(HasSubstr("right.weight"), HasSubstr("never.bias")));
}

// One submodule under two names, and one tensor under two names.
RANK_TEST(TorchScriptTest, TiedParametersAreOneParameter, 2) {
  const auto group = init_process_group();
  torch::manual_seed(group->rank());
  const Units unit = std::make_shared<torch::jit::CompilationUnit>();
  const JitModule shared = Scripted(*torch::nn::Linear(4, 4), "", unit);
  JitModule net("Tied", unit, /*shouldMangle=*/true);
  net.register_module("encoder", shared);
  net.register_module("decoder", shared);
  const torch::Tensor scale = torch::randn({4}).requires_grad_();
  net.register_parameter("scale", scale, false);
  net.register_parameter("again", scale, false);
  net.define(R"(
def forward(self, x):
    x = torch.tanh(torch.linear(x * self.scale, self.encoder.weight, self.encoder.bias))
    return torch.linear(x * self.again, self.decoder.weight, self.decoder.bias)
)");
  DistributedDataParallel model(Reloaded(net), group);
  EXPECT_EQ(model->named_parameters().size(), 3u);
  EXPECT_EQ(model->parameters().size(), 3u);
  EXPECT_EQ(model.bucket_layout().size(), 1u);
  EXPECT_EQ(model.bucket_layout()[0].size(), 3u);
  for (int64_t step = 0; step < 4; ++step) {
    model.zero_grad();
    const torch::Tensor expected =
        ExpectedGradients(model.module(), group->size(), [&](JitModule& alone, int rank) {
          alone.forward({Batch(rank, step)}).toTensor().pow(2).mean().backward();
        });
    std::vector<torch::Tensor> all;  // with all names, as in `expected`
    for (const torch::Tensor& parameter : model.module().parameters()) all.push_back(parameter);
    model(Batch(group->rank(), step)).toTensor().pow(2).mean().backward();
    EXPECT_TRUE(torch::allclose(GradientsOf(all), expected, 1e-4, 1e-6)) << "step " << step;
    EXPECT_TRUE(SameOnAllRanks(*group, GradientsOf(all)));
  }
}

RANK_TEST(TorchScriptTest, JoinsWithUnevenInputs, {2, 3}) {
  const auto group = init_process_group();
  torch::manual_seed(5);
  DistributedDataParallel model(Reloaded(Scripted(*Net(), kNetForward)), group);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const int inputs = 2 + 3 * group->rank();
  int steps = 0;
  ddp::join({&model}, {}, [&] {
    for (; steps < inputs; ++steps) {
      optimizer.zero_grad();
      model(Batch(group->rank(), steps)).toTensor().pow(2).mean().backward();
      optimizer.step();
    }
  });
  EXPECT_EQ(steps, inputs);
  EXPECT_TRUE(SameOnAllRanks(*group, Flatten(model->parameters())));
  EXPECT_TRUE(SameOnAllRanks(*group, BuffersOf(model)));
}

struct WordsImpl : torch::nn::Module {
  WordsImpl() {
    register_module("words", torch::nn::Embedding(10, 3));
    register_module("last", torch::nn::Linear(3, 1));
  }
};
TORCH_MODULE(Words);

RANK_TEST(TorchScriptTest, SparseGradientsStaySparse, .world_size = 2,
          .not_on_device = "sparse gradients are refused, as with NCCL") {
  const auto group = init_process_group();
  torch::manual_seed(3);
  DistributedDataParallel model(Reloaded(Scripted(*Words(), R"(
def forward(self, x):
    x = torch.embedding(self.words.weight, x, -1, False, True)
    return torch.linear(x, self.last.weight, self.last.bias)
)")),
                                group);
  const auto words = [](int rank) { return torch::tensor({rank, 2 * rank + 1}, torch::kLong); };
  for (int64_t step = 0; step < 3; ++step) {
    model.zero_grad();
    const torch::Tensor expected =
        ExpectedGradients(model.module(), group->size(), [&](JitModule& alone, int rank) {
          alone.forward({words(rank)}).toTensor().sum().backward();
        });
    model(words(group->rank())).toTensor().sum().backward();
    EXPECT_TRUE(model->parameters()[0].grad().is_sparse());
    EXPECT_TRUE(torch::allclose(GradientsOf(model->parameters()), expected, 1e-4, 1e-6));
  }
}

RANK_TEST(TorchScriptTest, TakesArgumentsByName, 1) {
  const auto group = init_process_group();
  torch::manual_seed(3);
  DistributedDataParallel model(Reloaded(Scripted(*torch::nn::Linear(4, 2), R"(
def forward(self, x, scale: float = 1., shift: float = 0.):
    return torch.linear(x, self.weight, self.bias) * scale + shift
)")),
                                group);
  const torch::Tensor x = Batch(group->rank(), 0);
  const torch::Tensor plain = model(x).toTensor();
  EXPECT_TRUE(torch::allclose(model.forward({x}, {{"shift", 2.}}).toTensor(), plain + 2));
  EXPECT_TRUE(torch::allclose(model.forward({x, 3.}, {{"shift", 2.}}).toTensor(), plain * 3 + 2));
  EXPECT_TRUE(torch::allclose(model(x, 3., 2.).toTensor(), plain * 3 + 2));
  EXPECT_THAT(ErrorOf<std::exception>([&] {
                model.forward({x}, {{"slant", 2.}});
              }),
              HasSubstr("slant"));
}

RANK_TEST(TorchScriptTest, RunsTheHooksOfTheModule, 1) {
  const auto group = init_process_group();
  JitModule module = Scripted(*torch::nn::Linear(4, 2), R"(
def forward(self, x, scale: float):
    return torch.linear(x, self.weight, self.bias) * scale
)");
  module.define(R"(
def double(self, inputs: Tuple[Tensor, float], output: Tensor):
    return output * 2
)");
  const torch::Tensor x = Batch(0, 0);
  const torch::Tensor plain = module.forward({x, 1.}).toTensor();
  module.type()->addForwardHook(&module.get_method("double").function());
  DistributedDataParallel model(module, group);
  EXPECT_TRUE(torch::allclose(model(x, 1.).toTensor(), plain * 2));
  EXPECT_TRUE(torch::allclose(model.forward({x}, {{"scale", 3.}}).toTensor(), plain * 6));
}

RANK_TEST(TorchScriptTest, TrainsInLowerPrecision, 2) {
  const auto group = init_process_group();
  torch::manual_seed(3);
  DistributedDataParallel model(
      Reloaded(Scripted(*torch::nn::Linear(4, 2), R"(
def forward(self, inputs: List[Tensor], named: Dict[str, Tensor], both: Tuple[Tensor, int]):
    x = inputs[0] + named["one"] + both[0]
    return torch.linear(x, self.weight, self.bias)
)")),
      group, {.mixed_precision = MixedPrecision{.param_dtype = torch::kBFloat16}});
  const torch::Tensor x = Batch(group->rank(), 0);
  for (int64_t step = 0; step < 4; ++step) {
    model.zero_grad();
    c10::List<torch::Tensor> list({x});
    c10::Dict<std::string, torch::Tensor> dict;
    dict.insert("one", x);
    const torch::Tensor y = model(list, dict, c10::ivalue::Tuple::create({x, 1})).toTensor();
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    y.sum().backward();
    for (const torch::Tensor& parameter : model->parameters()) {
      EXPECT_EQ(parameter.scalar_type(), torch::kFloat);
      EXPECT_EQ(parameter.grad().scalar_type(), torch::kFloat);
    }
    EXPECT_TRUE(SameOnAllRanks(*group, GradientsOf(model->parameters())));
    EXPECT_EQ(list.get(0).scalar_type(), torch::kFloat) << "the caller's list";
    EXPECT_EQ(dict.at("one").scalar_type(), torch::kFloat) << "the caller's dict";
  }
}

RANK_TEST(TorchScriptTest, FollowsAnotherType, 2) {
  const auto group = init_process_group();
  torch::manual_seed(3);
  DistributedDataParallel model(Reloaded(Scripted(*Net(), kNetForward)), group);
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    model->to(type);
    for (int64_t step = 0; step < 3; ++step) {
      model.zero_grad();
      model(Batch(group->rank(), step).to(type)).toTensor().pow(2).mean().backward();
      EXPECT_TRUE(SameOnAllRanks(*group, GradientsOf(model->parameters())));
      EXPECT_EQ(model->parameters()[0].grad().scalar_type(), type);
    }
  }
}

RANK_TEST(TorchScriptTest, SavesWhatItLoads, 2) {
  const auto group = init_process_group();
  torch::manual_seed(group->rank());
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/trained.pt";
  DistributedDataParallel<JitModule> model = nullptr;
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { model->eval(); }), HasSubstr("is empty"));
  model = DistributedDataParallel(Scripted(*Net(), kNetForward), group);
  model(Batch(group->rank(), 0)).toTensor().sum().backward();
  model->save(path);
  DistributedDataParallel loaded(torch::jit::load(path), {.process_group = group});
  EXPECT_TRUE(torch::equal(Flatten(loaded->parameters()), Flatten(model->parameters())));
  model.sync_buffers();
  EXPECT_TRUE(torch::equal(BuffersOf(loaded), BuffersOf(model)));
}

RANK_TEST(TorchScriptTest, RefusesOtherModules, 2) {
  const auto group = init_process_group();
  const auto error_of = [&](const JitModule& module) {
    return ErrorOf<ConfigurationError>([&] { DistributedDataParallel model(module, group); });
  };
  EXPECT_THAT(error_of(Scripted(*Net(), "")), HasSubstr("has no method forward"));
  JitModule frozen = Scripted(*Net(), kNetForward);
  frozen.eval();
  EXPECT_THAT(error_of(torch::jit::freeze(frozen)),
              AllOf(HasSubstr("has no parameters"), HasSubstr("torch.jit.freeze")));
  // A module that differs between the ranks.
  const torch::nn::Linear net(4, group->rank() + 2);
  EXPECT_THAT(error_of(Scripted(*net, "def forward(self, x):\n  return x\n")),
              AllOf(HasSubstr("weight"), HasSubstr("rank 1")));
}

RANK_TEST(TorchScriptTest, HasNoBaseModule, 1) {
  const auto group = init_process_group();
  DistributedDataParallel model(Scripted(*Net(), kNetForward), group);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { model.base_module(); }),
              AllOf(HasSubstr("__torch__"), HasSubstr("no torch::nn::Module")));
  EXPECT_THAT(model.describe(), HasSubstr("__torch__"));
}

// The failure of one rank's forward reaches the other rank; training goes on after it.
RANK_TEST(TorchScriptTest, AnExceptionOfTheModuleReachesTheOtherRanks, 2) {
  const auto group = init_process_group();
  torch::manual_seed(3);
  DistributedDataParallel model(Reloaded(Scripted(*Net(), kNetForward)), group);
  const int64_t width = group->rank() == 0 ? 3 : 4;
  EXPECT_THAT(ErrorOf<std::exception>([&] {
                model(torch::ones({5, width})).toTensor().sum().backward();
              }),
              group->rank() == 0 ? HasSubstr("shapes") : HasSubstr("rank 0: the forward threw"));
  model.zero_grad();
  for (int64_t step = 0; step < 3; ++step) {
    model.zero_grad();
    model(Batch(group->rank(), step)).toTensor().sum().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, GradientsOf(model->parameters())));
  }
}

}  // namespace
}  // namespace ddp
