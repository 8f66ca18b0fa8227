#include "store/redis/redis_script.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace ddp::store {
namespace {

// SHA-1 (FIPS 180-4, 6.1), because Redis names scripts by it. No security depends on it.
class Sha1 {
 public:
  static std::string Hex(std::string message) {
    const uint64_t bits = uint64_t{message.size()} * 8;
    message.push_back('\x80');
    while (message.size() % kBlockBytes != kBlockBytes - sizeof(bits)) message.push_back('\0');
    for (int shift = 56; shift >= 0; shift -= 8) {
      message.push_back(static_cast<char>(bits >> shift));
    }
    Sha1 sha1;
    for (size_t at = 0; at < message.size(); at += kBlockBytes) sha1.AddBlock(message, at);
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string hex;
    for (const uint32_t word : sha1.state_) {
      for (int shift = 28; shift >= 0; shift -= 4) hex.push_back(kDigits[(word >> shift) & 15]);
    }
    return hex;
  }

 private:
  static constexpr size_t kBlockBytes = 64;

  void AddBlock(const std::string& message, size_t at) {
    std::array<uint32_t, 80> w{};
    for (int t = 0; t < 64; ++t) {
      w[t / 4] = w[t / 4] << 8 | static_cast<unsigned char>(message[at + t]);
    }
    for (int t = 16; t < 80; ++t) w[t] = std::rotl(w[t - 3] ^ w[t - 8] ^ w[t - 14] ^ w[t - 16], 1);
    auto [a, b, c, d, e] = state_;
    for (int t = 0; t < 80; ++t) {
      const uint32_t f = t < 20   ? (b & c) | (~b & d)
                         : t < 40 ? b ^ c ^ d
                         : t < 60 ? (b & c) | (b & d) | (c & d)
                                  : b ^ c ^ d;
      static constexpr uint32_t kRound[] = {0x5a827999, 0x6ed9eba1, 0x8f1bbcdc, 0xca62c1d6};
      const uint32_t next = std::rotl(a, 5) + f + e + kRound[t / 20] + w[t];
      e = d;
      d = c;
      c = std::rotl(b, 30);
      b = a;
      a = next;
    }
    const std::array<uint32_t, 5> add = {a, b, c, d, e};
    for (size_t i = 0; i < add.size(); ++i) state_[i] += add[i];
  }

  std::array<uint32_t, 5> state_ = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476, 0xc3d2e1f0};
};

}  // namespace

RedisScript::RedisScript(std::string source)
    : source_(std::move(source)), sha1_hex_(Sha1::Hex(source_)) {}

}  // namespace ddp::store
