#ifndef DDP_COMMON_NAME_LIST_H_
#define DDP_COMMON_NAME_LIST_H_

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp::internal {

// Returns names for a message: "a, b, c", and beyond `limit` of them "a, b, c and 7 more".
inline std::string NameList(const std::vector<std::string>& names, size_t limit = 20) {
  if (names.size() <= limit) return absl::StrJoin(names, ", ");
  return absl::StrCat(absl::StrJoin(names.begin(), names.begin() + static_cast<int>(limit), ", "),
                      " and ", names.size() - limit, " more");
}

// Returns ranks for a message: "rank 1" or "ranks 1, 3".
inline std::string RankList(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

}  // namespace ddp::internal

#endif  // DDP_COMMON_NAME_LIST_H_
