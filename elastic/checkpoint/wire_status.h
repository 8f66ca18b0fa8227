#ifndef DDP_ELASTIC_CHECKPOINT_WIRE_STATUS_H_
#define DDP_ELASTIC_CHECKPOINT_WIRE_STATUS_H_

#include <string>

#include "absl/status/statusor.h"

namespace ddp::elastic {

// Encodes a text or an error as one text, which ranks send to each other.
std::string EncodeResult(const absl::StatusOr<std::string>& result);

// Inverts EncodeResult(). Errors: the encoded one; kInternal when `text` is not from
// EncodeResult().
absl::StatusOr<std::string> DecodeResult(const std::string& text);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_WIRE_STATUS_H_
