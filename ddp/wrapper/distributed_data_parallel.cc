#include "ddp/distributed_data_parallel.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/default_hooks.h"
#include "ddp/model/model_view.h"
#include "ddp/model/nn_module_view.h"
#include "ddp/wrapper/model_setup.h"
#include "ddp/wrapper/model_synchronizer.h"

namespace ddp::internal {
namespace {

std::shared_ptr<const ModelView> ViewOf(const std::shared_ptr<torch::nn::Module>& module) {
  return module ? std::make_shared<NnModuleView>(module) : nullptr;
}

}  // namespace

DataParallelHandle::DataParallelHandle(std::shared_ptr<torch::nn::Module> module,
                                       std::shared_ptr<ProcessGroup> group,
                                       const DistributedDataParallelOptions& options)
    : DataParallelHandle(std::move(module), WithGroup(options, std::move(group))) {}

DataParallelHandle::DataParallelHandle(std::shared_ptr<torch::nn::Module> module,
                                       const DistributedDataParallelOptions& options)
    : DataParallelHandle(ViewOf(module), options) {
  base_module_ = std::move(module);
}

DataParallelHandle::DataParallelHandle(std::shared_ptr<const ModelView> model,
                                       std::shared_ptr<ProcessGroup> group,
                                       const DistributedDataParallelOptions& options)
    : DataParallelHandle(std::move(model), WithGroup(options, std::move(group))) {}

DataParallelHandle::DataParallelHandle(std::shared_ptr<const ModelView> model,
                                       const DistributedDataParallelOptions& options)
    : synchronizer_(std::make_shared<ModelSynchronizer>(std::move(model), options)) {}

void DataParallelHandle::CheckNotEmpty() const {
  if (synchronizer_) return;
  throw ConfigurationError(
      "this DistributedDataParallel is empty: it was made of nullptr, or moved from; assign it a "
      "DistributedDataParallel(module, group) first");
}

ModelSynchronizer& DataParallelHandle::Core() const {
  CheckNotEmpty();
  return *synchronizer_;
}

DataParallelHandle::NoSyncGuard::NoSyncGuard(std::shared_ptr<ModelSynchronizer> synchronizer,
                                             bool active)
    : synchronizer_(std::move(synchronizer)), before_(synchronizer_->synchronize()) {
  if (active) synchronizer_->set_synchronize(false);
}

DataParallelHandle::NoSyncGuard::~NoSyncGuard() { synchronizer_->set_synchronize(before_); }

DataParallelHandle::NoSyncGuard DataParallelHandle::no_sync(bool active) {
  CheckNotEmpty();
  return NoSyncGuard(synchronizer_, active);
}

void DataParallelHandle::sync_buffers() { Core().SyncBuffers(); }

void DataParallelHandle::RegisterCommHook(const std::string& name, CommHookFunction function,
                                          CommHookRounds hook) {
  Core().RegisterCommHook(name.empty() ? NameOfHook(function) : name, std::move(hook));
}

void DataParallelHandle::RegisterBufferCommHook(BufferCommHook hook,
                                                BufferCommHookLocation location) {
  Core().RegisterBufferCommHook(std::move(hook), location);
}

void DataParallelHandle::check_finished() { Core().CheckFinished(); }

bool DataParallelHandle::require_manual_backward_finalization() const {
  return Core().reducer().manual_finalization();
}

void DataParallelHandle::set_require_manual_backward_finalization(bool required) {
  Core().SetManualFinalization(required);
}

bool DataParallelHandle::should_finalize_after_backward() const {
  return Core().FinalizesAfterBackward();
}

void DataParallelHandle::finalize_backward() { Core().FinalizeBackward(); }

void DataParallelHandle::rebuild_buckets() { Core().RebuildBuckets(); }

void DataParallelHandle::update_process_group(std::shared_ptr<ProcessGroup> group) {
  Core().UpdateProcessGroup(std::move(group));
}

std::vector<std::vector<std::string>> DataParallelHandle::bucket_layout() const {
  return Core().reducer().plan_names();
}

void DataParallelHandle::set_bucket_layout(std::vector<std::vector<std::string>> layout) {
  Core().SetBucketLayout(std::move(layout));
}

std::shared_ptr<ProcessGroup> DataParallelHandle::process_group() const { return Core().group(); }

torch::nn::Module& DataParallelHandle::base_module() const {
  const ModelView& model = Core().model();
  if (base_module_) return *base_module_;
  throw ConfigurationError(absl::StrCat(
      "the model ", model.name(),
      " is a TorchScript module and no torch::nn::Module: Training and Checkpointer, which need "
      "one, cannot take it; save it with torch::jit::Module::save"));
}

DDPLoggingData DataParallelHandle::logging_data() const { return Core().LoggingData(); }

void DataParallelHandle::set_logging_sample_rate(int64_t iterations) {
  Core().SetLoggingSampleRate(iterations);
}

std::string DataParallelHandle::describe() const { return Core().Describe(); }

Joinable* DataParallelHandle::joinable() const { return &Core().join(); }

void DataParallelHandle::BeforeForward() { synchronizer_->BeforeForward(); }

void DataParallelHandle::AfterForward(const std::vector<at::Tensor>& outputs, bool complete) {
  synchronizer_->AfterForward(outputs, complete);
}

void DataParallelHandle::OnForwardException() { synchronizer_->OnForwardException(); }

bool DataParallelHandle::PlacesInputs() const {
  return internal::PlacesInputs(synchronizer_->options());
}

at::Tensor DataParallelHandle::PlaceInput(const at::Tensor& input) const {
  return internal::PlaceInput(synchronizer_->options(), input);
}

bool DataParallelHandle::PlacesOutputs() const {
  return synchronizer_->options().output_device.has_value();
}

at::Tensor DataParallelHandle::PlaceOutput(const at::Tensor& output) const {
  return internal::PlaceOutput(synchronizer_->options(), output);
}

}  // namespace ddp::internal
