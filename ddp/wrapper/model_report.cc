#include "ddp/wrapper/model_report.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <vector>

#include <c10/util/Logging.h>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ddp/common/name_list.h"
#include "ddp/reducer/reducer.h"

namespace ddp::internal {
namespace {

constexpr double kKibibyte = 1024;
constexpr size_t kNamesInTable = 6;

// The numbers of timed iterations after which ReportUsage() is due; as in PyTorch.
constexpr int64_t kUsageSamples[] = {10, 20, 50, 100, 500, 800, 1000};

int64_t Bytes(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

int64_t BucketBytes(const Reducer& reducer, const BucketPlan::Bucket& bucket) {
  int64_t bytes = 0;
  for (const int index : bucket.parameters) bytes += Bytes(reducer.parameters()[index].tensor);
  return bytes;
}

}  // namespace

std::string BucketTable(const Reducer& reducer) {
  int64_t total = 0;
  for (const Reducer::Parameter& parameter : reducer.parameters()) total += Bytes(parameter.tensor);
  std::string table =
      absl::StrFormat("%d parameters, %.1f KiB of gradients in %d buckets (%s)\nreduction: %s\n",
                      reducer.parameters().size(), static_cast<double>(total) / kKibibyte,
                      reducer.plan().buckets().size(),
                      reducer.rebuilt() ? "in the order in which gradients come" : "as first dealt",
                      reducer.strategy());
  absl::StrAppendFormat(&table, "%6s  %10s  %9s  %-14s names\n", "bucket", "parameters", "KiB",
                        "type");
  int number = 0;
  for (const BucketPlan::Bucket& bucket : reducer.plan().buckets()) {
    std::vector<std::string> names;
    for (const int index : bucket.parameters) names.push_back(reducer.parameters()[index].name);
    const Reducer::Parameter& first = reducer.parameters()[bucket.parameters.front()];
    const std::string type =
        absl::StrCat(c10::toString(first.tensor.scalar_type()), first.sparse ? " (sparse)" : "");
    absl::StrAppendFormat(&table, "%6d  %10d  %9.1f  %-14s %s\n", number++,
                          bucket.parameters.size(),
                          static_cast<double>(BucketBytes(reducer, bucket)) / kKibibyte, type,
                          NameList(names, kNamesInTable));
  }
  return table;
}

std::string BucketSizes(const Reducer& reducer) {
  std::vector<int64_t> sizes;
  for (const auto& bucket : reducer.plan().buckets()) {
    sizes.push_back(BucketBytes(reducer, bucket));
  }
  return absl::StrJoin(sizes, ", ");
}

void DescribeParameters(const Reducer& reducer, DDPLoggingData& data) {
  std::set<std::string> types;
  std::set<std::string> devices;
  for (const Reducer::Parameter& parameter : reducer.parameters()) {
    types.emplace(parameter.tensor.dtype().name());
    devices.insert(parameter.tensor.device().str());
    data.total_parameter_size_bytes += Bytes(parameter.tensor);
  }
  data.dtypes = absl::StrJoin(types, ", ");
  data.is_multi_device_module = devices.size() > 1;
  data.num_parameter_tensors = static_cast<int64_t>(reducer.parameters().size());
  if (!reducer.hook_name().empty()) data.comm_hook = reducer.hook_name();
  data.reduction_strategy = reducer.strategy();
  data.has_rebuilt_buckets = reducer.rebuilt();
  data.prev_iteration_grad_ready_order_indices = absl::StrJoin(reducer.ready_order(), ", ");
  data.num_buckets_reduced = reducer.buckets_reduced();
  for (const int index : reducer.untouched()) {
    data.unused_parameter_size += Bytes(reducer.parameters()[index].tensor);
  }
  if (reducer.finds_unused()) data.can_set_static_graph = reducer.can_set_static_graph();
  if (!reducer.rebuilt()) return;
  std::vector<std::string> lists;
  for (const auto& bucket : reducer.plan().buckets()) {
    lists.push_back(absl::StrJoin(bucket.parameters, " "));
  }
  data.rebuilt_bucket_sizes = BucketSizes(reducer);
  data.rebuilt_per_bucket_param_indices = absl::StrJoin(lists, ", ");
}

bool IsUsageDue(int64_t timed_iterations) {
  return std::binary_search(std::begin(kUsageSamples), std::end(kUsageSamples), timed_iterations);
}

void ReportUsage(const DDPLoggingData& data) {
  c10::DDPLoggingData usage;
  const nlohmann::json fields = nlohmann::json::parse(data.to_json());
  for (const auto& [name, value] : fields.items()) {
    if (value.is_string()) usage.strs_map[name] = value.get<std::string>();
    if (value.is_number_integer()) usage.ints_map[name] = value.get<int64_t>();
  }
  c10::LogPyTorchDDPUsage(usage);
}

std::string NoOutputsMessage(int rank, bool complete) {
  return absl::StrCat(
      "rank ", rank,
      ": find_unused_parameters has to see the tensors that the forward returns, and ",
      complete ? "it returned none"
               : "found none in what it returned: return tensors, containers or plain structs of "
                 "them, or write a for_each_tensor_in for its type (ddp/tensor_traversal.h)");
}

std::string BareBackwardMessage(int rank, const std::string& parameter) {
  return absl::StrCat(
      "rank ", rank, ": a backward reached parameter ", parameter,
      " through the bare module: it passed no forward of the DistributedDataParallel. "
      "Its gradients stay on this rank and are not averaged. Call the wrapper's "
      "forward, model.forward(...), to average them; where they are meant to be local, "
      "run the backward under no_sync()");
}

std::string StrangerMessage(int rank, const std::string& parameter, const std::string& leaf) {
  return absl::StrCat(
      "rank ", rank, ": a backward reached a tensor ", leaf,
      " that is no parameter of the model, and not parameter ", parameter,
      " of that shape. Where the program has assigned it to a member (net->weight = ...), it "
      "trains "
      "on this rank alone: give the registered parameter its values instead "
      "(net->weight.set_data(...)), or register it and construct a new DistributedDataParallel");
}

}  // namespace ddp::internal
