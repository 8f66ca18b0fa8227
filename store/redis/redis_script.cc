#include "store/redis/redis_script.h"

#include <array>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "openssl/sha.h"

namespace ddp::store {
namespace {

// Redis names scripts by their SHA-1. No security depends on it.
std::string Sha1Hex(const std::string& text) {
  std::array<unsigned char, SHA_DIGEST_LENGTH> digest;
  SHA1(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

}  // namespace

RedisScript::RedisScript(std::string source)
    : source_(std::move(source)), sha1_hex_(Sha1Hex(source_)) {}

}  // namespace ddp::store
