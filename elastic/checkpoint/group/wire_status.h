#ifndef DDP_ELASTIC_CHECKPOINT_GROUP_WIRE_STATUS_H_
#define DDP_ELASTIC_CHECKPOINT_GROUP_WIRE_STATUS_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::elastic {

// Encodes a text or an error as one text, which ranks send to each other.
std::string EncodeResult(const absl::StatusOr<std::string>& result);

// Inverts EncodeResult(). Errors: the encoded one; kInternal when `text` is not from
// EncodeResult().
absl::StatusOr<std::string> DecodeResult(const std::string& text);

// Returns `error` with "rank 3: " before its message.
absl::Status FromRank(size_t rank, const absl::Status& error);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_GROUP_WIRE_STATUS_H_
