#include "ddp/reducer/buckets/parameter_uses.h"

#include "absl/container/flat_hash_map.h"
#include "base/mutex.h"

namespace ddp::internal {
namespace {

struct Registry {
  Mutex mutex;
  absl::flat_hash_map<const void*, std::weak_ptr<const void>> uses ABSL_GUARDED_BY(mutex);
};

Registry& RegistryOfProcess() {
  static Registry& registry = *new Registry;  // models may outlive all statics
  return registry;
}

// The last model that had the parameter is gone.
void Forget(const void* parameter) {
  Registry& registry = RegistryOfProcess();
  const MutexLock lock(registry.mutex);
  const auto found = registry.uses.find(parameter);
  if (found != registry.uses.end() && found->second.expired()) registry.uses.erase(found);
}

}  // namespace

ParameterUses::ParameterUses(const std::vector<const void*>& parameters) {
  Registry& registry = RegistryOfProcess();
  const MutexLock lock(registry.mutex);
  for (const void* const parameter : parameters) {
    std::weak_ptr<const void>& known = registry.uses[parameter];
    std::shared_ptr<const void> use = known.lock();
    if (use == nullptr) {
      use = std::shared_ptr<const void>(parameter, &Forget);
      known = use;
    }
    uses_.push_back(std::move(use));
  }
}

}  // namespace ddp::internal
