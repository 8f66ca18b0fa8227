#include "ddp/nn/sync_batch_norm.h"

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/common/error.h"
#include "ddp/nn/joint_batch_norm.h"
#include "ddp/process_group/model_group.h"
#include "ddp/statistics/statistics_context.h"

namespace ddp::internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;

// A function of autograd takes no undefined tensor.
OptionalTensor Given(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// The type in which the numbers of `tensor` are computed.
at::ScalarType ComputeType(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// All dimensions but that of the channels.
std::vector<int64_t> ReducedDimensions(const at::Tensor& input) {
  std::vector<int64_t> dimensions = {0};
  for (int64_t d = 2; d < input.dim(); ++d) dimensions.push_back(d);
  return dimensions;
}

// Returns [C] as [1, C, 1, ...], to be used with `input`.
at::Tensor ByChannel(const at::Tensor& values, const at::Tensor& input) {
  std::vector<int64_t> sizes(input.dim(), 1);
  sizes[1] = values.numel();
  return values.view(sizes);
}

int64_t ValuesPerChannel(const at::Tensor& input) {
  int64_t count = input.size(0);
  for (int64_t d = 2; d < input.dim(); ++d) count *= input.size(d);
  return count;
}

// ---- Forward.

// The statistics of one forward, kept for its backward.
struct Joint : torch::CustomClassHolder {
  explicit Joint(StatisticsRanks all_ranks) : ranks(std::move(all_ranks)) {}

  StatisticsRanks ranks;
  bool input_gradient = false;  // the backward has a collective: the same on all ranks
  bool mine = false;            // this rank needs the gradient of its input
  // On the input's device; the last two have the compute type.
  at::Tensor divisor;  // double, []: all ranks' values in a channel, at least 1
  at::Tensor mean;     // [C]
  at::Tensor inverse_deviation;
};

// Returns the matrix of all ranks' statistics, with this rank's row and zeros. The sum of all
// ranks' matrices holds every row without rounding. A row: C means, C sums of squares of the
// differences from the mean, the number of values in a channel, and 1 or 0 for input_gradient.
at::Tensor OwnRow(const at::Tensor& values, const StatisticsRanks& ranks, bool input_gradient) {
  const int64_t channels = values.size(1);
  const int64_t count = ValuesPerChannel(values);
  at::Tensor matrix =
      at::zeros({ranks.size(), 2 * channels + 2}, values.options().dtype(at::kDouble));
  at::Tensor row = matrix[ranks.rank()];
  if (count > 0) {
    const auto [variance, mean] = at::var_mean(values, ReducedDimensions(values), /*correction=*/0);
    row.narrow(0, 0, channels).copy_(mean);
    row.narrow(0, channels, channels).copy_(variance).mul_(static_cast<double>(count));
  }
  row.narrow(0, 2 * channels, 1).fill_(static_cast<double>(count));
  row.narrow(0, 2 * channels + 1, 1).fill_(input_gradient ? 1.0 : 0.0);
  return matrix;
}

// The joint batch; see Merge(). Doubles, on the device of the matrix.
struct Merged {
  at::Tensor count;    // []
  at::Tensor divisor;  // [], the count or 1
  at::Tensor mean;     // [C], zeros where no rank has a value
  at::Tensor squares;  // [C], the sum of (value - mean)^2
};

// All ranks merge the same rows, and so get the same bits. Never subtracts the squares of two
// means, so a large mean costs no accuracy: Chan, Golub and LeVeque, "Updating Formulae and a
// Pairwise Algorithm for Computing Sample Variances", 1979.
Merged Merge(const at::Tensor& matrix) {
  const int64_t channels = matrix.size(1) / 2 - 1;
  const at::Tensor counts = matrix.narrow(1, 2 * channels, 1);
  const at::Tensor means = matrix.narrow(1, 0, channels);
  Merged all;
  all.count = counts.sum();
  all.divisor = all.count.clamp_min(1);
  all.mean = (means * (counts / all.divisor)).sum(0);
  all.squares =
      ((means - all.mean).square_().mul_(counts).add_(matrix.narrow(1, channels, channels))).sum(0);
  return all;
}

// `share`: [], of the new value; without values in the batch nothing changes.
void UpdateRunning(const at::Tensor& running, const at::Tensor& value, const at::Tensor& share) {
  if (!running.defined()) return;
  const at::Tensor part = share.to(running.device());
  const at::Tensor old = running.to(at::kDouble);
  running.copy_(old * (1 - part) + value.to(running.device()) * part);
}

// Counts the batch, and returns its share in the running statistics: a double, []. `batches`: [],
// 1, or 0 for a batch without values.
at::Tensor CountBatch(const BatchNormCall& call, const at::Tensor& batches) {
  const at::NoGradGuard no_grad;
  const at::Tensor& count = call.num_batches_tracked;
  if (count.defined()) count.add_(batches.to(count.options()));
  if (!call.momentum.has_value() && count.defined()) {
    return count.to(at::kDouble).clamp_min(1).reciprocal();
  }
  return at::scalar_tensor(call.momentum.value_or(0), call.input.options().dtype(at::kDouble));
}

void ThrowOneValue() {
  throw ConfigurationError(
      "a SyncBatchNorm in training needs more than one value in each channel, over the batches of "
      "all ranks together, and there is one");
}

// On a device the host never waits for the numbers. So there every rank that builds a graph has the
// collective of the backward, needed or not, and one value in all is not refused.
c10::intrusive_ptr<Joint> MeetRanks(const BatchNormCall& call, const at::Tensor& values,
                                    StatisticsRanks ranks, bool needs_input) {
  const bool builds_graph = at::GradMode::is_enabled();
  const at::NoGradGuard no_grad;
  auto joint = c10::make_intrusive<Joint>(std::move(ranks));
  joint->mine = needs_input;
  const at::Tensor matrix = joint->ranks.Sum(OwnRow(values, joint->ranks, joint->mine),
                                             "the batch statistics of a SyncBatchNorm");
  const Merged all = Merge(matrix);
  if (matrix.is_cpu()) {
    if (all.count.item<double>() == 1) ThrowOneValue();
    joint->input_gradient = matrix.select(1, matrix.size(1) - 1).sum().item<double>() > 0;
  } else {
    joint->input_gradient = builds_graph;
  }
  if (StatisticsReplay::Current() == nullptr) {
    const at::Tensor batches = all.count.sign();
    const at::Tensor share = CountBatch(call, batches).to(matrix.device()) * batches;
    UpdateRunning(call.running_mean, all.mean, share);
    UpdateRunning(call.running_var, all.squares / (all.count - 1).clamp_min_(1), share);
  }
  const auto options = values.options();
  joint->divisor = all.divisor;
  joint->mean = all.mean.to(options);
  joint->inverse_deviation = (all.squares / all.divisor + call.eps).rsqrt().to(options);
  return joint;
}

// ---- Autograd.

// The difference from the mean comes first: a large mean then costs no accuracy.
at::Tensor Normalize(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                     const Joint& joint) {
  const at::ScalarType type = ComputeType(input);
  at::Tensor output = input.to(type).sub(ByChannel(joint.mean, input));
  at::Tensor scale = joint.inverse_deviation;
  if (weight.defined()) scale = scale * weight.to(type);
  output.mul_(ByChannel(scale, input));
  if (bias.defined()) output.add_(ByChannel(bias.to(type), input));
  return output.to(input.scalar_type());
}

// The gradients of input, weight and bias; undefined where not needed.
//
// With d = x - mean, s = 1 / sqrt(variance + eps), n values in the joint batch and sums over it:
//   dx = weight * s * (dy - sum(dy) / n - d * s^2 * sum(dy * d) / n)
// See Ioffe and Szegedy, "Batch Normalization", 2015. The gradients of weight and bias are those of
// this rank's values: the wrapper averages them with all other gradients.
variable_list Gradients(const at::Tensor& input, const at::Tensor& weight, bool has_bias,
                        const at::Tensor& gradient, const Joint& joint) {
  const at::ScalarType type = ComputeType(input);
  const int64_t channels = input.size(1);
  const std::vector<int64_t> dimensions = ReducedDimensions(input);
  const at::Tensor& deviation = joint.inverse_deviation;
  const at::Tensor dy = gradient.to(type);
  const at::Tensor difference = input.to(type).sub(ByChannel(joint.mean, input));
  const at::Tensor sum = dy.sum(dimensions);
  const at::Tensor product = (dy * difference).sum(dimensions);
  variable_list result(3);
  if (weight.defined()) result[1] = (product * deviation).to(weight.scalar_type());
  if (has_bias) result[2] = sum.to(weight.defined() ? weight.scalar_type() : type);
  if (!joint.input_gradient) return result;
  const at::Tensor sums = joint.ranks.Sum(at::cat({sum, product}).to(at::kDouble),
                                          "the gradient statistics of a SyncBatchNorm");
  if (!joint.mine) return result;
  const at::Tensor means = sums.div(joint.divisor).to(type);
  const at::Tensor slope = means.narrow(0, channels, channels) * deviation * deviation;
  at::Tensor scale = deviation;
  if (weight.defined()) scale = scale * weight.to(type);
  at::Tensor dx = dy.sub(ByChannel(means.narrow(0, 0, channels), input));
  dx.sub_(difference.mul(ByChannel(slope, input)));
  dx.mul_(ByChannel(scale, input));
  result[0] = dx.to(input.scalar_type());
  return result;
}

// Passes a gradient on, and throws when the gradient itself is derived.
class NoSecondDerivative : public torch::autograd::Function<NoSecondDerivative> {
 public:
  // The tensors after the first are those on which the gradient depends.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& value,
                            const at::Tensor& gradient, const at::Tensor& input,
                            const OptionalTensor& weight) {
    return value.clone();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    throw ConfigurationError(
        "a SyncBatchNorm has no second derivatives: leave it out of a graph that is derived twice, "
        "or call eval() on it there");
  }
};

class SyncBatchNormFunction : public torch::autograd::Function<SyncBatchNormFunction> {
 public:
  // `marker` requires a gradient when no other tensor does and the backward has a collective.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const OptionalTensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& marker, c10::intrusive_ptr<Joint> joint) {
    const at::Tensor scale = weight.value_or(at::Tensor());
    context->save_for_backward({input, scale});
    context->saved_data["has_bias"] = bias.has_value();
    context->saved_data["joint"] = c10::IValue::make_capsule(joint);
    return Normalize(input, scale, bias.value_or(at::Tensor()), *joint);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    const auto holder = context->saved_data["joint"].toCapsule();
    const bool create_graph = at::GradMode::is_enabled();
    variable_list result;
    {
      const at::NoGradGuard no_grad;
      result = Gradients(input, weight, context->saved_data["has_bias"].toBool(), gradients[0],
                         static_cast<const Joint&>(*holder));
    }
    for (at::Tensor& value : result) {
      if (!create_graph || !value.defined()) continue;
      value = NoSecondDerivative::apply(value, gradients[0], input, Given(weight));
    }
    result.resize(5);  // the marker and the statistics have none
    return result;
  }
};

// The batch norm of a group of one rank.
at::Tensor OwnBatchNorm(BatchNormCall call) {
  const int64_t count = ValuesPerChannel(call.input);
  if (count == 1) ThrowOneValue();
  if (count > 0 && StatisticsReplay::Current() == nullptr) {
    const at::Tensor share = CountBatch(call, at::ones({}, at::kLong));
    if (!call.momentum.has_value()) call.momentum = share.item<double>();
  }
  return LocalBatchNorm(call, /*training=*/true);
}

// A converted layer comes here with what its program gave it, unchecked.
void CheckCall(const BatchNormCall& call) {
  const at::Tensor& input = call.input;
  const auto fail = [](const std::string& what) {
    throw ConfigurationError(absl::StrCat("a SyncBatchNorm got ", what));
  };
  const auto shape = [](const at::Tensor& tensor) {
    return absl::StrCat("[", absl::StrJoin(tensor.sizes().vec(), ", "), "]");
  };
  if (!input.is_floating_point())
    fail(absl::StrCat("an input of the type ", at::toString(input.scalar_type())));
  if (input.dim() < 2) fail(absl::StrCat("an input of the shape ", shape(input)));
  for (const at::Tensor& own : {call.weight, call.bias, call.running_mean, call.running_var}) {
    if (!own.defined()) continue;
    if (own.numel() != input.size(1)) {
      fail(absl::StrCat("an input of the shape ", shape(input), " and has ", own.numel(),
                        " channels: the channels are the second dimension"));
    }
    const bool widened = input.element_size() < 4 && own.scalar_type() == at::kFloat;
    if (own.scalar_type() != input.scalar_type() && !widened) {
      fail(absl::StrCat("an input of the type ", at::toString(input.scalar_type()),
                        " and has parameters or ", "buffers of the type ",
                        at::toString(own.scalar_type())));
    }
  }
}

bool NeedsGradient(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

}  // namespace

at::Tensor JointBatchNorm(const BatchNormCall& call, const std::shared_ptr<ModelGroup>& group) {
  CheckCall(call);
  const at::Tensor& input = call.input;
  StatisticsRanks ranks = StatisticsRanks::OfForward(group);
  if (ranks.size() == 1) return OwnBatchNorm(call);
  const bool gradients = at::GradMode::is_enabled();
  const bool needs_input = gradients && input.requires_grad();
  auto joint =
      MeetRanks(call, input.detach().to(ComputeType(input)), std::move(ranks), needs_input);
  const bool has_node = needs_input || NeedsGradient(call.weight) || NeedsGradient(call.bias);
  at::Tensor marker;
  if (gradients && joint->input_gradient && !has_node) {
    marker = at::empty({0}, input.options()).requires_grad_();
    if (auto* const replay = StatisticsReplay::Current()) replay->AddMarker(marker);
  }
  return SyncBatchNormFunction::apply(input, Given(call.weight), Given(call.bias), Given(marker),
                                      joint);
}

at::Tensor LocalBatchNorm(const BatchNormCall& call, bool training) {
  const bool keeps = training && StatisticsReplay::Current() != nullptr;
  return at::native::batch_norm(
      call.input, call.weight, call.bias, keeps ? at::Tensor() : call.running_mean,
      keeps ? at::Tensor() : call.running_var, training, call.momentum.value_or(0), call.eps,
      at::globalContext().userEnabledCuDNN());
}

// ---- The layer.

std::shared_ptr<ModelGroup> ModelGroupOf(std::shared_ptr<ProcessGroup> group) {
  return group ? std::make_shared<ModelGroup>(std::move(group)) : nullptr;
}

void CheckInput(const at::Tensor& input, size_t dimensions, int64_t channels) {
  const int64_t most = static_cast<int64_t>(dimensions) + 2;
  const int64_t least = dimensions == 1 ? 2 : most;
  if (input.dim() >= least && input.dim() <= most && input.size(1) == channels) return;
  throw ConfigurationError(absl::StrCat(
      "SyncBatchNorm", dimensions, "d with ", channels, " channels got an input of the shape [",
      absl::StrJoin(input.sizes().vec(), ", "), "]: it takes ", most, least == most ? "" : " or 2",
      " dimensions, and the channels are the second one"));
}

at::Tensor RunSyncBatchNorm(const at::Tensor& input, const SyncBatchNormState& state) {
  const torch::nn::BatchNormOptions& options = state.options;
  const BatchNormCall call{.input = input,
                           .weight = state.weight,
                           .bias = state.bias,
                           .running_mean = state.running_mean,
                           .running_var = state.running_var,
                           .momentum = options.momentum(),
                           .num_batches_tracked = state.num_batches_tracked,
                           .eps = options.eps()};
  if (!state.training) return LocalBatchNorm(call, /*training=*/!options.track_running_stats());
  return JointBatchNorm(call, state.group);
}

void PrintSyncBatchNorm(std::ostream& stream, size_t dimensions,
                        const torch::nn::BatchNormOptions& options) {
  stream << "ddp::SyncBatchNorm" << dimensions << "d(" << options.num_features()
         << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum().has_value()) {
    stream << *options.momentum();
  } else {
    stream << "None";
  }
  stream << ", affine=" << (options.affine() ? "true" : "false")
         << ", track_running_stats=" << (options.track_running_stats() ? "true" : "false") << ")";
}

}  // namespace ddp::internal
