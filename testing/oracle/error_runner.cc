#include "testing/oracle/error_runner.h"

#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/common/logging.h"
#include "ddp/ddp.h"
#include "ddp/default_hooks.h"
#include "ddp/join.h"
#include "nlohmann/json.hpp"
#include "testing/distributed_checks.h"
#include "testing/oracle/models.h"
#include "testing/oracle/scenario_runner.h"

namespace ddp::testing {
namespace {

using Group = std::shared_ptr<ProcessGroup>;
using Model = DistributedDataParallel<OracleModel>;
using Action = std::function<void()>;

// Returns the error text of a whole case: a rank may get the other rank's error at an earlier call.
std::string TextOf(const Action& action) { return ErrorOf<c10::Error>(action); }

// `use_right`: see Branches::forward.
void BranchStep(Model& model, bool use_right) {
  model.module()->zero_grad();
  model.forward(torch::ones({4, 6}), /*rank=*/1, /*step=*/use_right ? 1 : 0).sum().backward();
}

std::string UnusedParameter(const Group& group) {
  return TextOf([&] {
    Model model(MakeOracleModel("branches"), group);
    for (int step = 0; step < 2; ++step) BranchStep(model, true);
  });
}

std::string MarkedTwice(const Group& group) {
  return TextOf([&] {
    Model model(MakeOracleModel("checkpointed"), group);
    model.forward(torch::ones({4, 6}), 0, 0).sum().backward();
  });
}

std::string StaticGraphMore(const Group& group) {
  return TextOf([&] {
    Model model(MakeOracleModel("branches"), group, {.static_graph = true});
    BranchStep(model, false);
    BranchStep(model, true);
  });
}

std::string StaticGraphFewer(const Group& group) {
  return TextOf([&] {
    Model model(MakeOracleModel("branches"), group, {.static_graph = true});
    for (const bool use_right : {true, false, false}) BranchStep(model, use_right);
  });
}

std::string Construct(const Group& group, torch::nn::Linear net,
                      const DistributedDataParallelOptions& options = {}) {
  return TextOf([&] { DistributedDataParallel model(net, group, options); });
}

std::string DifferentShapes(const Group& group) {
  return Construct(group, torch::nn::Linear(2, group->rank() == 1 ? 3 : 2));
}

std::string DifferentCount(const Group& group) {
  return Construct(group,
                   torch::nn::Linear(torch::nn::LinearOptions(2, 2).bias(group->rank() == 0)));
}

std::string NoTrainableParameter(const Group& group) {
  torch::nn::Linear net(2, 2);
  for (torch::Tensor& parameter : net->parameters()) parameter.set_requires_grad(false);
  return Construct(group, net);
}

std::string SecondHook(const Group& group) {
  return TextOf([&] {
    DistributedDataParallel model(torch::nn::Linear(2, 2), group);
    for (int count = 0; count < 2; ++count) model.register_comm_hook(group, allreduce_hook);
  });
}

std::string ReplacedView(const Group& group) {
  return TextOf([&] {
    const auto net = MakeOracleModel("mlp");
    Model model(net, group, {.gradient_as_bucket_view = true});
    const auto parameters = net->named_parameters();
    torch::Tensor first = parameters["fc1.weight"];
    model.forward(torch::ones({4, 8}), 0, 0).sum().backward();
    first.register_hook([last = parameters["fc3.weight"]](const torch::Tensor&) {
      torch::Tensor replaced = last;
      replaced.mutable_grad() = last.grad().clone();
    });
    model.forward(torch::ones({4, 8}), 0, 1).sum().backward();
  });
}

std::string EarlyTermination(const Group& group) {
  return TextOf([&] {
    DistributedDataParallel model(torch::nn::Linear(2, 2), group);
    join({&model}, {.throw_on_early_termination = true}, [&] {
      for (int step = 0; step < 2 - group->rank(); ++step) {
        model.forward(torch::ones({1, 2})).sum().backward();
      }
    });
  });
}

std::string TwoDevices(const Group& group) {
  return Construct(group, torch::nn::Linear(2, 2), {.device_ids = {0, 1}});
}

}  // namespace

int RunOracleErrors() {
  torch::set_num_threads(1);
  const char* folder = std::getenv(kOracleResults);
  CHECK(folder != nullptr) << kOracleResults << " is not set";
  const auto group = init_process_group();
  const std::vector<std::pair<std::string, std::string (*)(const Group&)>> cases = {
      {"unused_parameter", UnusedParameter},
      {"marked_twice", MarkedTwice},
      {"static_graph_more", StaticGraphMore},
      {"static_graph_fewer", StaticGraphFewer},
      {"different_shapes", DifferentShapes},
      {"different_count", DifferentCount},
      {"no_trainable_parameter", NoTrainableParameter},
      {"second_hook", SecondHook},
      {"replaced_view", ReplacedView},
      {"early_termination", EarlyTermination},
      {"two_devices", TwoDevices},
  };
  nlohmann::json texts = nlohmann::json::object();
  // Each case has its own group, and all groups are kept. A rank may be in the next case while the
  // other still waits in this one; it must get no failure report from this one.
  std::vector<Group> groups;
  for (const auto& [name, run] : cases) {
    groups.push_back(
        std::make_shared<ProcessGroup>(c10::make_intrusive<c10d::PrefixStore>(name, group->store()),
                                       ProcessGroup::Place{.rank = group->rank(),
                                                           .size = group->size(),
                                                           .local_rank = group->rank(),
                                                           .local_size = group->size()}));
    texts[name] = run(groups.back());
  }
  std::ofstream(absl::StrCat(folder, "/errors_", group->rank(), ".json")) << texts.dump(1);
  return 0;
}

}  // namespace ddp::testing
