#include "ddp/wrapper/buffer_sync.h"

#include <algorithm>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/tensor.h>

#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/model/model_view.h"
#include "ddp/process_group.h"
#include "ddp/transfer/coalesced_broadcast.h"

namespace ddp::internal {
namespace {

// Messages up to the first size are kept whole until the next forward. Of larger messages, only
// copies of buffers up to the second size are kept. Running statistics are far smaller.
constexpr size_t kKeptMessageBytes = size_t{16} << 20;
constexpr size_t kKeptBufferBytes = size_t{1} << 20;

// A broadcast of fewer bytes costs what a comparison over the ranks costs.
constexpr size_t kComparedBytes = size_t{64} << 10;
constexpr int kLongestPause = 1024;

// Returns the same on all ranks, whose buffers have equal shapes, types and kinds of device.
bool MayCompare(const std::map<std::string, at::Tensor>& buffers) {
  size_t bytes = 0;
  for (const auto& [name, buffer] : buffers) {
    if (buffer.layout() != at::kStrided || !buffer.is_cpu()) return false;
    bytes += buffer.nbytes();
  }
  return bytes >= kComparedBytes;
}

// Returns "layer.norm" for "layer.norm.running_mean".
std::string OwnerOf(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? "" : name.substr(0, dot);
}

int64_t VersionOf(const at::Tensor& tensor) {
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  return version.enabled() ? version.current_version() : 0;
}

// `value`: undefined when no copy was kept.
bool IsComparable(const at::Tensor& value, const at::Tensor& buffer) {
  return value.defined() && value.sizes() == buffer.sizes() &&
         value.scalar_type() == buffer.scalar_type() && value.device() == buffer.device();
}

}  // namespace

BufferSync::BufferSync(std::shared_ptr<const ModelView> model, std::set<std::string> ignored)
    : model_(std::move(model)), ignored_(std::move(ignored)) {}

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

bool BufferSync::IsPlace(BufferCommHookLocation location) const {
  return location == (hook_ ? location_ : BufferCommHookLocation::kPreForward);
}

bool BufferSync::Due(BufferCommHookLocation location, const Buffers& buffers) const {
  return IsPlace(location) && (hook_ || !buffers.empty());
}

BufferSync::Buffers BufferSync::Read() const {
  Buffers buffers;
  for (const NamedTensor& item : model_->buffers()) {
    if (item.tensor.defined() && !ignored_.contains(item.name)) {
      buffers.emplace(item.name, item.tensor);
    }
  }
  return buffers;
}

void BufferSync::Run(ProcessGroup& group, BufferCommHookLocation location, int source) {
  if (IsPlace(location)) Run(group, location, source, Read());
}

void BufferSync::Run(ProcessGroup& group, BufferCommHookLocation location, int source,
                     const Buffers& buffers) {
  if (!Due(location, buffers)) return;
  if (!hook_) return BroadcastChanged(group, source, buffers);
  for (TensorFuture& future : hook_(buffers)) {
    if (future) started_.push_back(std::move(future));
  }
  for (const auto& [name, buffer] : buffers) in_use_.push_back(buffer);
}

void BufferSync::BroadcastChanged(ProcessGroup& group, int source, const Buffers& buffers) {
  if (group.size() > 1 && MayCompare(buffers)) {
    if (until_compared_ > 0) {
      --until_compared_;
    } else {
      const at::Tensor changed = at::tensor({differs_ || Changed(buffers) ? 1 : 0}, at::kInt);
      Communicator& communicator = group.communicator();
      Communicator::Pending pending =
          communicator.AllReduceMax(changed, {"the comparison of buffers"});
      communicator.Wait(pending);
      if (changed.item<int>() == 0) {
        pause_ = 1;
        for (const auto& [name, buffer] : buffers) seen_[name].version = VersionOf(buffer);
        return;
      }
      until_compared_ = pause_;
      pause_ = std::min(2 * pause_, kLongestPause);
    }
  }
  BroadcastAll(group, source, buffers);
}

void BufferSync::Broadcast(ProcessGroup& group, int source) { BroadcastAll(group, source, Read()); }

void BufferSync::BroadcastAll(ProcessGroup& group, int source, const Buffers& buffers) {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  for (const auto& [name, buffer] : buffers) {
    names.push_back(name);
    tensors.push_back(buffer);
  }
  std::optional<std::set<std::string>> updated;  // computed before the first buffer is written
  const std::vector<at::Tensor> values =
      BroadcastCoalesced(group.communicator(), tensors, names,
                         {.rank = group.rank(),
                          .root = source,
                          .keeps_version =
                              [&](size_t index) {
                                if (!updated.has_value()) updated = Updated(buffers);
                                return updated->contains(names[index]);
                              },
                          .what = "the broadcast of buffers"});
  seen_.clear();
  for (size_t i = 0; i < names.size(); ++i) Remember(names[i], tensors[i], values[i]);
  differs_ = false;
}

// Returns true when some buffer may have other bits than in seen_.
bool BufferSync::Changed(const Buffers& buffers) const {
  if (buffers.size() != seen_.size()) return true;
  at::NoGradGuard no_grad;
  return std::any_of(buffers.begin(), buffers.end(), [&](const auto& item) {
    const auto found = seen_.find(item.first);
    return found == seen_.end() || !found->second.tensor.is_same(item.second) ||
           !IsComparable(found->second.value, item.second) ||
           !SameBits(item.second, found->second.value);
  });
}

void BufferSync::NoteForward() {
  if (hook_) return;
  const Buffers buffers = Read();
  if (!differs_ && MayCompare(buffers)) differs_ = Changed(buffers);
  seen_.clear();
  at::NoGradGuard no_grad;
  for (const auto& [name, buffer] : buffers) {
    if (buffer.layout() != at::kStrided) continue;
    Remember(name, buffer, buffer.is_cpu() ? buffer.variable_data().clone() : at::Tensor());
  }
}

void BufferSync::Remember(const std::string& name, const at::Tensor& tensor,
                          const at::Tensor& value) {
  Seen seen{.tensor = tensor, .version = VersionOf(tensor), .value = {}};
  if (!tensor.is_cpu()) {
    // No copy: nothing compares it.
  } else if (value.storage().nbytes() <= kKeptMessageBytes) {
    seen.value = value;
  } else if (value.nbytes() <= kKeptBufferBytes) {
    seen.value = value.clone();
  }
  seen_[name] = std::move(seen);
}

// Returns the buffers of every submodule in which a buffer has changed since the last forward
// began, except buffers with another version: autograd knows of their change.
std::set<std::string> BufferSync::Updated(const Buffers& buffers) const {
  std::set<std::string> owners;
  std::set<std::string> same_version;
  at::NoGradGuard no_grad;
  for (const auto& [name, buffer] : buffers) {
    const auto found = seen_.find(name);
    if (found == seen_.end() || !found->second.tensor.is_same(buffer)) continue;
    const Seen& seen = found->second;
    const bool same = seen.version == VersionOf(buffer);
    if (same) same_version.insert(name);
    const bool changed =
        buffer.is_cpu() ? IsComparable(seen.value, buffer) && !SameBits(buffer, seen.value) : !same;
    if (changed) owners.insert(OwnerOf(name));
  }
  std::erase_if(same_version,
                [&](const std::string& name) { return !owners.contains(OwnerOf(name)); });
  return same_version;
}

void BufferSync::Abandon() {
  at::NoGradGuard no_grad;
  pause_ = until_compared_ = 1;
  differs_ = true;
  const bool busy = std::any_of(started_.begin(), started_.end(),
                                [](const TensorFuture& future) { return !future->completed(); });
  for (at::Tensor& buffer : in_use_) {
    // On a device a complete future says that the operation was launched.
    if (busy || !buffer.is_cpu()) buffer.set_data(buffer.clone());
  }
  started_.clear();
  in_use_.clear();
}

void BufferSync::Finish(ProcessGroup& group) {
  for (const TensorFuture& future : std::exchange(started_, {})) {
    group.communicator().WaitFuture(future, in_use_, {"what the buffer comm hook started"});
  }
  in_use_.clear();
}

}  // namespace ddp::internal
