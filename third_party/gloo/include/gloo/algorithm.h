// An opaque declaration: LibTorch carries Gloo without its headers.
#ifndef DDP_THIRD_PARTY_GLOO_ALGORITHM_H_
#define DDP_THIRD_PARTY_GLOO_ALGORITHM_H_

namespace gloo {
class Algorithm;
}  // namespace gloo

#endif  // DDP_THIRD_PARTY_GLOO_ALGORITHM_H_
