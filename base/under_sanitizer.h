#ifndef DDP_BASE_UNDER_SANITIZER_H_
#define DDP_BASE_UNDER_SANITIZER_H_

namespace ddp {

// True when this build has AddressSanitizer or ThreadSanitizer. Both slow a program down and handle
// fatal signals themselves.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderSanitizer = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kUnderSanitizer = true;
#else
inline constexpr bool kUnderSanitizer = false;
#endif
#else
inline constexpr bool kUnderSanitizer = false;
#endif

}  // namespace ddp

#endif  // DDP_BASE_UNDER_SANITIZER_H_
