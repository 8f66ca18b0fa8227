#include "testing/simulator/redis/command_words.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>

namespace ddp::testing {

char Upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; }
char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

bool Is(std::string_view text, std::string_view upper) {
  return std::equal(text.begin(), text.end(), upper.begin(), upper.end(),
                    [](char a, char b) { return Upper(a) == b; });
}

std::optional<int64_t> ToInteger(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return {};
  const bool has_zero_first = text.size() > 1 && (text[0] == '0' || text.substr(0, 2) == "-0");
  if (has_zero_first) return {};
  return value;
}

std::optional<double> ToDouble(std::string_view text) {
  if (Is(text, "INF") || Is(text, "+INF") || Is(text, "INFINITY") || Is(text, "+INFINITY")) {
    return std::numeric_limits<double>::infinity();
  }
  if (Is(text, "-INF") || Is(text, "-INFINITY")) return -std::numeric_limits<double>::infinity();
  if (!text.empty() && text[0] == '+') text.remove_prefix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || std::isnan(value)) return {};
  return value;
}

Number::Number(double value) : size_(snprintf(text_.data(), text_.size(), "%.17g", value)) {}
Number::Number(int64_t value)
    : size_(std::to_chars(text_.data(), text_.data() + text_.size(), value).ptr - text_.data()) {}

std::optional<Bound> ToBound(std::string_view text) {
  Bound bound;
  if (!text.empty() && text[0] == '(') {
    bound.exclusive = true;
    text.remove_prefix(1);
  }
  if (text.empty()) return bound;  // Redis reads an empty text as 0 here
  const std::optional<double> value = ToDouble(text);
  if (!value) return {};
  bound.value = *value;
  return bound;
}

std::pair<int64_t, int64_t> Slice(int64_t start, int64_t stop, int64_t size) {
  if (start < 0) start = std::max<int64_t>(0, size + start);
  if (stop < 0) stop = size + stop;
  stop = std::min(stop, size - 1);
  if (start > stop || start >= size) return {0, 0};
  return {start, stop + 1};
}

}  // namespace ddp::testing
