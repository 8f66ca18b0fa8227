#include "launcher/output/line_prefix.h"

#include <cctype>
#include <cstddef>

namespace ddp::launcher {
namespace {

bool IsNameByte(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

bool BeginsName(char c) {
  return IsNameByte(c) && std::isdigit(static_cast<unsigned char>(c)) == 0;
}

// Returns the length of the name at `text[at]`; 0 when there is none.
size_t NameLength(const std::string& text, size_t at) {
  if (at >= text.size() || !BeginsName(text[at])) return 0;
  size_t end = at;
  while (end < text.size() && IsNameByte(text[end])) ++end;
  return end - at;
}

}  // namespace

std::string ExpandTemplate(const std::string& text,
                           const std::map<std::string, std::string>& values) {
  std::string result;
  size_t at = 0;
  while (at < text.size()) {
    if (text[at] != '$') {
      result += text[at++];
      continue;
    }
    if (text.compare(at, 2, "$$") == 0) {
      result += '$';
      at += 2;
      continue;
    }
    const bool braced = text.compare(at, 2, "${") == 0;
    const size_t name_at = at + (braced ? 2 : 1);
    const size_t length = NameLength(text, name_at);
    const bool whole = length > 0 && (!braced || text.compare(name_at + length, 1, "}") == 0);
    const auto value = whole ? values.find(text.substr(name_at, length)) : values.end();
    const size_t end = whole ? name_at + length + (braced ? 1 : 0) : at + 1;
    result += value == values.end() ? text.substr(at, end - at) : value->second;
    at = end;
  }
  return result;
}

}  // namespace ddp::launcher
