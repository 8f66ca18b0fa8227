#ifndef DDP_BASE_DETACHED_THREAD_H_
#define DDP_BASE_DETACHED_THREAD_H_

#include <functional>
#include <string>

#include "absl/status/status.h"

namespace ddp {

// Runs `body` in a new thread with this name (15 bytes at most) and all signals blocked: other
// threads handle them. Nobody joins the thread. Errors: kResourceExhausted (a limit of processes,
// or a filter of system calls), names the call and the reason.
absl::Status StartDetachedThread(const std::string& name, std::function<void()> body);

}  // namespace ddp

#endif  // DDP_BASE_DETACHED_THREAD_H_
