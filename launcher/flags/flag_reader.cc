#include "launcher/flags/flag_reader.h"

#include <glog/logging.h>

#include <algorithm>
#include <cctype>
#include <cstddef>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "launcher/flags/flag_table.h"

namespace ddp::launcher {
namespace {

constexpr size_t kMaxShownLength = 200;

bool IsPrintable(const std::string& text) {
  return std::none_of(text.begin(), text.end(),
                      [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

// Counts the characters of UTF-8: every byte but those that continue one. A byte is one character
// in a text that is not UTF-8.
size_t CountCharacters(const std::string& text) {
  constexpr size_t kMaxBytesPerCharacter = 4;
  const size_t begun = static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xC0) != 0x80; }));
  return begun * kMaxBytesPerCharacter < text.size() ? text.size() : begun;
}

}  // namespace

std::string Shown(std::string text) {
  for (char& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) c = '?';
  }
  if (text.size() > kMaxShownLength) return text.substr(0, kMaxShownLength) + "...";
  return text;
}

bool ParseInteger(const std::string& text, int64_t* value) {
  const size_t digits = text.rfind('-', 0) == 0 ? 1 : 0;
  if (text.size() == digits) return false;
  if (!std::all_of(text.begin() + static_cast<std::ptrdiff_t>(digits), text.end(),
                   [](unsigned char c) { return std::isdigit(c) != 0; })) {
    return false;
  }
  return absl::SimpleAtoi(text, value);
}

bool ParseSeconds(const std::string& text, absl::Duration* value) {
  double seconds = 0;
  if (!absl::SimpleAtod(text, &seconds) || !(seconds >= 0 && seconds <= kMaxFlagSeconds)) {
    return false;
  }
  *value = absl::Seconds(seconds);
  return true;
}

std::string FlagReader::Text(const std::string& name) const {
  const FlagSpec* const flag = FindFlag(name);
  CHECK(flag != nullptr) << "no flag " << name;
  const auto found = given_.find(name);
  if (found != given_.end()) return found->second.value;
  return flag->takes_value ? TextOf(flag->default_value) : "false";
}

bool FlagReader::IsGiven(const std::string& name) const {
  return given_.contains(name) && !Text(name).empty();
}

bool FlagReader::IsGivenAsFlag(const std::string& name) const {
  return IsGiven(name) && given_.at(name).spelled.starts_with('-');
}

std::string FlagReader::NameOf(const std::string& name) const {
  const auto found = given_.find(name);
  return found != given_.end() ? found->second.spelled : absl::StrCat("--", name);
}

absl::Status FlagReader::BadValue(const std::string& name, const std::string& expected) const {
  return absl::InvalidArgumentError(
      absl::StrCat(NameOf(name), "=", Shown(Text(name)), ": ", expected));
}

absl::StatusOr<int64_t> FlagReader::Integer(const std::string& name, Range range) const {
  int64_t value = 0;
  if (!ParseInteger(Text(name), &value) || value < range.min || value > range.max) {
    return BadValue(name,
                    absl::StrCat("expected a whole number from ", range.min, " to ", range.max));
  }
  return value;
}

absl::StatusOr<absl::Duration> FlagReader::Milliseconds(const std::string& name,
                                                        Range range) const {
  const absl::StatusOr<int64_t> value = Integer(name, range);
  if (!value.ok()) return value.status();
  return absl::Milliseconds(*value);
}

absl::StatusOr<absl::Duration> FlagReader::Seconds(const std::string& name) const {
  absl::Duration value;
  if (!ParseSeconds(Text(name), &value)) {
    return BadValue(name, absl::StrCat("expected seconds from 0 to ", kMaxFlagSeconds));
  }
  return value;
}

absl::Status FlagReader::CheckName(const std::string& name, size_t max_characters) const {
  const std::string text = Text(name);
  if (text.empty() || CountCharacters(text) > max_characters || !IsPrintable(text)) {
    return BadValue(name, absl::StrCat("expected 1 to ", max_characters, " printable characters"));
  }
  return absl::OkStatus();
}

}  // namespace ddp::launcher
