// An opaque declaration: LibTorch carries Gloo without its headers.
#ifndef DDP_THIRD_PARTY_GLOO_COMMON_ERROR_H_
#define DDP_THIRD_PARTY_GLOO_COMMON_ERROR_H_

namespace gloo {
class Exception;
}  // namespace gloo

#endif  // DDP_THIRD_PARTY_GLOO_COMMON_ERROR_H_
