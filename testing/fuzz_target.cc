#include "testing/fuzz_target.h"

#include <algorithm>

namespace ddp::testing {

absl::string_view FuzzInput::TakeBytes(size_t size) {
  const absl::string_view taken = rest_.substr(0, size);
  rest_.remove_prefix(taken.size());
  return taken;
}

uint64_t FuzzInput::TakeNumber(size_t bytes) {
  uint64_t number = 0;
  const absl::string_view taken = TakeBytes(bytes);
  for (size_t i = 0; i < taken.size(); ++i) {
    number |= static_cast<uint64_t>(static_cast<unsigned char>(taken[i])) << (8 * i);
  }
  return number;
}

std::string FuzzNumber(uint64_t number) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(number); ++i) {
    bytes.push_back(static_cast<char>((number >> (8 * i)) & 0xff));
  }
  return bytes;
}

std::vector<std::vector<char>> FuzzPieces(absl::string_view bytes, uint8_t seed) {
  constexpr uint32_t kLongestPiece = 32;
  std::vector<std::vector<char>> pieces;
  uint32_t state = seed;
  while (!bytes.empty()) {
    state = state * 1664525 + 1013904223;
    const absl::string_view piece = bytes.substr(0, 1 + (state >> 16) % kLongestPiece);
    pieces.emplace_back(piece.begin(), piece.end());
    bytes.remove_prefix(piece.size());
  }
  return pieces;
}

bool IsOneLine(absl::string_view text) {
  return !text.empty() && std::none_of(text.begin(), text.end(), [](unsigned char byte) {
    return byte < 0x20 || byte == 0x7f;
  });
}

}  // namespace ddp::testing
