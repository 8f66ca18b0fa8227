// An opaque declaration: LibTorch carries Gloo without its headers.
#ifndef DDP_THIRD_PARTY_GLOO_CONTEXT_H_
#define DDP_THIRD_PARTY_GLOO_CONTEXT_H_

namespace gloo {
class Context;
}  // namespace gloo

#endif  // DDP_THIRD_PARTY_GLOO_CONTEXT_H_
