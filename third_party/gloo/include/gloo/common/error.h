// Stand-ins with what a handler of Gloo's exceptions needs: LibTorch carries Gloo without its
// headers.
#ifndef DDP_THIRD_PARTY_GLOO_COMMON_ERROR_H_
#define DDP_THIRD_PARTY_GLOO_COMMON_ERROR_H_

#include <stdexcept>

namespace gloo {

struct Exception : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A connection broke, or a peer was late.
struct IoException : Exception {
  using Exception::Exception;
};

}  // namespace gloo

#endif  // DDP_THIRD_PARTY_GLOO_COMMON_ERROR_H_
