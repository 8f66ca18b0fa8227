#include "ddp/buffer_sync.h"

#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "ddp/coalesced_broadcast.h"
#include "ddp/comm/communicator.h"
#include "ddp/error.h"
#include "ddp/process_group.h"

namespace ddp {

BufferSync::BufferSync(std::shared_ptr<torch::nn::Module> module, std::set<std::string> ignored)
    : module_(std::move(module)), ignored_(std::move(ignored)) {}

void BufferSync::RegisterHook(BufferCommHook hook, BufferCommHookLocation location) {
  if (hook_) throw ConfigurationError("a buffer comm hook is registered already; there can be one");
  hook_ = std::move(hook);
  location_ = location;
}

std::string BufferSync::HookText() const {
  if (!hook_) return "none";
  return location_ == BufferCommHookLocation::kPreForward ? "before the forward"
                                                          : "after the forward";
}

bool BufferSync::Due(BufferCommHookLocation location) const {
  if (hook_) return location_ == location;
  return location == BufferCommHookLocation::kPreForward && !Buffers().empty();
}

std::map<std::string, at::Tensor> BufferSync::Buffers() const {
  std::map<std::string, at::Tensor> buffers;
  for (const auto& item : module_->named_buffers()) {
    if (item.value().defined() && !ignored_.contains(item.key())) {
      buffers.emplace(item.key(), item.value());
    }
  }
  return buffers;
}

void BufferSync::Run(ProcessGroup& group, BufferCommHookLocation location, int source) {
  if (!Due(location)) return;
  if (!hook_) return Broadcast(group, source);
  const std::map<std::string, at::Tensor> buffers = Buffers();
  for (TensorFuture& future : hook_(buffers)) {
    if (future) started_.push_back(std::move(future));
  }
  for (const auto& [name, buffer] : buffers) in_use_.push_back(buffer);
}

void BufferSync::Broadcast(ProcessGroup& group, int source) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, buffer] : Buffers()) tensors.push_back(buffer);
  BroadcastCoalesced(group.communicator(), tensors,
                     {.rank = group.rank(),
                      .root = source,
                      .fresh_memory = true,
                      .what = "the broadcast of buffers"});
}

void BufferSync::Abandon() {
  at::NoGradGuard no_grad;
  for (at::Tensor& buffer : in_use_) buffer.set_data(buffer.clone());
  started_.clear();
  in_use_.clear();
}

void BufferSync::Finish(ProcessGroup& group) {
  for (const TensorFuture& future : std::exchange(started_, {})) {
    group.communicator().WaitFuture(future, in_use_, {"what the buffer comm hook started"});
  }
  in_use_.clear();
}

}  // namespace ddp
