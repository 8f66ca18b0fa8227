#ifndef DDP_ELASTIC_CHECKPOINT_WIRE_STATUS_H_
#define DDP_ELASTIC_CHECKPOINT_WIRE_STATUS_H_

#include <string>

#include "absl/status/statusor.h"

namespace ddp::elastic {

// A text or an error as one text, for the way between ranks.
std::string EncodeResult(const absl::StatusOr<std::string>& result);

// The inverse. What is not such a text is kInternal.
absl::StatusOr<std::string> DecodeResult(const std::string& text);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_WIRE_STATUS_H_
