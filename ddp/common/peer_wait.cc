#include "ddp/common/peer_wait.h"

#include <atomic>

namespace ddp {
namespace {

std::atomic<PeerWaitObserver*> process_observer{nullptr};

}  // namespace

void SetPeerWaitObserver(PeerWaitObserver* observer) { process_observer.store(observer); }

PeerWaitScope::PeerWaitScope() : observer_(process_observer.load(std::memory_order_acquire)) {
  if (observer_ != nullptr && !observer_->Begin()) observer_ = nullptr;
}

PeerWaitScope::~PeerWaitScope() {
  if (observer_ != nullptr) observer_->End();
}

}  // namespace ddp
