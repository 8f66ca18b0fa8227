#ifndef DDP_BASE_TEXT_TEXT_TABLE_H_
#define DDP_BASE_TEXT_TEXT_TABLE_H_

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ddp {

// A table of text for a terminal. Each column is as wide as its widest text, in bytes. A row may
// have fewer texts than the header. Thread-compatible.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> header) { Add(std::move(header)); }

  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  // Returns one line for each row, the header first. A line ends with its last text.
  std::string Text() const {
    std::vector<size_t> widths;
    for (const std::vector<std::string>& row : rows_) {
      widths.resize(std::max(widths.size(), row.size()));
      for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    std::string text;
    for (const std::vector<std::string>& row : rows_) {
      std::string line = " ";
      for (size_t i = 0; i < row.size(); ++i) {
        absl::StrAppend(&line, " ", row[i], std::string(widths[i] - row[i].size() + 1, ' '));
      }
      line.erase(line.find_last_not_of(' ') + 1);
      absl::StrAppend(&text, line, "\n");
    }
    return text;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace ddp

#endif  // DDP_BASE_TEXT_TEXT_TABLE_H_
