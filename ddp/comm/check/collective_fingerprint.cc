#include "ddp/comm/check/collective_fingerprint.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace ddp::internal {
namespace {

constexpr char kSeparator = '\n';
constexpr size_t kFields = 7;

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// "rank 3", "ranks 1, 3".
std::string Ranks(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

std::string Differences(const CollectiveFingerprint& a, const CollectiveFingerprint& b) {
  std::vector<std::string> aspects;
  if (a.operation != b.operation) aspects.push_back("operation");
  if (a.dtype != b.dtype) aspects.push_back("dtype");
  if (a.shape != b.shape) aspects.push_back("shape");
  if (a.layout != b.layout) aspects.push_back("layout");
  if (a.device != b.device) aspects.push_back("device type");
  if (a.root != b.root) aspects.push_back("root");
  if (a.what != b.what) aspects.push_back("purpose");
  return absl::StrJoin(aspects, ", ");
}

}  // namespace

// The purpose comes last, because a user may have written it: it may contain the separator.
std::string CollectiveFingerprint::Serialize() const {
  return absl::StrJoin(
      {operation, dtype, absl::StrJoin(shape, ","), layout, device, absl::StrCat(root), what},
      std::string(1, kSeparator));
}

std::optional<CollectiveFingerprint> CollectiveFingerprint::Parse(const std::string& text) {
  std::vector<std::string> fields =
      absl::StrSplit(text, absl::MaxSplits(kSeparator, static_cast<int>(kFields) - 1));
  CollectiveFingerprint result;
  if (fields.size() != kFields || !absl::SimpleAtoi(fields[5], &result.root)) return std::nullopt;
  for (const auto& word : absl::StrSplit(fields[2], ',', absl::SkipEmpty())) {
    int64_t size = 0;
    if (!absl::SimpleAtoi(word, &size)) return std::nullopt;
    result.shape.push_back(size);
  }
  result.operation = std::move(fields[0]);
  result.dtype = std::move(fields[1]);
  result.layout = std::move(fields[3]);
  result.device = std::move(fields[4]);
  result.what = std::move(fields[6]);
  return result;
}

std::string CollectiveFingerprint::Describe() const {
  return absl::StrCat(operation, root >= 0 ? absl::StrCat(" from rank ", root) : "", " of a ",
                      layout == "Strided" ? "" : absl::StrCat(layout, " "), dtype,
                      " tensor of shape ", ShapeText(shape), " on ", device, " (", what, ")");
}

std::string CompareFingerprints(int64_t sequence,
                                const std::vector<CollectiveFingerprint>& fingerprints) {
  // The ranks of each version, in the order of the lowest ranks.
  std::vector<std::vector<int>> versions;
  std::map<std::string, size_t> index;
  for (size_t rank = 0; rank < fingerprints.size(); ++rank) {
    const auto [known, added] = index.try_emplace(fingerprints[rank].Serialize(), versions.size());
    if (added) versions.emplace_back();
    versions[known->second].push_back(static_cast<int>(rank));
  }
  if (versions.size() <= 1) return std::string();
  const auto most =
      std::max_element(versions.begin(), versions.end(),
                       [](const auto& a, const auto& b) { return a.size() < b.size(); });
  const CollectiveFingerprint& usual = fingerprints[most->front()];
  std::string text =
      absl::StrCat("Detected mismatch between collectives on ranks: as collective ", sequence, ", ",
                   Ranks(*most), most->size() == 1 ? " runs " : " run ", usual.Describe());
  for (const std::vector<int>& version : versions) {
    if (&version == &*most) continue;
    const CollectiveFingerprint& other = fingerprints[version.front()];
    absl::StrAppend(&text, "; but ", Ranks(version), version.size() == 1 ? " runs " : " run ",
                    other.Describe(), ": they differ in ", Differences(usual, other));
  }
  absl::StrAppend(&text, ". All ranks must call the same collectives in the same order");
  return text;
}

}  // namespace ddp::internal
