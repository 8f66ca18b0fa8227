#include "ddp/wrapper/option_table.h"

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
using Logged = DDPLoggingData;
using Items = OptionRow::Items;

template <auto field>
Items Value(const std::string& name, const Options& options) {
  return {{name, absl::StrCat(options.*field)}};
}

template <auto field, auto into>
void Log(const Options& options, Logged& data) {
  data.*into = options.*field;
}

// Returns an item named `name` for each element of `list`.
template <typename List, typename Text>
Items Each(const std::string& name, const List& list, Text text) {
  Items items;
  for (const auto& element : list) items.emplace_back(name, text(element));
  return items;
}

Items BucketCaps(const std::string&, const Options& options) {
  return {{"bucket_caps", absl::StrJoin(BucketLimitsOf(options), " ")}};
}

// Ranks of one host name different GPUs.
Items CountOfDevices(const std::string& name, const Options& options) {
  return {{absl::StrCat(name, ".size()"), absl::StrCat(options.device_ids.size())}};
}

Items HasOutputDevice(const std::string& name, const Options& options) {
  return {{absl::StrCat(name, ".has_value()"), absl::StrCat(options.output_device.has_value())}};
}

Items ForwardSyncBuffers(const std::string& name, const Options& options) {
  return {{name, absl::StrCat(options.forward_sync_buffers.value_or(options.broadcast_buffers))}};
}

Items IgnoredNames(const std::string& name, const Options& options) {
  return Each(name, options.params_and_buffers_to_ignore,
              [](const auto& ignored) { return ignored; });
}

Items DelayedNames(const std::string& name, const Options& options) {
  return Each(name, options.delay_all_reduce_named_params,
              [](const auto& delayed) { return delayed.first; });
}

Items Layout(const std::string& name, const Options& options) {
  return Each(name, options.bucket_layout,
              [](const auto& bucket) { return absl::StrJoin(bucket, " "); });
}

Items Precision(const std::string& name, const Options& options) {
  if (!options.mixed_precision.has_value()) return {{name, "not set"}};
  const MixedPrecision& config = *options.mixed_precision;
  const auto text = [](const std::optional<at::ScalarType>& dtype) -> std::string {
    return dtype.has_value() ? c10::toString(*dtype) : "as it is";
  };
  return {{name, "set"},
          {absl::StrCat(name, ".param_dtype"), text(config.param_dtype)},
          {absl::StrCat(name, ".reduce_dtype"), text(config.reduce_dtype)},
          {absl::StrCat(name, ".buffer_dtype"), text(config.buffer_dtype)},
          {absl::StrCat(name, ".cast_forward_inputs"), absl::StrCat(config.cast_forward_inputs)}};
}

// The first columns of an option that the ranks compare by value, and of one that is also logged.
#define COMPARED(field) #field, Value < &Options::field>
#define LOGGED(field) COMPARED(field), Log<&Options::field, &Logged::field>

constexpr OptionRow kRows[] = {
    {"process_group"},
    {"device_mesh"},
    {COMPARED(init_sync)},
    {COMPARED(check_parameters_every)},
    {LOGGED(broadcast_buffers)},
    {"forward_sync_buffers", ForwardSyncBuffers},
    {"bucket_cap_mb", BucketCaps,
     [](auto& options, auto& data) { data.bucket_cap_bytes = BucketLimitsOf(options).back(); }},
    {"first_bucket_cap_mb"},  // compared as bucket_caps
    {"bucket_cap_mb_list"},   // compared as bucket_caps
    {LOGGED(gradient_as_bucket_view)},
    {COMPARED(batched_grad_copy)},
    {COMPARED(lazy_bucket_allocation)},
    {COMPARED(reduce_in_place)},
    {"arena_bytes"},
    {"device_ids", CountOfDevices,
     [](auto& options, auto& data) { data.device_ids = absl::StrJoin(options.device_ids, ", "); }},
    {"output_device", HasOutputDevice,
     [](auto& options, auto& data) { data.output_device = options.output_device.value_or(-1); }},
    {LOGGED(find_unused_parameters)},
    {LOGGED(static_graph)},
    {COMPARED(skip_all_reduce_unused_params)},
    {"params_and_buffers_to_ignore", IgnoredNames},
    {"delay_all_reduce_named_params", DelayedNames},
    {"param_to_hook_all_reduce"},
    {COMPARED(require_manual_backward_finalization)},
    {"mixed_precision", Precision},
    {"bucket_layout", Layout},
};

#undef LOGGED
#undef COMPARED

static_assert(std::size(kRows) == aggregate::Count<Options>(),
              "each field of DistributedDataParallelOptions has one row in kRows");

}  // namespace

std::span<const OptionRow> OptionTable() { return kRows; }

std::vector<int64_t> BucketLimitsOf(const Options& options) {
  const auto limits = BucketLimits({.bucket_cap_mb = options.bucket_cap_mb,
                                    .first_bucket_cap_mb = options.first_bucket_cap_mb,
                                    .bucket_cap_mb_list = options.bucket_cap_mb_list});
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
  for (const OptionRow& row : kRows) {
    if (row.log != nullptr) row.log(options, data);
  }
}

}  // namespace ddp::internal
