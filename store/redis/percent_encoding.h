// Percent-encoding (RFC 3986 2.1) of text that stands inside a Redis key or a URL.
#ifndef DDP_STORE_REDIS_PERCENT_ENCODING_H_
#define DDP_STORE_REDIS_PERCENT_ENCODING_H_

#include <string>

#include "absl/status/statusor.h"

namespace ddp::store {

// Replaces '%' and each character of `reserved` by % and two upper-case hexadecimal digits.
std::string PercentEncode(const std::string& text, const std::string& reserved);

// Replaces all characters except letters, digits and -._~:/ in the same way, for use in a URL.
std::string PercentEncodeForUrl(const std::string& text);

// Reverses either encoding. kInvalidArgument: a '%' without two hexadecimal digits after it.
absl::StatusOr<std::string> PercentDecode(const std::string& text);

// Returns `run_id` with { } % encoded, for its place between the braces of "ddp:{RUN_ID}:". So no
// run id can end the hash tag early, and no two run ids share one key.
std::string EncodeRunIdForKey(const std::string& run_id);

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_PERCENT_ENCODING_H_
