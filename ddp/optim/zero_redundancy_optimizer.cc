#include "ddp/optim/zero_redundancy_optimizer.h"

#include <exception>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize/archive.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/join.h"
#include "ddp/optim/zero_core.h"
#include "ddp/process_group.h"
#include "ddp/wrapper/model_join.h"
#include "ddp/wrapper/model_synchronizer.h"

namespace ddp {

using torch::optim::OptimizerParamGroup;

namespace {

// The optimizer's side of a Join.
class ZeroJoinable : public Joinable {
 public:
  ZeroJoinable(std::shared_ptr<internal::ZeroCore> core, torch::optim::Optimizer* optimizer)
      : core_(std::move(core)), optimizer_(optimizer) {}

  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override {
    core_->BeginJoin();
    return std::make_unique<Hook>(this);
  }
  std::shared_ptr<ProcessGroup> join_process_group() override { return core_->group(); }
  void enter_join(Join* join) override { Set(join); }
  void leave_join() override { Set(nullptr); }
  std::string join_name() const override { return "ZeroRedundancyOptimizer"; }
  std::string join_event_name(int) const override { return "a step"; }

  Join* join() const { return join_; }

 private:
  class Hook : public JoinHook {
   public:
    explicit Hook(ZeroJoinable* joinable) : joinable_(joinable) {}
    void on_join() override { joinable_->core_->Wait(); }
    void main_hook(const JoinRound& round) override {
      joinable_->core_->Step(joinable_->optimizer_->param_groups(), &round);
    }
    void post_hook(bool is_last_joiner, int last_joiner) override {
      joinable_->core_->FinishJoin(joinable_->optimizer_->param_groups(), is_last_joiner,
                                   last_joiner);
    }

   private:
    ZeroJoinable* const joinable_;
  };

  void Set(Join* join) {
    join_ = join;
    if (core_->scatter() != nullptr) core_->scatter()->set_under_join(join != nullptr);
  }

  const std::shared_ptr<internal::ZeroCore> core_;
  torch::optim::Optimizer* const optimizer_;
  Join* join_ = nullptr;
};

// Returns what is wrong with new groups; empty: nothing. `known`: the parameters of earlier groups.
std::string FindError(const std::vector<OptimizerParamGroup>& groups,
                      std::set<const c10::TensorImpl*> known, const ProcessGroup& group) {
  size_t count = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t i = 0; i < groups[g].params().size(); ++i, ++count) {
      const at::Tensor& tensor = groups[g].params()[i];
      const std::string name = absl::StrCat("parameter ", i, " of group ", g);
      if (!tensor.defined()) return name + " is undefined";
      if (!tensor.is_leaf()) return name + " is no leaf of the graph";
      if (tensor.layout() != at::kStrided) return name + " is not dense";
      if (tensor.device() != group.device()) {
        return absl::StrCat(name, " is on ", tensor.device().str(), ", and the group's tensors on ",
                            group.device().str());
      }
      if (!known.insert(tensor.unsafeGetTensorImpl()).second) return name + " is there twice";
    }
  }
  return count == 0 ? "there is no parameter" : "";
}

std::set<const c10::TensorImpl*> ParametersIn(const std::vector<OptimizerParamGroup>& groups) {
  std::set<const c10::TensorImpl*> known;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& tensor : group.params()) known.insert(tensor.unsafeGetTensorImpl());
  }
  return known;
}

internal::ModelSynchronizer& SynchronizerOf(const internal::DataParallelHandle& model) {
  return dynamic_cast<internal::ModelJoin&>(*model.joinable()).synchronizer();
}

// Returns what scattered gradients need and these arguments lack; empty: nothing.
std::string ScatterLacks(const ZeroRedundancyOptions& options, const ProcessGroup& group,
                         const internal::DataParallelHandle* model) {
  if (model == nullptr) return "the constructor that takes the model";
  if (options.shard != ZeroRedundancyOptions::Shard::kEven) return "shard = kEven";
  if (group.size() == 1) return "two ranks or more";
  const internal::ModelSynchronizer& synchronizer = SynchronizerOf(*model);
  if (!synchronizer.reducer().hook_name().empty()) return "a model without a comm hook";
  if (synchronizer.reducer().parameters().empty()) return "a model with trainable parameters";
  if (synchronizer.reducer().times().complete_ns != 0) return "a model before its first backward";
  return "";
}

// Backends whose reduce-scatter sends less than an all-reduce. LibTorch's Gloo makes it of one.
bool ScatterSaves(const ProcessGroup& group) { return !group.device().is_cpu(); }

std::shared_ptr<ProcessGroup> Checked(std::shared_ptr<ProcessGroup> group) {
  if (!group) throw ConfigurationError("a ZeroRedundancyOptimizer needs a process group");
  return group;
}

}  // namespace

// The part of the construction that a rank does alone, before its first collective.
struct ZeroRedundancyOptimizerBase::Made {
  explicit Made(Factory factory) : make(std::move(factory)) {
    try {
      Groups one;
      one.emplace_back(std::vector<at::Tensor>());
      const std::unique_ptr<torch::optim::Optimizer> probe = make(std::move(one));
      defaults = probe->defaults().clone();
      if (dynamic_cast<const torch::optim::LBFGS*>(probe.get()) != nullptr) {
        error = "LBFGS needs all gradients together";
      }
    } catch (const std::exception& thrown) {
      error = internal::MessageOf(thrown);
    }
  }

  Factory make;
  std::unique_ptr<torch::optim::OptimizerOptions> defaults;
  std::string error;
};

ZeroRedundancyOptimizerBase::ZeroRedundancyOptimizerBase(Factory make, const Groups& groups,
                                                         std::shared_ptr<ProcessGroup> group,
                                                         const ZeroRedundancyOptions& options)
    : ZeroRedundancyOptimizerBase(Made(std::move(make)), groups, std::move(group), nullptr,
                                  options) {}

ZeroRedundancyOptimizerBase::ZeroRedundancyOptimizerBase(Factory make, const Groups& groups,
                                                         const internal::DataParallelHandle& model,
                                                         const ZeroRedundancyOptions& options)
    : ZeroRedundancyOptimizerBase(Made(std::move(make)), groups, model.process_group(), &model,
                                  options) {}

ZeroRedundancyOptimizerBase::ZeroRedundancyOptimizerBase(Made made, const Groups& groups,
                                                         std::shared_ptr<ProcessGroup> group,
                                                         const internal::DataParallelHandle* model,
                                                         const ZeroRedundancyOptions& options)
    : Optimizer(Groups(), std::move(made.defaults)),
      core_(std::make_shared<internal::ZeroCore>(made.make, Checked(std::move(group)), options)),
      joinable_(std::make_unique<ZeroJoinable>(core_, this)),
      exceptions_at_start_(std::uncaught_exceptions()) {
  const std::string lacks = ScatterLacks(options, *core_->group(), model);
  const bool scatter =
      lacks.empty() && options.scatter_gradients.value_or(ScatterSaves(*core_->group()));
  std::string error = made.error;
  if (error.empty()) error = FindError(groups, {}, *core_->group());
  if (error.empty() && options.scatter_gradients.value_or(false) && !lacks.empty()) {
    error = "scatter_gradients needs " + lacks;
  }
  if (error.empty() && options.overlap_with_forward && model == nullptr) {
    error = "overlap_with_forward needs the constructor that takes the model";
  }
  if (error.empty() && !(options.bucket_cap_mb > 0)) error = "bucket_cap_mb must be positive";
  if (!error.empty()) error = "a ZeroRedundancyOptimizer cannot be made: " + error;
  core_->Agree(groups, error, scatter);
  core_->Guard("the constructor of a ZeroRedundancyOptimizer", [&] {
    for (const OptimizerParamGroup& added : groups) Optimizer::add_param_group(added);
    core_->Add(param_groups(), 0);
    if (scatter) core_->InstallScatter(*model);
  });
  if (model == nullptr) return;
  // The model may live longer than this optimizer, and end on another thread.
  SynchronizerOf(*model).AddOnForward(
      core_, [core = core_.get()](bool collective) { core->OnForward(collective); });
}

ZeroRedundancyOptimizerBase::~ZeroRedundancyOptimizerBase() {
  if (std::uncaught_exceptions() > exceptions_at_start_) return;
  try {
    core_->Wait();
  } catch (const std::exception& error) {
    LOG(ERROR) << "the parameters of a ZeroRedundancyOptimizer have old and new values: "
               << internal::MessageOf(error);
  }
}

OptimizerParamGroup ZeroRedundancyOptimizerBase::ParametersOf(
    const internal::DataParallelHandle& model) {
  // A parameter that two modules share is in the list twice.
  std::set<const c10::TensorImpl*> seen;
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& tensor : model.base_module().parameters()) {
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) parameters.push_back(tensor);
  }
  return OptimizerParamGroup(std::move(parameters));
}

at::Tensor ZeroRedundancyOptimizerBase::step(LossClosure closure) {
  whole_.reset();
  at::Tensor loss;
  if (closure) {
    core_->Guard("the closure of a ZeroRedundancyOptimizer's step", [&] {
      core_->Wait();
      const at::AutoGradMode with_grad(true);
      loss = closure();
    });
  }
  Join* const join = static_cast<ZeroJoinable&>(*joinable_).join();
  std::optional<JoinRound> round;
  if (join != nullptr) round = join->notify(*joinable_, 0);
  core_->Step(param_groups(), round.has_value() ? &*round : nullptr);
  return loss;
}

void ZeroRedundancyOptimizerBase::add_param_group(const OptimizerParamGroup& group) {
  if (static_cast<ZeroJoinable&>(*joinable_).join() != nullptr) {
    throw ConfigurationError(
        "add_param_group() of a ZeroRedundancyOptimizer cannot be called under a Join: finish it "
        "first");
  }
  std::string error = FindError({group}, ParametersIn(param_groups()), *core_->group());
  if (!error.empty()) error = "a parameter group cannot be added: " + error;
  core_->FinishEarlier("add_param_group()");  // after Agree(), no rank can fail because of another
  core_->Agree({group}, error, scatters_gradients());
  core_->Guard("add_param_group()", [&] {
    Optimizer::add_param_group(group);
    core_->Add(param_groups(), param_groups().size() - 1);
  });
  whole_.reset();
}

void ZeroRedundancyOptimizerBase::wait() {
  core_->Guard("wait()", [this] { core_->Wait(); });
}

double ZeroRedundancyOptimizerBase::clip_grad_norm(double max_norm) {
  return core_->ClipGradNorm(max_norm, static_cast<ZeroJoinable&>(*joinable_).join() != nullptr);
}

// ---- State ----

void ZeroRedundancyOptimizerBase::consolidate_state_dict(int to) {
  whole_.reset();
  whole_ = core_->Collect(param_groups(), to);
  whole_version_ = core_->version();
}

void ZeroRedundancyOptimizerBase::save(torch::serialize::OutputArchive& archive) const {
  if (!whole_ || whole_version_ != core_->version()) {
    throw ConfigurationError(absl::StrCat(
        "rank ", core_->group()->rank(),
        " has not the whole state of a ZeroRedundancyOptimizer: call consolidate_state_dict(to) on "
        "every rank after the last step(), and save on rank `to`"));
  }
  for (size_t g = 0; g < param_groups().size(); ++g) {
    whole_->param_groups()[g].set_options(param_groups()[g].options().clone());
  }
  whole_->save(archive);
}

void ZeroRedundancyOptimizerBase::load(torch::serialize::InputArchive& archive) {
  const std::unique_ptr<torch::optim::Optimizer> whole = EmptyOptimizer();
  whole->load(archive);
  PrepareState (*whole)();
}

std::unique_ptr<torch::optim::Optimizer> ZeroRedundancyOptimizerBase::DescribeState() {
  return core_->DescribeState(param_groups());
}

void ZeroRedundancyOptimizerBase::FillState(torch::optim::Optimizer& whole,
                                            const std::vector<bool>& needed) {
  core_->FillState(whole, needed);
}

std::unique_ptr<torch::optim::Optimizer> ZeroRedundancyOptimizerBase::EmptyOptimizer() const {
  return core_->MakePlain(param_groups());
}

std::function<void()> ZeroRedundancyOptimizerBase::PrepareState(
    const torch::optim::Optimizer& whole) {
  return [this, put = core_->PrepareState(whole, param_groups())] {
    put();
    whole_.reset();
  };
}

Joinable* ZeroRedundancyOptimizerBase::joinable() const { return joinable_.get(); }

bool ZeroRedundancyOptimizerBase::scatters_gradients() const { return core_->scatter() != nullptr; }

const torch::optim::Optimizer& ZeroRedundancyOptimizerBase::local_optimizer() const {
  return core_->inner();
}

}  // namespace ddp
