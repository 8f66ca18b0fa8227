#ifndef DDP_BASE_HMAC_SHA256_H_
#define DDP_BASE_HMAC_SHA256_H_

#include <string>

#include "absl/strings/string_view.h"

namespace ddp {

// Returns the HMAC-SHA256 (RFC 2104, FIPS 180-4) of `message` under `key`: 32 bytes. Any thread.
std::string HmacSha256(absl::string_view key, absl::string_view message);

// Returns the SHA-256 of `message`: 32 bytes. Any thread.
std::string Sha256(absl::string_view message);

// Returns true when `one` and `two` are equal. The time depends on their sizes alone, so an
// attacker cannot measure how much of a guess is right.
bool EqualInConstantTime(absl::string_view one, absl::string_view two);

}  // namespace ddp

#endif  // DDP_BASE_HMAC_SHA256_H_
