// Shows in the worker's health page that it waits for other ranks. ddp/comm notifies an observer of
// its waits for operations. elastic/worker sets the observer, which writes the page. So ddp/ does
// not depend on elastic/.
// Free of LibTorch.
#ifndef DDP_COMMON_PEER_WAIT_H_
#define DDP_COMMON_PEER_WAIT_H_

#include "base/language.h"

namespace ddp {

// Observes when a thread of this process blocks until an operation with other ranks is complete. So
// the observer can distinguish a rank that works from a rank that waits for a peer. Several threads
// may call it at the same time.
class PeerWaitObserver {
 public:
  virtual ~PeerWaitObserver() = default;

  // Called before a wait, on the waiting thread. Returns false to ignore this wait: no End()
  // follows.
  virtual bool Begin() = 0;
  // Called after the wait, successful or not, on the same thread.
  virtual void End() = 0;
};

// Sets the observer of this process; null removes it. The observer must live until the process
// ends. Any thread.
void SetPeerWaitObserver(PeerWaitObserver* observer);

// Notifies the observer, if there is one, of a wait that lasts as long as this object lives.
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

#endif  // DDP_COMMON_PEER_WAIT_H_
