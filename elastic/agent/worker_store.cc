#include "elastic/agent/worker_store.h"

#include <utility>

#include "elastic/agent/free_port.h"

namespace ddp::elastic {

absl::StatusOr<int> WorkerStore::Prepare() {
  if (config_.master_port == 0) return FindFreePort();
  if (!std::exchange(checked_port_, true)) {
    // Only before the first generation: in later ones its own connections may linger.
    const absl::Status status = CheckPortIsFree(config_.master_port);
    if (!status.ok()) return status;
  }
  return config_.master_port;
}

void WorkerStore::Settle(bool) {}

}  // namespace ddp::elastic
