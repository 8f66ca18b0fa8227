#ifndef DDP_BASE_PEER_WAIT_H_
#define DDP_BASE_PEER_WAIT_H_

#include "base/language.h"

namespace ddp {

// Who wants to know when a thread of this process waits for other ranks: the line between a rank
// that works and one that waits for it. ddp/ tells it, and must not know who listens.
class PeerWaitObserver {
 public:
  virtual ~PeerWaitObserver() = default;

  // On the thread that is about to wait. False: this wait is of no interest; no End() follows.
  virtual bool Begin() = 0;
  // On the same thread, when the wait is over, well or not.
  virtual void End() = 0;
};

// There is one for the process, since what it tells is about the process; null: nobody listens. It
// must live until the process ends. Any thread.
void SetPeerWaitObserver(PeerWaitObserver* observer);

// Around a wait.
class PeerWaitScope {
 public:
  PeerWaitScope();
  ~PeerWaitScope();
  PeerWaitScope(const PeerWaitScope&) = delete;
  PeerWaitScope& operator=(const PeerWaitScope&) = delete;

 private:
  PeerWaitObserver* observer_;
};

}  // namespace ddp

#endif  // DDP_BASE_PEER_WAIT_H_
