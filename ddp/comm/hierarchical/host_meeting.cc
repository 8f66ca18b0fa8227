#include "ddp/comm/hierarchical/host_meeting.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"

namespace ddp::internal {
namespace {

std::string IdentityKey(int rank) { return absl::StrCat("identity/", rank); }
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

// Writes this rank's text under its key, and returns the texts of all ranks. `keys`: by rank.
absl::StatusOr<std::vector<std::string>> Exchange(GroupStore& store, int rank,
                                                  const std::vector<std::string>& keys,
                                                  const std::string& text, absl::Duration timeout) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  store.Set(keys[rank], text);
  for (size_t other = 0; other < keys.size(); ++other) {
    if (store.Wait(keys[other], deadline - clock.Now())) continue;
    return absl::DeadlineExceededError(absl::StrCat("rank ", other, " has not come"));
  }
  return store.GetAll(keys);
}

}  // namespace

std::string HostIdentity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network {};
  (void)::stat("/proc/self/ns/net", &network);
  struct stat processes {};
  (void)::stat("/proc/self/ns/pid", &processes);
  std::array<char, 256> name = {};
  (void)::gethostname(name.data(), name.size() - 1);
  return absl::StrCat(boot, " ", network.st_ino, " ", processes.st_ino, " ", name.data());
}

absl::StatusOr<std::vector<std::string>> ExchangeHosts(GroupStore& store, int rank, int size,
                                                       const std::string& identity,
                                                       absl::Duration timeout) {
  return Exchange(store, rank, ExchangeHostsKeys(size), identity, timeout);
}

HostPlace HostPlaceOf(std::span<const std::string> identities, int rank) {
  HostPlace place;
  int on_host = 0;
  int first = -1;
  int last = -1;
  for (int other = 0; other < static_cast<int>(identities.size()); ++other) {
    if (identities[other] != identities[rank]) continue;
    if (other == rank) place.local_rank = on_host;
    if (on_host++ == 0) first = other;
    last = other;
  }
  if (last - first + 1 == on_host) place.local = {.begin = first, .end = last + 1};
  return place;
}

absl::StatusOr<std::vector<RankRange>> FindHosts(GroupStore& store, int rank, int size,
                                                 RankRange local, absl::Duration timeout) {
  auto places = Exchange(store, rank, FindHostsKeys(size),
                         absl::StrCat(local.begin, "-", local.end), timeout);
  if (!places.ok()) return places.status();
  std::vector<RankRange> ranges;
  for (const std::string& place : *places) ranges.push_back(ParseRange(place));
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

std::vector<std::string> ExchangeHostsKeys(int size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(IdentityKey(rank));
  return keys;
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
