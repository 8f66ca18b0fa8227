#include "ddp/data_parallel_core.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/coalesced_broadcast.h"
#include "ddp/comm/communicator.h"
#include "ddp/error.h"
#include "ddp/model_metadata.h"
#include "ddp/process_group.h"
#include "ddp/reducer.h"

namespace ddp {
namespace {

constexpr int64_t kMebibyte = 1 << 20;
constexpr int64_t kBroadcastChunkBytes = 250 * kMebibyte;

int64_t LimitBytes(const std::string& name, double mebibytes) {
  if (!(mebibytes > 0) || mebibytes > 1e9) {
    throw ConfigurationError(absl::StrCat(name, "=", mebibytes, " must be above 0, in MiB"));
  }
  return std::max<int64_t>(1, static_cast<int64_t>(mebibytes * static_cast<double>(kMebibyte)));
}

ModelMetadata::Tensor Describe(const std::string& name, const at::Tensor& tensor) {
  return {.name = name,
          .dtype = c10::toString(tensor.scalar_type()),
          .shape = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .requires_grad = tensor.requires_grad()};
}

// Trainable parameters by their first name; a tensor that several modules share is there once.
std::vector<Reducer::Parameter> TrainableParameters(const torch::nn::Module& module) {
  std::vector<Reducer::Parameter> parameters;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    parameters.push_back({item.key(), tensor});
  }
  if (parameters.empty()) {
    throw ConfigurationError(
        "the model has no parameter that requires a gradient, so there is nothing to average: use "
        "it without DistributedDataParallel");
  }
  return parameters;
}

std::optional<BucketPlan> GivenPlan(const std::vector<std::vector<std::string>>& layout,
                                    const std::vector<Reducer::Parameter>& parameters) {
  if (layout.empty()) return std::nullopt;
  std::vector<std::string> names;
  std::vector<BucketPlan::Tensor> tensors;
  for (const Reducer::Parameter& parameter : parameters) {
    names.push_back(parameter.name);
    // A type and device by number: equal numbers may share a bucket.
    tensors.push_back({.bytes = 0,
                       .kind = static_cast<int>(parameter.tensor.scalar_type()) * 1024 +
                               static_cast<int>(parameter.tensor.device().type()) * 64 +
                               parameter.tensor.device().index() + 1});
  }
  absl::StatusOr<BucketPlan> plan = BucketPlan::FromNames(layout, names, tensors);
  if (!plan.ok()) {
    throw ConfigurationError(absl::StrCat("bucket_layout does not fit the model: ",
                                          std::string(plan.status().message())));
  }
  return *std::move(plan);
}

}  // namespace

DataParallelCore::DataParallelCore(std::shared_ptr<torch::nn::Module> module,
                                   std::shared_ptr<ProcessGroup> group,
                                   const DistributedDataParallelOptions& options)
    : module_(std::move(module)), group_(std::move(group)), options_(options) {
  if (!module_ || !group_) {
    throw ConfigurationError("DistributedDataParallel needs a module and a process group");
  }
  std::vector<Reducer::Parameter> parameters = TrainableParameters(*module_);
  CheckPlacement();
  AgreeOnMetadata();
  BroadcastState();
  Reducer::Options reducer_options{
      .bucket_limits_bytes = {LimitBytes("first_bucket_cap_mb", options.first_bucket_cap_mb),
                              LimitBytes("bucket_cap_mb", options.bucket_cap_mb)},
      .gradient_as_bucket_view = options.gradient_as_bucket_view,
      .plan = GivenPlan(options.bucket_layout, parameters)};
  reducer_ = std::make_unique<Reducer>(std::move(parameters), group_, reducer_options);
}

DataParallelCore::~DataParallelCore() = default;

void DataParallelCore::BeforeForward() {
  if (!at::GradMode::is_enabled() || !synchronize_) return;
  reducer_->BeginForward();
  if (options_.broadcast_buffers && module_->is_training()) SyncBuffers();
}

void DataParallelCore::AfterForward() {
  if (!at::GradMode::is_enabled()) return;
  reducer_->BeginBackward(synchronize_);
}

void DataParallelCore::SyncBuffers() {
  // Read anew: a module may have replaced its buffers.
  BroadcastCoalesced(group_->communicator(), module_->buffers(), group_->rank(), /*root=*/0,
                     kBroadcastChunkBytes, "the broadcast of buffers");
}

void DataParallelCore::CheckPlacement() const {
  const at::Device device = group_->device();
  const auto check = [&](const std::string& sort, const std::string& name,
                         const at::Tensor& tensor) {
    if (tensor.device() == device) return;
    throw ConfigurationError(absl::StrCat(
        sort, " ", name, " is on ", tensor.device().str(), ", but the process group (",
        group_->backend(), ") works on ", device.str(), ": move the model there with to() first"));
  };
  for (const auto& item : module_->named_parameters()) check("parameter", item.key(), item.value());
  for (const auto& item : module_->named_buffers()) check("buffer", item.key(), item.value());
}

void DataParallelCore::AgreeOnMetadata() const {
  ModelMetadata metadata;
  metadata.AddOption("bucket_cap_mb", absl::StrCat(options_.bucket_cap_mb));
  metadata.AddOption("first_bucket_cap_mb", absl::StrCat(options_.first_bucket_cap_mb));
  metadata.AddOption("broadcast_buffers", absl::StrCat(options_.broadcast_buffers));
  metadata.AddOption("gradient_as_bucket_view", absl::StrCat(options_.gradient_as_bucket_view));
  for (const auto& bucket : options_.bucket_layout) {
    metadata.AddOption("bucket_layout", absl::StrJoin(bucket, " "));
  }
  for (const auto& item : module_->named_parameters()) {
    metadata.AddParameter(Describe(item.key(), item.value()));
  }
  for (const auto& item : module_->named_buffers()) {
    metadata.AddBuffer(Describe(item.key(), item.value()));
  }

  // Minimum of the hash and of its negative: equal to ours both times on every rank, or nowhere.
  const auto [high, low] = metadata.Hash();
  const int64_t a = static_cast<int64_t>(high >> 1);
  const int64_t b = static_cast<int64_t>(low >> 1);
  const at::Tensor mine = at::tensor({a, b, -a, -b}, at::kLong);
  const at::Tensor least = mine.clone().to(group_->device());
  Communicator::Pending pending =
      group_->communicator().AllReduceMin(least, "the comparison of models");
  group_->communicator().Wait(pending);
  const int sequence = group_->next_sequence();
  const at::Tensor answer = least.to(at::kCPU);
  const int64_t* found = answer.const_data_ptr<int64_t>();
  if (found[0] == -found[2] && found[1] == -found[3]) return;

  // They differ somewhere. Every rank reads the same texts and so finds the same first difference.
  const auto key = [&](int rank) { return absl::StrCat("ddp/model/", sequence, "/", rank); };
  group_->store()->set(key(group_->rank()), metadata.Serialize());
  const std::string first = group_->store()->get_to_str(key(0));
  for (int rank = 1; rank < group_->size(); ++rank) {
    const std::string other = group_->store()->get_to_str(key(rank));
    const std::string difference = ModelMetadata::FirstDifference(first, 0, other, rank);
    if (difference.empty()) continue;
    group_->barrier();  // nobody leaves, and perhaps ends the store, before all have read
    throw ConfigurationError(absl::StrCat("the ranks have different models: ", difference));
  }
}

void DataParallelCore::BroadcastState() const {
  std::vector<at::Tensor> tensors = module_->parameters();
  for (const at::Tensor& buffer : module_->buffers()) tensors.push_back(buffer);
  BroadcastCoalesced(group_->communicator(), tensors, group_->rank(), /*root=*/0,
                     kBroadcastChunkBytes, "the broadcast of the model");
}

}  // namespace ddp
