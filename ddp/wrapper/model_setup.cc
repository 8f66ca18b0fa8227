#include "ddp/wrapper/model_setup.h"

#include <algorithm>
#include <utility>

#include <ATen/DeviceAccelerator.h>

#include "absl/strings/str_cat.h"
#include "base/environment.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/device_mesh.h"
#include "ddp/mixed_precision/mixed_precision_parameters.h"
#include "ddp/model/model_tensors.h"
#include "ddp/process_group.h"
#include "ddp/reducer/buckets/flat_buckets.h"
#include "ddp/reducer/buckets/in_place_reduction.h"
#include "ddp/reducer/buckets/local_reduction.h"
#include "ddp/transfer/copy_to_device.h"
#include "ddp/wrapper/option_table.h"

namespace ddp::internal {
namespace {

// The environment variable that gives the last bucket the first one's limit; as in PyTorch.
constexpr char kSmallLastBucket[] = "DDP_SET_LAST_BUCKET_CAP";

bool IsSet(const char* variable) { return EnvironmentVariable(variable) == "1"; }

// Returns device `index` of the accelerator that this process has; without one, a GPU.
at::Device Accelerator(int index) {
  return {at::getAccelerator().value_or(at::kCUDA), static_cast<at::DeviceIndex>(index)};
}

bool CastsInputs(const DistributedDataParallelOptions& options) {
  return options.mixed_precision.has_value() && options.mixed_precision->param_dtype.has_value() &&
         options.mixed_precision->cast_forward_inputs;
}

// A hook that stays on the old group would average over wrong ranks, or hang.
template <typename GroupHook, typename Hook>
void CheckFollowsAs(const Hook& hook, const std::string& what,
                    const std::shared_ptr<ProcessGroup>& group) {
  if (!hook) return;
  const auto* bound = hook.template target<GroupHook>();
  if (bound != nullptr && bound->group == group) return;
  throw ConfigurationError(absl::StrCat(
      what,
      " has a state other than the model's process group, so update_process_group cannot give it "
      "the new group: construct a new DistributedDataParallel over the new group with "
      "init_sync=false, and register the hook there"));
}

}  // namespace

DistributedDataParallelOptions WithGroup(DistributedDataParallelOptions options,
                                         std::shared_ptr<ProcessGroup> group) {
  if (options.process_group && options.process_group != group) {
    throw ConfigurationError(
        "the constructor's process group and options.process_group are two different ones");
  }
  options.process_group = std::move(group);
  return options;
}

std::shared_ptr<ProcessGroup> GroupOf(const DistributedDataParallelOptions& options) {
  if (options.process_group && options.device_mesh) {
    throw ConfigurationError("process_group and device_mesh are both set: give one of them");
  }
  if (!options.device_mesh) return options.process_group;
  if (options.device_mesh->ndim() != 1) {
    throw ConfigurationError(absl::StrCat("device_mesh has ", options.device_mesh->ndim(),
                                          " dimensions: data parallelism takes a mesh of one; "
                                          "slice it by the dimension's name"));
  }
  return options.device_mesh->get_group(0);
}

void CheckOptions(const DistributedDataParallelOptions& options) {
  const auto fail = [](const std::string& message) { throw ConfigurationError(message); };
  if (options.device_ids.size() > 1) {
    fail("device_ids holds more than one device: one process drives one GPU; start one per GPU");
  }
  if (options.output_device.has_value() && options.device_ids.empty()) {
    fail("output_device is set without device_ids");
  }
  if (!options.bucket_cap_mb_list.empty() &&
      (options.bucket_cap_mb.has_value() || options.first_bucket_cap_mb.has_value())) {
    fail("bucket_cap_mb_list stands for bucket_cap_mb and first_bucket_cap_mb: set it alone");
  }
  if (options.arena_bytes.has_value() && *options.arena_bytes < 1) {
    fail("arena_bytes is the most memory of the arena: set it to 1 or more, or leave it unset");
  }
  if (options.check_parameters_every < 0) {
    fail("check_parameters_every is a number of forwards: set it to 1 or more, or to 0 for never");
  }
  if (options.delay_all_reduce_named_params.empty() !=
      !options.param_to_hook_all_reduce.defined()) {
    fail("delay_all_reduce_named_params and param_to_hook_all_reduce go together: set both");
  }
  if (options.lazy_bucket_allocation && options.gradient_as_bucket_view) {
    fail(
        "lazy_bucket_allocation frees the buckets that gradient_as_bucket_view keeps the gradients "
        "in: set one of them");
  }
  if (options.skip_all_reduce_unused_params && !options.find_unused_parameters &&
      !options.static_graph) {
    fail("skip_all_reduce_unused_params needs find_unused_parameters or static_graph");
  }
  if (options.mixed_precision.has_value()) CheckMixedPrecision(*options.mixed_precision);
  if (options.static_graph && options.find_unused_parameters) {
    LOG(WARNING) << "static_graph finds unused parameters by itself, once: "
                    "find_unused_parameters changes nothing";
  }
}

void CheckPlacement(const DistributedDataParallelOptions& options, const ModelTensors& tensors,
                    const ProcessGroup& group) {
  if (tensors.trainable.empty()) {
    throw ConfigurationError(
        "the model has no parameter that requires a gradient, so there is nothing to average: use "
        "it without DistributedDataParallel");
  }
  tensors.CheckDevices(group.device(), group.backend());
  for (const auto& item : tensors.trainable) {
    if (!item.sparse || group.device().is_cpu()) continue;
    throw ConfigurationError(absl::StrCat(
        "parameter ", item.name, " gets sparse gradients, which the backend ", group.backend(),
        " does not reduce on ", group.device().str(), ": set sparse(false) in its Embedding"));
  }
  if (options.device_ids.empty()) return;
  const int wanted = options.device_ids.front();
  for (const NamedTensor& item : tensors.parameters) {
    const at::Device device = item.tensor.device();
    if (device == Accelerator(wanted)) continue;
    throw ConfigurationError(absl::StrCat(
        "device_ids={", wanted, "}, but parameter ", item.name, " is on ", device.str(),
        ": leave device_ids empty for a module on the CPU, or move the module there"));
  }
}

bool PlacesInputs(const DistributedDataParallelOptions& options) {
  return !options.device_ids.empty() || CastsInputs(options);
}

at::Tensor PlaceInput(const DistributedDataParallelOptions& options, const at::Tensor& input) {
  at::Tensor placed = input;
  if (!options.device_ids.empty())
    placed = CopyToDevice(input, Accelerator(options.device_ids.front()));
  if (CastsInputs(options)) placed = CastInput(placed, *options.mixed_precision->param_dtype);
  return placed;
}

at::Tensor PlaceOutput(const DistributedDataParallelOptions& options, const at::Tensor& output) {
  return output.to(Accelerator(*options.output_device));
}

std::vector<Reducer::Parameter> ReducedParameters(const DistributedDataParallelOptions& options,
                                                  const ModelTensors& tensors) {
  std::vector<Reducer::Parameter> reduced;
  for (const TrainableParameter& item : tensors.trainable) {
    reduced.push_back({.name = item.name, .tensor = item.tensor, .sparse = item.sparse});
  }
  for (const auto& delayed : options.delay_all_reduce_named_params) {
    const auto found =
        std::find_if(reduced.begin(), reduced.end(),
                     [&](const Reducer::Parameter& p) { return p.tensor.is_same(delayed.second); });
    if (found == reduced.end()) {
      throw ConfigurationError(absl::StrCat("delay_all_reduce_named_params: ", delayed.first,
                                            " is no parameter of the model that requires a "
                                            "gradient, or is there twice"));
    }
    reduced.erase(found);
  }
  return reduced;
}

std::optional<BucketPlan> GivenPlan(const std::vector<std::vector<std::string>>& layout,
                                    const std::vector<Reducer::Parameter>& parameters) {
  if (layout.empty()) return std::nullopt;
  std::vector<std::string> names;
  std::vector<BucketPlan::Tensor> tensors;
  for (const Reducer::Parameter& parameter : parameters) {
    names.push_back(parameter.name);
    // A number for the type and device; parameters with equal numbers may share a bucket.
    tensors.push_back({.bytes = 0,
                       .kind = static_cast<int>(parameter.tensor.scalar_type()) * 1024 +
                               static_cast<int>(parameter.tensor.device().type()) * 64 +
                               parameter.tensor.device().index() + 1,
                       .sparse = parameter.sparse});
  }
  absl::StatusOr<BucketPlan> plan = BucketPlan::FromNames(layout, names, tensors);
  if (!plan.ok()) {
    throw ConfigurationError(absl::StrCat("bucket_layout does not fit the model: ",
                                          std::string(plan.status().message())));
  }
  return *std::move(plan);
}

Reducer::Options ReducerOptionsOf(const DistributedDataParallelOptions& options,
                                  const std::vector<Reducer::Parameter>& reduced) {
  const FlatBuckets::Options flat{.gradient_as_view = options.gradient_as_bucket_view,
                                  .batched_copy = options.batched_grad_copy,
                                  .lazy = options.lazy_bucket_allocation};
  const bool needs_flat = options.gradient_as_bucket_view || options.lazy_bucket_allocation ||
                          options.mixed_precision.has_value();
  GradientBuckets::Factory make_buckets = FlatBuckets::MakerOf(flat);
  if (!needs_flat && options.reduce_in_place) {
    make_buckets =
        InPlaceReduction::MakerOf({.arena_bytes = options.arena_bytes.value_or(0), .flat = flat});
  }
  if (!needs_flat) make_buckets = LocalReduction::MakerOf(std::move(make_buckets));
  return {.initial_limits_bytes = BucketLimitsOf(options),
          .rebuild_limits_bytes = BucketLimitsOf(options),
          .last_bucket_is_small = IsSet(kSmallLastBucket),
          .plan = GivenPlan(options.bucket_layout, reduced),
          .find_unused_parameters = options.find_unused_parameters,
          .static_graph = options.static_graph,
          .skip_unused_buckets = options.skip_all_reduce_unused_params,
          .make_buckets = std::move(make_buckets),
          .make_hook_buckets = FlatBuckets::MakerOf(flat)};
}

void CheckFollows(const CommHook& hook, const std::string& what,
                  const std::shared_ptr<ProcessGroup>& group) {
  CheckFollowsAs<GroupCommHook>(hook, what, group);
}

void CheckFollows(const BufferCommHook& hook, const std::string& what,
                  const std::shared_ptr<ProcessGroup>& group) {
  CheckFollowsAs<GroupBufferCommHook>(hook, what, group);
}

ModelMetadata MetadataOf(const DistributedDataParallelOptions& options,
                         const ModelTensors& tensors) {
  ModelMetadata metadata;
  AddOptions(options, metadata);
  metadata.AddOption(kSmallLastBucket, absl::StrCat(IsSet(kSmallLastBucket)));
  tensors.Describe(metadata);
  return metadata;
}

ModelMetadata HookMetadataOf(const std::string& name, int rounds, const std::string& buffer_hook) {
  const std::string of_rounds = rounds > 1 ? absl::StrCat(" of ", rounds, " rounds") : "";
  ModelMetadata metadata;
  metadata.AddOption("comm_hook",
                     name.empty() ? "none" : absl::StrCat("\"", name, "\"", of_rounds));
  metadata.AddOption("buffer_comm_hook", buffer_hook);
  return metadata;
}

}  // namespace ddp::internal
