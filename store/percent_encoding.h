// Percent-encoding (RFC 3986 2.1) of text that stands inside a Redis key or a URL.
#ifndef DDP_STORE_PERCENT_ENCODING_H_
#define DDP_STORE_PERCENT_ENCODING_H_

#include <string>

#include "absl/status/statusor.h"

namespace ddp::store {

// Replaces '%' and each character of `reserved` by % and two upper-case hexadecimal digits.
std::string PercentEncode(const std::string& text, const std::string& reserved);

// Replaces all but letters, digits and -._~:/ : for a value in a URL's query.
std::string PercentEncodeForUrl(const std::string& text);

// Undoes either. kInvalidArgument: a '%' without two hexadecimal digits behind it.
absl::StatusOr<std::string> PercentDecode(const std::string& text);

// `run_id` as it stands between the braces of "ddp:{RUN_ID}:": with { } % encoded, so that no run
// id can end the hash tag early, or make two runs share one key.
std::string EncodeRunIdForKey(const std::string& run_id);

}  // namespace ddp::store

#endif  // DDP_STORE_PERCENT_ENCODING_H_
