#include "ddp/option_table.h"

#include <iterator>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/aggregate_fields.h"
#include "ddp/common/error.h"
#include "ddp/model/model_metadata.h"
#include "ddp/options.h"
#include "ddp/reducer/buckets/bucket_limits.h"

namespace ddp::internal {
namespace {

using Options = DistributedDataParallelOptions;
using Items = std::vector<OptionRow::Item>;

std::string TypeText(const std::optional<at::ScalarType>& dtype) {
  return dtype.has_value() ? c10::toString(*dtype) : "as it is";
}

// Returns a field's default as text.
template <auto field>
std::string Default() {
  const Options defaults;
  const auto& value = (defaults.*field)();
  if constexpr (std::is_same_v<decltype(value), const bool&>) {
    return value ? "true" : "false";
  } else if constexpr (requires { value.empty(); }) {
    return value.empty() ? "empty" : "not empty";
  } else if constexpr (requires { value.defined(); }) {
    return value.defined() ? "set" : "unset";
  } else {
    return value ? "set" : "unset";
  }
}

// ---- Items

template <auto field>
Items Value(const std::string& name, const Options& options) {
  return {{name, absl::StrCat((options.*field)())}};
}

template <auto field>
Items Size(const std::string& name, const Options& options) {
  return {{absl::StrCat(name, ".size()"), absl::StrCat((options.*field)().size())}};
}

template <auto field>
Items HasValue(const std::string& name, const Options& options) {
  return {{absl::StrCat(name, ".has_value()"), absl::StrCat((options.*field)().has_value())}};
}

Items ForwardSyncBuffers(const std::string& name, const Options& options) {
  return {{std::string(name),
           absl::StrCat(options.forward_sync_buffers.value_or(options.broadcast_buffers()))}};
}

Items BucketCaps(const std::string&, const Options& options) {
  if (HasAutoCap(options)) return {{"bucket_caps", "auto"}};
  return {{"bucket_caps", absl::StrJoin(BucketLimitsOf(options), " ")}};
}

Items IgnoredNames(const std::string& name, const Options& options) {
  Items items;
  for (const std::string& ignored : options.params_and_buffers_to_ignore()) {
    items.emplace_back(name, ignored);
  }
  return items;
}

Items DelayedNames(const std::string& name, const Options& options) {
  Items items;
  for (const auto& [delayed, tensor] : options.delay_all_reduce_named_params()) {
    items.emplace_back(name, delayed);
  }
  return items;
}

Items Precision(const std::string& name, const Options& options) {
  if (!options.mixed_precision.has_value()) return {{name, "not set"}};
  const MixedPrecision& config = *options.mixed_precision;
  return {{name, "set"},
          {absl::StrCat(name, ".param_dtype"), TypeText(config.param_dtype())},
          {absl::StrCat(name, ".reduce_dtype"), TypeText(config.reduce_dtype())},
          {absl::StrCat(name, ".buffer_dtype"), TypeText(config.buffer_dtype())},
          {absl::StrCat(name, ".cast_forward_inputs"), absl::StrCat(config.cast_forward_inputs())}};
}

Items LayoutOfBuckets(const std::string& name, const Options& options) {
  Items items;
  for (const std::vector<std::string>& bucket : options.bucket_layout()) {
    items.emplace_back(name, absl::StrJoin(bucket, " "));
  }
  return items;
}

// ---- Values in the logging data

template <auto field>
constexpr LoggedOption<bool> LoggedFlag(const char* key, bool DDPLoggingData::*into) {
  return {key, into, [](const Options& options) -> bool { return (options.*field)(); }};
}

int64_t BucketCapBytes(const Options& options) { return BucketLimitsOf(options).back(); }

std::string DeviceIds(const Options& options) { return absl::StrJoin(options.device_ids(), ", "); }

int64_t OutputDevice(const Options& options) { return options.output_device.value_or(-1); }

// ---- The table

// The first two columns of a row.
#define FIELD(field) .name = #field, .default_value = Default<&Options::field>
// A flag that is compared, and a flag that is also in the logging data.
#define COMPARED_FLAG(field) FIELD(field), .items = Value<&Options::field>, .agreement = "its value"
#define LOGGED_FLAG(field) \
  COMPARED_FLAG(field), .logged = LoggedFlag<&Options::field>(#field, &DDPLoggingData::field)

constexpr OptionRow kRows[] = {
    {FIELD(process_group), .effect = "The group over whose ranks gradients are averaged."},
    {FIELD(device_mesh), .effect = "A one-dimensional mesh in place of `process_group`."},
    {COMPARED_FLAG(init_sync),
     .effect = "The constructor copies rank 0's parameters and buffers to all ranks."},
    {FIELD(check_parameters_every), .items = Value<&Options::check_parameters_every>,
     .agreement = "its value",
     .effect =
         "Every so many forwards, the parameters of all ranks are compared (not in PyTorch)."},
    {LOGGED_FLAG(broadcast_buffers),
     .effect = "Every synchronized forward first copies rank 0's buffers to all ranks."},
    {FIELD(forward_sync_buffers), .items = ForwardSyncBuffers,
     .agreement = "its value, or that of `broadcast_buffers` where it is unset",
     .effect = "Overrides `broadcast_buffers` for forwards only."},
    {FIELD(bucket_cap_mb), .items = BucketCaps, .agreement = "the limits in bytes",
     .logged = LoggedOption<int64_t>{"bucket_cap_bytes", &DDPLoggingData::bucket_cap_bytes,
                                     BucketCapBytes},
     .effect = "The size in MiB at which a gradient bucket is closed; unset: 25; `kAuto`: picked "
               "from measured costs."},
    {FIELD(first_bucket_cap_mb), .agreement = "the limits in bytes",
     .effect = "The size in MiB of the bucket that is ready first; unset: 1, or `bucket_cap_mb` "
               "where that is set."},
    {FIELD(bucket_cap_mb_list), .agreement = "the limits in bytes",
     .effect = "One limit in MiB for each bucket in turn, in place of the two options above."},
    {LOGGED_FLAG(gradient_as_bucket_view), .effect = "Gradients are views of the buckets."},
    {COMPARED_FLAG(batched_grad_copy),
     .effect = "The gradients of a bucket are copied in one operation when all are ready."},
    {COMPARED_FLAG(lazy_bucket_allocation),
     .effect = "A bucket is allocated at its first gradient and freed at the end of the backward."},
    {COMPARED_FLAG(reduce_in_place),
     .effect = "Ranks of one host average gradients where they lie (not in PyTorch)."},
    {FIELD(arena_bytes),
     .effect = "The most memory of the arena for that; unset: twice the gradients (not in "
               "PyTorch)."},
    // Ranks of one host name different GPUs.
    {FIELD(device_ids), .items = Size<&Options::device_ids>, .agreement = "the number of devices",
     .logged = LoggedOption<std::string>{"device_ids", &DDPLoggingData::device_ids, DeviceIds},
     .effect = "The one GPU that holds the module and to which inputs are moved."},
    {FIELD(output_device), .items = HasValue<&Options::output_device>,
     .agreement = "whether it is set",
     .logged = LoggedOption<int64_t>{"output_device", &DDPLoggingData::output_device, OutputDevice},
     .effect = "The GPU to which outputs are moved."},
    {LOGGED_FLAG(find_unused_parameters),
     .effect = "Some parameters may get no gradient in some iterations."},
    {LOGGED_FLAG(static_graph), .effect = "The graph is the same in every iteration."},
    {COMPARED_FLAG(skip_all_reduce_unused_params),
     .effect = "Buckets in which no rank used any parameter are not sent."},
    {FIELD(params_and_buffers_to_ignore), .items = IgnoredNames, .agreement = "the names",
     .effect = "Names of parameters and buffers that are neither copied nor reduced."},
    {FIELD(delay_all_reduce_named_params), .items = DelayedNames,
     .agreement = "the names, in order",
     .effect = "Parameters whose gradients are averaged in one tensor outside of the buckets."},
    {FIELD(param_to_hook_all_reduce),
     .effect = "The parameter whose gradient starts that average."},
    {COMPARED_FLAG(require_manual_backward_finalization),
     .effect = "The backward does not wait for the averages; `finalize_backward()` does."},
    {FIELD(mixed_precision), .items = Precision, .agreement = "each of its fields",
     .effect = "Lower precision in forward and backward."},
    {FIELD(bucket_layout), .items = LayoutOfBuckets, .agreement = "the names, in order",
     .effect = "The buckets of an earlier run, as names of parameters (not in PyTorch)."},
};

#undef LOGGED_FLAG
#undef COMPARED_FLAG
#undef FIELD

static_assert(std::size(kRows) == aggregate::Count<Options>(),
              "each field of DistributedDataParallelOptions has one row in kRows");

}  // namespace

std::span<const OptionRow> OptionTable() { return kRows; }

bool HasAutoCap(const Options& options) { return options.bucket_cap_mb() == kAuto; }

std::vector<int64_t> BucketLimitsOf(const Options& options) {
  const auto cap = HasAutoCap(options) ? std::nullopt : options.bucket_cap_mb();
  const auto limits = BucketLimits({.bucket_cap_mb = cap,
                                    .first_bucket_cap_mb = options.first_bucket_cap_mb(),
                                    .bucket_cap_mb_list = options.bucket_cap_mb_list()});
  if (!limits.ok()) throw ConfigurationError(std::string(limits.status().message()));
  return *limits;
}

void AddOptions(const Options& options, ModelMetadata& metadata) {
  for (const OptionRow& row : kRows) {
    if (row.items == nullptr) continue;
    for (const auto& [name, value] : row.items(row.name, options)) metadata.AddOption(name, value);
  }
}

void FillOptions(const Options& options, DDPLoggingData& data) {
  ForEachLoggedOption([&](const auto& logged) { data.*logged.field = logged.value(options); });
}

}  // namespace ddp::internal
