#ifndef DDP_BASE_TEXT_FIELDS_H_
#define DDP_BASE_TEXT_FIELDS_H_

#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace ddp {

inline bool ReadField(absl::string_view text, std::string& field) {
  field = std::string(text);
  return true;
}
template <typename Number>
bool ReadField(absl::string_view text, Number& field) {
  return absl::SimpleAtoi(text, &field);
}

// Reads the fields of a text, numbers and words, between which one separator stands. The last field
// may be a word with separators in it. Returns false when there are too few fields, or one of them
// is not the number that it should be; some fields may then be changed.
//   if (ReadFields("left 3 12", ' ', word, incarnation, launched) && word == "left") ...
template <typename... Fields>
bool ReadFields(absl::string_view text, char separator, Fields&... fields) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(text, absl::MaxSplits(separator, sizeof...(fields) - 1));
  size_t next = 0;
  return words.size() == sizeof...(fields) && (ReadField(words[next++], fields) && ...);
}

}  // namespace ddp

#endif  // DDP_BASE_TEXT_FIELDS_H_
