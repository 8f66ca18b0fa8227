#include "ddp/model/replica_drift.h"

#include <cstddef>
#include <map>

#include "absl/strings/str_cat.h"
#include "ddp/common/name_list.h"

namespace ddp::internal {
namespace {

constexpr size_t kNamedRanks = 16;  // of each side; a job may have thousands

std::string Ranks(const std::vector<int>& ranks) {
  if (ranks.size() <= kNamedRanks) return RankList(ranks);
  const std::vector<int> first(ranks.begin(), ranks.begin() + kNamedRanks);
  return absl::StrCat(RankList(first), " and ", ranks.size() - kNamedRanks, " more");
}

// Returns the hash that most ranks have; of several, the one of the lowest rank.
int64_t CommonHash(const std::vector<int64_t>& by_rank) {
  std::map<int64_t, int> counts;
  for (const int64_t hash : by_rank) ++counts[hash];
  int64_t common = by_rank.front();
  for (const int64_t hash : by_rank) {
    if (counts[hash] > counts[common]) common = hash;
  }
  return common;
}

std::string DescribeParameter(const std::string& name, const std::vector<int64_t>& by_rank) {
  const int64_t common = CommonHash(by_rank);
  std::vector<int> equal;
  std::vector<int> other;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    (by_rank[rank] == common ? equal : other).push_back(static_cast<int>(rank));
  }
  if (other.empty()) return "";
  return absl::StrCat(name, " has other values on ", Ranks(other), " than on ", Ranks(equal));
}

}  // namespace

std::string DescribeDrift(const std::vector<std::string>& names, std::span<const int64_t> hashes) {
  std::string first;
  size_t differing = 0;
  for (size_t parameter = 0; parameter < names.size(); ++parameter) {
    std::vector<int64_t> by_rank;
    for (size_t at = parameter; at < hashes.size(); at += names.size()) {
      by_rank.push_back(hashes[at]);
    }
    const std::string difference = DescribeParameter(names[parameter], by_rank);
    if (difference.empty()) continue;
    if (differing++ == 0) first = difference;
  }
  if (differing == 0) return "";
  return absl::StrCat(first, "; ", differing, " of ", names.size(), " parameters differ");
}

}  // namespace ddp::internal
