#ifndef DDP_BASE_BROKEN_PIPES_H_
#define DDP_BASE_BROKEN_PIPES_H_

#include <csignal>

namespace ddp {

// Makes the process ignore SIGPIPE, unless the program has a handler. Gloo and TensorPipe write to
// a peer's socket by write(2): when the peer is gone, SIGPIPE would end the process before the
// library sees the error. Thread-safe.
inline void IgnoreBrokenPipes() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) {
    action.sa_handler = SIG_IGN;
    ::sigaction(SIGPIPE, &action, nullptr);
  }
}

}  // namespace ddp

#endif  // DDP_BASE_BROKEN_PIPES_H_
