#include "ddp/model/model_metadata.h"

#include <algorithm>
#include <cstring>

#include <xxhash.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace ddp::internal {
namespace {

// Describes a tensor. A line is "<item>\t<description>"; the first part identifies the item.
std::string Describe(const ModelMetadata::Tensor& tensor) {
  return absl::StrCat(tensor.name, " ", tensor.dtype, " [", absl::StrJoin(tensor.shape, ", "),
                      "] strides [", absl::StrJoin(tensor.strides, ", "), "]",
                      tensor.requires_grad ? " requires_grad" : "");
}

std::pair<std::string, std::string> SplitLine(const std::string& line) {
  const size_t tab = line.find('\t');
  if (tab == std::string::npos) return {line, ""};
  return {line.substr(0, tab), line.substr(tab + 1)};
}

bool HasItem(const std::vector<std::string>& lines, const std::string& item) {
  return std::any_of(lines.begin(), lines.end(),
                     [&](const std::string& line) { return SplitLine(line).first == item; });
}

std::string OnlyOne(const std::string& item, const std::string& value, int rank, int other) {
  return absl::StrCat("rank ", rank, " has ", item, " (", value, ") and rank ", other, " has not");
}

}  // namespace

void ModelMetadata::AddParameter(const Tensor& tensor) {
  lines_.push_back(absl::StrCat("parameter ", parameters_++, "\t", Describe(tensor)));
}

void ModelMetadata::AddBuffer(const Tensor& tensor) {
  lines_.push_back(absl::StrCat("buffer ", buffers_++, "\t", Describe(tensor)));
}

void ModelMetadata::AddOption(const std::string& name, const std::string& value) {
  lines_.push_back(absl::StrCat("option ", name, "\t", value));
}

std::string ModelMetadata::Serialize() const { return absl::StrJoin(lines_, "\n"); }

std::pair<uint64_t, uint64_t> ModelMetadata::Hash() const {
  const std::string text = Serialize();
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return {hash.high64, hash.low64};
}

std::string ModelMetadata::FirstDifference(const std::string& a, int rank_a, const std::string& b,
                                           int rank_b) {
  const std::vector<std::string> lines_a = absl::StrSplit(a, '\n');
  const std::vector<std::string> lines_b = absl::StrSplit(b, '\n');
  const size_t common = std::min(lines_a.size(), lines_b.size());
  for (size_t i = 0; i < common; ++i) {
    if (lines_a[i] == lines_b[i]) continue;
    const auto [item_a, value_a] = SplitLine(lines_a[i]);
    const auto [item_b, value_b] = SplitLine(lines_b[i]);
    if (item_a == item_b) {
      return absl::StrCat(item_a, " is ", value_a, " on rank ", rank_a, " and ", value_b,
                          " on rank ", rank_b);
    }
    const bool only_a = !HasItem(lines_b, item_a);
    const bool only_b = !HasItem(lines_a, item_b);
    if (only_a != only_b) {
      return only_a ? OnlyOne(item_a, value_a, rank_a, rank_b)
                    : OnlyOne(item_b, value_b, rank_b, rank_a);
    }
    return absl::StrCat("rank ", rank_a, " has ", item_a, " (", value_a, ") where rank ", rank_b,
                        " has ", item_b, " (", value_b, ")");
  }
  if (lines_a.size() == lines_b.size()) return "";
  const bool a_longer = lines_a.size() > lines_b.size();
  const auto [item, value] = SplitLine(a_longer ? lines_a[common] : lines_b[common]);
  return OnlyOne(item, value, a_longer ? rank_a : rank_b, a_longer ? rank_b : rank_a);
}

}  // namespace ddp::internal
