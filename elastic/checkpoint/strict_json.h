#ifndef DDP_ELASTIC_CHECKPOINT_STRICT_JSON_H_
#define DDP_ELASTIC_CHECKPOINT_STRICT_JSON_H_

#include <string>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {

// Parses JSON that somebody else wrote: one value, no key twice in an object, nested at most 16
// deep, at most 20 million values. Errors: kDataLoss, with the byte.
absl::StatusOr<nlohmann::json> ParseStrictJson(const std::string& text);

// Whether JSON can hold the text.
bool IsUtf8(const std::string& text);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_STRICT_JSON_H_
