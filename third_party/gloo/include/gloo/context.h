// A stand-in with the one member that c10d's header calls: LibTorch carries Gloo without its
// headers.
#ifndef DDP_THIRD_PARTY_GLOO_CONTEXT_H_
#define DDP_THIRD_PARTY_GLOO_CONTEXT_H_

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo

#endif  // DDP_THIRD_PARTY_GLOO_CONTEXT_H_
