#include "ddp/optim/zero_core.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "absl/strings/str_cat.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/common/host_tensor.h"
#include "ddp/model/model_metadata.h"
#include "ddp/optim/joined_ranks.h"
#include "ddp/optim/shard_plan.h"
#include "ddp/process_group.h"
#include "ddp/reducer/buckets/gradient_context.h"
#include "ddp/wrapper/model_agreement.h"
#include "ddp/wrapper/model_join.h"
#include "ddp/wrapper/model_synchronizer.h"
#include "xxhash.h"

namespace ddp::internal {
namespace {

// Why a rank cannot make a step. A word of Exchange() has one of these and a parameter's number.
enum Reason : int64_t { kTorn = 1, kGroups, kChanged, kGradient, kContext, kRates, kReasons };

int64_t Word(Reason reason, int parameter = 0) { return reason + kReasons * parameter; }

constexpr char kTornText[] =
    "a failure has interrupted a step of a ZeroRedundancyOptimizer, so the parameters have old and "
    "new values: load model and optimizer from a checkpoint on every rank";

// Returns a number that tells other learning rates apart; never 0.
int64_t RatesOf(const ZeroCore::Groups& groups) {
  std::vector<double> rates;
  for (const auto& group : groups) {
    try {
      rates.push_back(group.options().get_lr());
    } catch (const c10::Error&) {  // the options have none
    }
  }
  return static_cast<int64_t>(XXH3_64bits(rates.data(), rates.size() * sizeof(double)) | 1);
}

ShardPlan::Options PlanOptions(const ZeroRedundancyOptions& options, int ranks) {
  const bool even = options.shard == ZeroRedundancyOptions::Shard::kEven;
  const double bytes = options.bucket_cap_mb * (int64_t{1} << 20);
  return {.mode = even ? ShardPlan::Mode::kEven : ShardPlan::Mode::kWhole,
          .ranks = ranks,
          .bucket_bytes = std::max<int64_t>(1, static_cast<int64_t>(bytes))};
}

}  // namespace

ZeroCore::ZeroCore(OptimizerFactory make, std::shared_ptr<ProcessGroup> group,
                   const ZeroRedundancyOptions& options)
    : make_(std::move(make)),
      group_(std::move(group)),
      options_(options),
      parameters_(PlanOptions(options, group_->size()), group_->rank()),
      transfer_(parameters_, *group_),
      incarnation_(group_->incarnation()),
      in_context_(std::make_shared<std::atomic<bool>>(false)) {}

ZeroCore::~ZeroCore() {
  if (scatter_) scatter_->Stop();
}

void ZeroCore::Guard(const char* what, const std::function<void()>& function) const {
  try {
    function();
  } catch (const CommunicationError&) {
    throw;  // all ranks know, or find the failure themselves; the same for the next one
  } catch (const ReductionError&) {
    throw;
  } catch (const std::exception& error) {
    group_->report_failure(
        absl::StrCat("rank ", group_->rank(), ": in ", what, ": ", MessageOf(error)));
    throw;
  } catch (...) {
    group_->report_failure(absl::StrCat("rank ", group_->rank(), ": in ", what,
                                        ": an exception that is no std::exception"));
    throw;
  }
}

// ---- Parameters ----

void ZeroCore::Agree(const Groups& groups, const std::string& error, bool scatter) {
  ModelMetadata metadata;
  metadata.AddOption("error", error);
  metadata.AddOption("shard", absl::StrCat(static_cast<int>(options_.shard)));
  metadata.AddOption("scatter_gradients", scatter ? "true" : "false");
  metadata.AddOption("overlap_with_forward", options_.overlap_with_forward ? "true" : "false");
  metadata.AddOption("bucket_cap_mb", absl::StrCat(options_.bucket_cap_mb));
  for (size_t g = 0; error.empty() && g < groups.size(); ++g) {
    for (size_t i = 0; i < groups[g].params().size(); ++i) {
      const at::Tensor& tensor = groups[g].params()[i];
      metadata.AddParameter({.name = absl::StrCat("group", g, ".", i),
                             .dtype = toString(tensor.scalar_type()),
                             .shape = tensor.sizes().vec(),
                             .strides = tensor.strides().vec(),
                             .requires_grad = tensor.requires_grad()});
    }
  }
  group_->ensure_usable();
  AgreeOnModel(*group_, metadata, "arguments of a ZeroRedundancyOptimizer");
  if (!error.empty()) throw ConfigurationError(error);
}

void ZeroCore::Add(const Groups& groups, size_t first) {
  ++version_;
  std::vector<std::vector<at::Tensor>> tensors;
  for (size_t g = first; g < groups.size(); ++g) tensors.push_back(groups[g].params());
  std::vector<std::vector<at::Tensor>> views(groups.size());
  for (const size_t number : parameters_.Add(tensors)) {
    const ShardedParameters::Mine& mine = parameters_.mine()[number];
    views[mine.group].push_back(mine.view);
  }
  Groups parts;
  for (size_t g = first; g < groups.size(); ++g) {
    parts.emplace_back(std::move(views[g]), groups[g].options().clone());
  }
  if (!inner_) {
    inner_ = make_(std::move(parts));
  } else {
    for (const auto& part : parts) inner_->add_param_group(part);
  }
  transfer_.peers().Share();
  if (scatter_) scatter_->SetPlan(parameters_);
  WatchContexts(groups, first);
}

// A gradient of a distributed autograd context is not in .grad, so a step would do nothing.
void ZeroCore::WatchContexts(const Groups& groups, size_t first) {
  const auto watch = [in_context = in_context_](const at::Tensor&) {
    bool found = true;
    try {
      found = GradientContext::OfHook() != nullptr;
    } catch (const ConfigurationError&) {  // a backward of another worker
    }
    if (found) in_context->store(true, std::memory_order_relaxed);
  };
  for (size_t g = first; g < groups.size(); ++g) {
    for (const at::Tensor& tensor : groups[g].params()) {
      if (tensor.requires_grad()) tensor.register_hook(watch);
    }
  }
}

void ZeroCore::InstallScatter(DataParallelHandle model) {
  const ModelSynchronizer& synchronizer =
      dynamic_cast<ModelJoin&>(*model.joinable()).synchronizer();
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  std::vector<bool> sparse;
  for (const Reducer::Parameter& parameter : synchronizer.reducer().parameters()) {
    names.push_back(parameter.name);
    tensors.push_back(parameter.tensor);
    sparse.push_back(parameter.sparse);
  }
  // Only the model calls the function, so the model is alive in it.
  scatter_ = std::make_shared<GradientScatter>(
      group_, [&reducer = synchronizer.reducer()] { return std::max(1, reducer.divisor()); });
  scatter_->SetPlan(parameters_);
  model.register_comm_hook(scatter_, &GradientScatter::Hook, "zero_redundancy_optimizer");
  model.set_bucket_layout(ScatterLayout(parameters_, names, tensors, sparse));
}

// ---- A step ----

int64_t ZeroCore::Problem(const Groups& groups, bool stepping) const {
  if (values_ == Values::kTorn) return Word(kTorn);
  if (!parameters_.HasGroups(groups)) return Word(kGroups);
  if (const int changed = parameters_.FindChanged(); changed >= 0) return Word(kChanged, changed);
  if (const int gradient = parameters_.FindUnusableGradient(); gradient >= 0) {
    return Word(kGradient, gradient);
  }
  if (!stepping || !*in_context_) return 0;
  const std::vector<bool> buckets = parameters_.BucketsWithGradients();
  const bool any = std::find(buckets.begin(), buckets.end(), true) != buckets.end();
  return any ? 0 : Word(kContext);
}

std::string ZeroCore::Explain(int64_t problem, int rank) const {
  const std::string parameter =
      absl::StrCat("parameter ", problem / kReasons, " of a ZeroRedundancyOptimizer ");
  const auto text = [&]() -> std::string {
    switch (problem % kReasons) {
      case kTorn:
        return kTornText;
      case kGroups:
        return "the parameter groups of a ZeroRedundancyOptimizer have changed: call its own "
               "add_param_group() on every rank, outside of a Join, and not that of "
               "torch::optim::Optimizer";
      case kChanged:
        return parameter +
               "has another type, device, shape or strides than at its construction: "
               "make a new optimizer";
      case kContext:
        return "the gradients of the last backward lie in a distributed autograd context, and no "
               "parameter of a ZeroRedundancyOptimizer has a .grad: copy "
               "context.grad(parameter) into .grad before step(), or update the parameters with "
               "an rpc::DistributedOptimizer instead";
      case kRates:
        return "a ZeroRedundancyOptimizer has other learning rates than on the ranks before: "
               "change options alike on all ranks, and give a scheduler that follows a loss the "
               "same loss on all of them";
      default:
        return "the gradient of " + parameter +
               "is sparse, or has another shape, type or device "
               "than the parameter";
    }
  };
  return absl::StrCat("rank ", rank, ": ", text());
}

// One all-reduce: two words of each rank, and the number of ranks with gradients for each bucket.
// `takes_options`: this rank gets its options from others, so its own have no say.
ZeroCore::Start ZeroCore::Exchange(const Groups& groups, bool stepping, bool takes_options) {
  const std::vector<bool> mine = parameters_.BucketsWithGradients();
  const int ranks = group_->size();
  const auto count = static_cast<int64_t>(mine.size());
  at::Tensor words = at::zeros({2 * ranks + count + 1}, at::kLong);
  auto* const mutable_words = words.mutable_data_ptr<int64_t>();
  mutable_words[group_->rank()] = Problem(groups, stepping);
  if (stepping && !takes_options) mutable_words[ranks + group_->rank()] = RatesOf(groups);
  std::copy(mine.begin(), mine.end(), mutable_words + 2 * ranks);
  mutable_words[2 * ranks + count] = transfer_.peers().MustPublish() ? 1 : 0;
  words = words.to(group_->device());
  group_->all_reduce(words);
  // Waits for a stream, and so for the values of the step before.
  words = group_->to_host(words);
  if (values_ == Values::kUnproven) values_ = Values::kWhole;
  const auto* const all = words.const_data_ptr<int64_t>();
  Start start;
  int64_t rates = 0;
  for (int rank = 0; rank < ranks && start.error.empty(); ++rank) {
    const int64_t theirs = all[ranks + rank];
    const bool differs = rates != 0 && theirs != 0 && theirs != rates;
    if (rates == 0) rates = theirs;
    const int64_t problem = all[rank] == 0 && differs ? Word(kRates) : all[rank];
    if (problem == 0) continue;
    start.torn = problem % kReasons == kTorn;
    start.error = Explain(problem, rank);
  }
  for (int64_t b = 0; b < count; ++b) start.buckets.push_back(all[2 * ranks + b] > 0);
  start.publish = all[2 * ranks + count] > 0;
  return start;
}

bool ZeroCore::RunsAhead() const { return !group_->device().is_cpu(); }

// A step on a device begins without an exchange, for which the host would have to wait. So the
// values of all buckets are sent, with or without a gradient on some rank, and only the rank with a
// problem knows of it.
ZeroCore::Start ZeroCore::StartAhead(const Groups& groups) {
  Start start;
  if (const int64_t problem = Problem(groups, /*stepping=*/true); problem != 0) {
    start.torn = problem % kReasons == kTorn;  // the same on all ranks, see AskAll()
    start.error = Explain(problem, group_->rank());
    if (!start.torn) group_->report_failure(start.error);
    return start;
  }
  CompareRates(groups);
  start.buckets.assign(parameters_.plan().buckets().size(), true);
  return start;
}

// Sends the learning rates of this step, and compares those of earlier steps that have arrived.
void ZeroCore::CompareRates(const Groups& groups) {
  const at::Device device = group_->device();
  at::Tensor mine = HostTensorFor(device, group_->size(), at::kLong).zero_();
  mine.mutable_data_ptr<int64_t>()[group_->rank()] = RatesOf(groups);
  at::Tensor words = mine.to(device, /*non_blocking=*/true);
  group_->all_reduce(words);
  Rates sent{.words = HostTensorFor(device, group_->size(), at::kLong),
             .arrived = c10::Event(device.type())};
  sent.words.copy_(words, /*non_blocking=*/true);
  sent.arrived.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  rates_.push_back(std::move(sent));
  for (; !rates_.empty() && rates_.front().arrived.query(); rates_.pop_front()) {
    if (group_->failed()) return;  // the abort has ended the sum, whose words mean nothing
    const auto* const all = rates_.front().words.const_data_ptr<int64_t>();
    const auto* const other =
        std::find_if(all, all + group_->size(), [&](int64_t rates) { return rates != all[0]; });
    if (other == all + group_->size()) continue;
    const std::string message = Explain(Word(kRates), static_cast<int>(other - all));
    group_->report_failure(message);
    throw ConfigurationError(message);
  }
}

void ZeroCore::FinishEarlier(const char* what) {
  group_->ensure_usable();
  Guard(what, [&] {
    FollowIncarnation();
    Wait();
  });
}

void ZeroCore::BeginJoin() {
  Guard("the beginning of a Join", [&] { FollowIncarnation(); });
  if (values_ != Values::kTorn) return;
  throw ReductionError(absl::StrCat("rank ", group_->rank(), ": ", kTornText));
}

void ZeroCore::Start::ThrowError() const {
  if (torn) throw ReductionError(error);
  if (!error.empty()) throw ConfigurationError(error);
}

void ZeroCore::Step(Groups& groups, const JoinRound* round) {
  if (round == nullptr) group_->ensure_usable();
  const bool joined = round != nullptr && HasJoined(*round, group_->rank());
  Start start;
  GuardStep([&] {
    FollowIncarnation();
    Wait();
    const bool ahead = RunsAhead() && round == nullptr;
    start = ahead ? StartAhead(groups) : Exchange(groups, /*stepping=*/true, joined);
  });
  // The same on all ranks, or reported: no failure that Guard() must tell.
  start.ThrowError();
  GuardStep([&] {
    if (start.publish) transfer_.peers().Publish();
    Update(groups, round, start.buckets);
  });
}

// A peer may be further, and write into this rank's parameters.
void ZeroCore::GuardStep(const std::function<void()>& function) {
  try {
    Guard("the step of a ZeroRedundancyOptimizer", function);
  } catch (...) {
    transfer_.AbandonPeers();
    throw;
  }
}

void ZeroCore::Update(Groups& groups, const JoinRound* round, const std::vector<bool>& buckets) {
  const at::NoGradGuard no_grad;
  ++version_;
  *in_context_ = false;
  parameters_.FollowMemory();
  parameters_.TakeGradients();
  if (round != nullptr && round->num_active() < group_->size()) {
    ServeJoinedRanks(*group_, *round, parameters_, groups);
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    inner_->param_groups()[g].set_options(groups[g].options().clone());
  }
  if (group_->size() > 1) values_ = Values::kOnTheirWay;
  proof_ = nullptr;
  inner_->step();
  parameters_.DropGradients();
  transfer_.Start(buckets);
  if (!transfer_.pending()) values_ = Values::kWhole;  // no gradients
  if (!options_.overlap_with_forward) Wait();
}

void ZeroCore::FollowIncarnation() {
  if (group_->incarnation() != incarnation_) AskAll();
  if (!different_.empty()) throw ReductionError(different_);
}

// The first collective after a failure. Its size does not depend on what the ranks have.
void ZeroCore::AskAll() {
  incarnation_ = group_->incarnation();
  try {
    Wait();  // the transfers may have been complete before the failure
  } catch (const CommunicationError&) {
    transfer_.Drop();
  }
  const bool proven = proof_ != nullptr && *proof_ == DeviceOutcome::kProven;
  const bool arrived = values_ == Values::kWhole || (values_ == Values::kUnproven && proven);
  const bool torn = !arrived || transfer_.peers().written();
  values_ = torn ? Values::kTorn : Values::kWhole;  // also where the question below fails
  rates_.clear();
  transfer_.peers().Forget();
  at::Tensor words = at::zeros({1 + group_->size()}, at::kLong);
  const auto count = static_cast<int64_t>(parameters_.tensors().size());
  words.mutable_data_ptr<int64_t>()[0] = torn ? 1 : 0;
  words.mutable_data_ptr<int64_t>()[1 + group_->rank()] = count;
  words = words.to(group_->device());
  group_->all_reduce(words);
  words = group_->to_host(words);
  const auto* const all = words.const_data_ptr<int64_t>();
  values_ = all[0] > 0 ? Values::kTorn : Values::kWhole;
  for (int rank = 1; rank < group_->size(); ++rank) {
    if (all[1 + rank] == all[1]) continue;
    different_ = absl::StrCat(
        "a failure has interrupted add_param_group() of a ZeroRedundancyOptimizer, which has ",
        all[1], " parameters on rank 0 and ", all[1 + rank], " on rank ", rank,
        ": make a new optimizer");
  }
}

void ZeroCore::OnForward(bool collective) {
  if (collective) FollowIncarnation();
  if (values_ != Values::kTorn) {
    try {
      Wait();
    } catch (const CommunicationError&) {
      if (group_->incarnation() == incarnation_) throw;
    }
    if (values_ != Values::kOnTheirWay && !transfer_.peers().written()) return;
  }
  const std::string message = absl::StrCat("rank ", group_->rank(), ": ", kTornText);
  // Only this rank may know of the loss, and the others may wait for it.
  if (values_ != Values::kTorn) group_->report_failure(message);
  throw ReductionError(message);
}

void ZeroCore::Wait() {
  if (!transfer_.pending()) return;
  const int changed = transfer_.Finish();
  if (changed >= 0) {
    const std::string message = absl::StrCat(
        "rank ", group_->rank(), ": parameter ", changed,
        " of a ZeroRedundancyOptimizer got other memory while its new value was on its way: call "
        "wait() before set_data(), to() and the like");
    group_->report_failure(message);
    throw ReductionError(message);
  }
  values_ = RunsAhead() ? Values::kUnproven : Values::kWhole;
  if (RunsAhead()) proof_ = group_->communicator().Prove(group_->device());
}

void ZeroCore::FinishJoin(Groups& groups, bool is_last_joiner, int last_joiner) {
  Wait();
  SendOptions(*group_, last_joiner, /*take=*/!is_last_joiner, groups);
}

// ---- Gradients ----

double ZeroCore::ClipGradNorm(double max_norm, bool under_join) {
  const at::NoGradGuard no_grad;
  double norm = 0;
  Guard("clip_grad_norm()", [&] {
    Wait();
    at::Tensor squares = at::zeros({1}, at::TensorOptions(group_->device()).dtype(at::kDouble));
    const auto add = [&squares](const at::Tensor& gradient) {
      if (gradient.defined()) squares += gradient.norm(2, at::kDouble).square();
    };
    if (under_join) {
      for (const at::Tensor& tensor : parameters_.tensors()) add(tensor.grad());
    } else {
      parameters_.TakeGradients();
      for (const ShardedParameters::Mine& mine : parameters_.mine()) add(mine.view.grad());
      parameters_.DropGradients();
      group_->all_reduce(squares);
    }
    norm = std::sqrt(group_->to_host(squares).item<double>());
    const double factor = max_norm / (norm + 1e-6);
    if (factor >= 1) return;
    for (const at::Tensor& tensor : parameters_.tensors()) {
      if (tensor.grad().defined()) tensor.mutable_grad().mul_(factor);
    }
  });
  return norm;
}

}  // namespace ddp::internal
