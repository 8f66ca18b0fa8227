#include "base/hmac_sha256.h"

#include <array>

#include "openssl/crypto.h"
#include "openssl/evp.h"
#include "openssl/hmac.h"
#include "openssl/sha.h"

namespace ddp {
namespace {

using Digest = std::array<unsigned char, SHA256_DIGEST_LENGTH>;

const unsigned char* Bytes(absl::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

}  // namespace

std::string Sha256(absl::string_view message) {
  Digest digest;
  SHA256(Bytes(message), message.size(), digest.data());
  return std::string(digest.begin(), digest.end());
}

std::string HmacSha256(absl::string_view key, absl::string_view message) {
  Digest digest;
  // A null key would mean the key of an earlier call.
  const absl::string_view given = key.data() == nullptr ? "" : key;
  HMAC(EVP_sha256(), given.data(), static_cast<int>(given.size()), Bytes(message), message.size(),
       digest.data(), nullptr);
  return std::string(digest.begin(), digest.end());
}

bool EqualInConstantTime(absl::string_view one, absl::string_view two) {
  return one.size() == two.size() && CRYPTO_memcmp(one.data(), two.data(), one.size()) == 0;
}

}  // namespace ddp
