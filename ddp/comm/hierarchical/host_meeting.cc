#include "ddp/comm/hierarchical/host_meeting.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"

namespace ddp::internal {
namespace {

std::string PlaceKey(int rank) { return absl::StrCat("place/", rank); }
std::string SharesKey(int first_rank) { return absl::StrCat("shares/", first_rank); }
std::string PrefixOf(int first_rank) { return absl::StrCat("host/", first_rank); }

// Returns an empty range for a text that PlaceKey() cannot have.
RankRange ParseRange(const std::string& text) {
  const std::vector<std::string> ends = absl::StrSplit(text, '-');
  RankRange range;
  if (ends.size() == 2 && absl::SimpleAtoi(ends[0], &range.begin) &&
      absl::SimpleAtoi(ends[1], &range.end)) {
    return range;
  }
  return {};
}

}  // namespace

absl::StatusOr<std::vector<RankRange>> FindHosts(GroupStore& store, int rank, int size,
                                                 RankRange local, absl::Duration timeout) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  store.Set(PlaceKey(rank), absl::StrCat(local.begin, "-", local.end));
  const std::vector<std::string> names = FindHostsKeys(size);
  for (int other = 0; other < size; ++other) {
    if (store.Wait(names[other], deadline - clock.Now())) continue;
    return absl::DeadlineExceededError(absl::StrCat("rank ", other, " has not come"));
  }
  std::vector<RankRange> ranges;
  for (const std::string& place : store.GetAll(names)) ranges.push_back(ParseRange(place));
  auto hosts = HostsFrom(ranges);
  if (hosts.has_value()) return *std::move(hosts);
  return absl::FailedPreconditionError(
      "the ranks do not know, or do not agree, which of them stand on one host");
}

std::string HostPrefix(const HostLayout& layout) { return PrefixOf(layout.local().begin); }

absl::StatusOr<GroupEntry::Result> ShareMemory(GroupStore& store, GroupStore& of_host,
                                               const HostLayout& layout, absl::Duration timeout) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  auto entry = GroupEntry::Run(
      of_host, {.member = layout.member(), .size = layout.local().size(), .timeout = timeout});
  if (layout.member() == 0) {
    store.Set(SharesKey(layout.local().begin),
              entry.ok() ? "1" : absl::StrCat("0", entry.status().message()));
  }
  if (absl::IsDeadlineExceeded(entry.status())) return entry.status();
  for (const RankRange& host : layout.hosts()) {
    if (!store.Wait(SharesKey(host.begin), deadline - clock.Now())) {
      return absl::DeadlineExceededError(
          absl::StrCat("the ranks of the host of rank ", host.begin, " have not come"));
    }
    const std::string answer = store.Get(SharesKey(host.begin));
    if (answer == "1") continue;
    return absl::UnavailableError(
        absl::StrCat("on the host of rank ", host.begin, ": ", answer.substr(1)));
  }
  return entry;
}

std::vector<std::string> FindHostsKeys(int size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(PlaceKey(rank));
  return keys;
}

std::vector<std::string> ShareMemoryKeys(int size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) {
    keys.push_back(SharesKey(rank));
    for (const std::string& key : GroupEntry::Keys()) {
      keys.push_back(absl::StrCat(PrefixOf(rank), "/", key));
    }
  }
  return keys;
}

}  // namespace ddp::internal
