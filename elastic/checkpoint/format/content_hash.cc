#include "elastic/checkpoint/format/content_hash.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "glog/logging.h"

namespace ddp::elastic {
namespace {

std::string ToHex(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest)));
}

bool IsLowerHex(char character) {
  return (character >= '0' && character <= '9') || (character >= 'a' && character <= 'f');
}

XXH3_state_t* State(void* state) { return static_cast<XXH3_state_t*>(state); }

}  // namespace

ContentHash ContentHash::Of(const void* data, size_t bytes) {
  return ContentHash(ToHex(XXH3_128bits(data, bytes)));
}

absl::StatusOr<ContentHash> ContentHash::FromHex(const std::string& hex) {
  if (hex.size() != 32 || !std::all_of(hex.begin(), hex.end(), IsLowerHex)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", absl::CHexEscape(hex.substr(0, 64)), "\" is no XXH3-128 hash"));
  }
  return ContentHash(hex);
}

ContentHasher::ContentHasher() : state_(XXH3_createState()) {
  CHECK(state_ != nullptr) << "out of memory";
  XXH3_128bits_reset(State(state_.get()));
}

void ContentHasher::Free::operator()(void* state) const { XXH3_freeState(State(state)); }

void ContentHasher::Update(const void* data, size_t bytes) {
  XXH3_128bits_update(State(state_.get()), data, bytes);
}

ContentHash ContentHasher::Digest() const {
  return ContentHash(ToHex(XXH3_128bits_digest(State(state_.get()))));
}

}  // namespace ddp::elastic
