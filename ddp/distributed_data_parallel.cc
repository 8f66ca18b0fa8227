#include "ddp/distributed_data_parallel.h"

#include <utility>

#include "ddp/common/error.h"
#include "ddp/data_parallel_core.h"
#include "ddp/default_hooks.h"

namespace ddp::internal {

DataParallelHandle::DataParallelHandle(std::shared_ptr<torch::nn::Module> module,
                                       std::shared_ptr<ProcessGroup> group,
                                       const DistributedDataParallelOptions& options)
    : DataParallelHandle(std::move(module), WithGroup(options, std::move(group))) {}

DataParallelHandle::DataParallelHandle(std::shared_ptr<torch::nn::Module> module,
                                       const DistributedDataParallelOptions& options)
    : core_(std::make_shared<DataParallelCore>(std::move(module), options)) {}

void DataParallelHandle::CheckNotEmpty() const {
  if (core_) return;
  throw ConfigurationError(
      "this DistributedDataParallel is empty: it was made of nullptr, or moved from; assign it a "
      "DistributedDataParallel(module, group) first");
}

DataParallelCore& DataParallelHandle::Core() const {
  CheckNotEmpty();
  return *core_;
}

DataParallelHandle::NoSyncGuard::NoSyncGuard(std::shared_ptr<DataParallelCore> core, bool active)
    : core_(std::move(core)), before_(core_->synchronize()) {
  if (active) core_->set_synchronize(false);
}

DataParallelHandle::NoSyncGuard::~NoSyncGuard() { core_->set_synchronize(before_); }

DataParallelHandle::NoSyncGuard DataParallelHandle::no_sync(bool active) {
  CheckNotEmpty();
  return NoSyncGuard(core_, active);
}

void DataParallelHandle::sync_buffers() { Core().SyncBuffers(); }

void DataParallelHandle::RegisterCommHook(const std::string& name, CommHookFunction function,
                                          CommHook hook) {
  Core().RegisterCommHook(name.empty() ? NameOfHook(function) : name, std::move(hook));
}

void DataParallelHandle::RegisterBufferCommHook(BufferCommHook hook,
                                                BufferCommHookLocation location) {
  Core().RegisterBufferCommHook(std::move(hook), location);
}

void DataParallelHandle::check_finished() { Core().CheckFinished(); }

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

std::shared_ptr<ProcessGroup> DataParallelHandle::process_group() const {
  return Core().join_process_group();
}

torch::nn::Module& DataParallelHandle::base_module() const { return Core().module(); }

DDPLoggingData DataParallelHandle::logging_data() const { return Core().LoggingData(); }

void DataParallelHandle::set_logging_sample_rate(int64_t iterations) {
  Core().SetLoggingSampleRate(iterations);
}

std::string DataParallelHandle::describe() const { return Core().Describe(); }

Joinable* DataParallelHandle::joinable() const { return &Core(); }

void DataParallelHandle::BeforeForward() { core_->BeforeForward(); }

void DataParallelHandle::AfterForward(const std::vector<at::Tensor>& outputs, bool complete) {
  core_->AfterForward(outputs, complete);
}

void DataParallelHandle::OnForwardException() { core_->OnForwardException(); }

bool DataParallelHandle::PlacesInputs() const { return core_->places_inputs(); }

at::Tensor DataParallelHandle::PlaceInput(const at::Tensor& input) const {
  return core_->PlaceInput(input);
}

bool DataParallelHandle::PlacesOutputs() const { return core_->places_outputs(); }

at::Tensor DataParallelHandle::PlaceOutput(const at::Tensor& output) const {
  return core_->PlaceOutput(output);
}

}  // namespace ddp::internal
