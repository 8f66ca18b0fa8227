#ifndef DDP_BASE_BLOCKED_SIGNALS_H_
#define DDP_BASE_BLOCKED_SIGNALS_H_

#include <pthread.h>
#include <signal.h>

namespace ddp {

// Blocks all signals for the calling thread, and for the threads that it starts meanwhile: the
// program's other threads handle them. The destructor, on the same thread, restores what was.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace ddp

#endif  // DDP_BASE_BLOCKED_SIGNALS_H_
