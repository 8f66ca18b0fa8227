#include "ddp/comm/last_passes.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "ddp/common/peer_wait.h"

namespace ddp::internal {
namespace {

struct LastPass {
  std::weak_ptr<const void> group;
  DeviceProof proof;
};

struct LastPasses {
  Mutex mutex;
  std::vector<LastPass> passes ABSL_GUARDED_BY(mutex);
};

LastPasses& OfProcess() {
  static auto& passes = *new LastPasses;
  return passes;
}

}  // namespace

void NoteLastPass(const std::shared_ptr<const void>& group, DeviceProof proof) {
  if (proof == nullptr) return;
  LastPasses& all = OfProcess();
  MutexLock lock(all.mutex);
  std::erase_if(all.passes, [&group](const LastPass& pass) {
    const std::shared_ptr<const void> of = pass.group.lock();
    return of == nullptr || of == group;
  });
  all.passes.push_back({.group = group, .proof = std::move(proof)});
}

bool LastPassesAreProven() {
  std::vector<DeviceProof> proofs;
  {
    LastPasses& all = OfProcess();
    MutexLock lock(all.mutex);
    for (const LastPass& pass : all.passes) {
      if (!pass.group.expired()) proofs.push_back(pass.proof);
    }
  }
  const PeerWaitScope scope;
  for (const DeviceProof& proof : proofs) proof->wait(DeviceOutcome::kOpen);
  return std::all_of(proofs.begin(), proofs.end(),
                     [](const DeviceProof& proof) { return *proof == DeviceOutcome::kProven; });
}

void ForgetLastPasses() {
  LastPasses& all = OfProcess();
  MutexLock lock(all.mutex);
  all.passes.clear();
}

}  // namespace ddp::internal
