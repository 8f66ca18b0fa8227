#ifndef DDP_ELASTIC_CHECKPOINT_FORMAT_STRICT_JSON_H_
#define DDP_ELASTIC_CHECKPOINT_FORMAT_STRICT_JSON_H_

#include <string>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {

// Parses untrusted JSON: one value, no repeated key in an object, at most 16 levels of nesting, and
// at most 20 million values. Errors: kDataLoss; a syntax error names the byte.
absl::StatusOr<nlohmann::json> ParseStrictJson(const std::string& text);

// Returns true when `text` is UTF-8, so that JSON can hold it.
bool IsUtf8(const std::string& text);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FORMAT_STRICT_JSON_H_
