#ifndef DDP_ELASTIC_CHECKPOINT_FORMAT_CONTENT_HASH_H_
#define DDP_ELASTIC_CHECKPOINT_FORMAT_CONTENT_HASH_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace ddp::elastic {

// The XXH3-128 hash of some bytes. Detects damage, not deliberate changes. A value.
class ContentHash {
 public:
  ContentHash() = default;

  static ContentHash Of(const void* data, size_t bytes);
  static ContentHash Of(const std::string& text) { return Of(text.data(), text.size()); }

  // Returns 32 lower-case hexadecimal digits in the canonical order, as xxh128sum prints them.
  const std::string& Hex() const { return hex_; }

  // Inverts Hex(). kInvalidArgument when `hex` is not such a text.
  static absl::StatusOr<ContentHash> FromHex(const std::string& hex);

  friend bool operator==(const ContentHash&, const ContentHash&) = default;

 private:
  friend class ContentHasher;
  explicit ContentHash(std::string hex) : hex_(std::move(hex)) {}

  std::string hex_ = std::string(32, '0');
};

// Computes a ContentHash over a stream of bytes. Thread-compatible.
class ContentHasher {
 public:
  ContentHasher();
  ContentHasher(ContentHasher&&) noexcept = default;
  ContentHasher& operator=(ContentHasher&&) noexcept = default;

  void Update(const void* data, size_t bytes);
  ContentHash Digest() const;  // of all updates so far

 private:
  struct Free {
    void operator()(void* state) const;
  };
  std::unique_ptr<void, Free> state_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FORMAT_CONTENT_HASH_H_
