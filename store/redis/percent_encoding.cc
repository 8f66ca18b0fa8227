#include "store/redis/percent_encoding.h"

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace ddp::store {
namespace {

void AppendEncoded(unsigned char character, std::string& out) {
  static constexpr char kDigits[] = "0123456789ABCDEF";
  out.push_back('%');
  out.push_back(kDigits[character >> 4]);
  out.push_back(kDigits[character & 15]);
}

// Returns -1 when `character` is not a hexadecimal digit.
int DigitValue(char character) {
  if (character >= '0' && character <= '9') return character - '0';
  if (character >= 'a' && character <= 'f') return character - 'a' + 10;
  if (character >= 'A' && character <= 'F') return character - 'A' + 10;
  return -1;
}

}  // namespace

std::string PercentEncode(const std::string& text, const std::string& reserved) {
  std::string out;
  for (const char character : text) {
    if (character == '%' || reserved.find(character) != std::string::npos) {
      AppendEncoded(character, out);
    } else {
      out.push_back(character);
    }
  }
  return out;
}

std::string PercentEncodeForUrl(const std::string& text) {
  static constexpr char kPlain[] = "-._~:/";
  std::string out;
  for (const char character : text) {
    const bool plain =
        character != '\0' && (absl::ascii_isalnum(character) ||
                              std::string(kPlain).find(character) != std::string::npos);
    if (plain) {
      out.push_back(character);
    } else {
      AppendEncoded(character, out);
    }
  }
  return out;
}

absl::StatusOr<std::string> PercentDecode(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out.push_back(text[i]);
      continue;
    }
    const int high = i + 2 < text.size() ? DigitValue(text[i + 1]) : -1;
    const int low = i + 2 < text.size() ? DigitValue(text[i + 2]) : -1;
    if (high < 0 || low < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", absl::CHexEscape(text), "' has a % without two hexadecimal digits at byte ", i));
    }
    out.push_back(static_cast<char>(high * 16 + low));
    i += 2;
  }
  return out;
}

std::string EncodeRunIdForKey(const std::string& run_id) { return PercentEncode(run_id, "{}"); }

}  // namespace ddp::store
