#include "ddp/comm/hierarchical/host_meeting.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/text_fields.h"
#include "ddp/comm/meeting/store_meeting.h"

namespace ddp::internal {
namespace {

constexpr char kHosts[] = "hosts";  // the name of the meeting

// Returns an empty range for a text that is no range.
RankRange ParseRange(const std::string& text) {
  RankRange range;
  return ReadFields(text, '-', range.begin, range.end) ? range : RankRange{};
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
  const std::shared_ptr<GroupStore> of_caller(std::shared_ptr<GroupStore>(), &store);
  StoreMeeting meeting(of_caller, kHosts, {.rank = rank, .size = size});
  const MeetingEnd end = AttendMeeting(meeting, identity, timeout);
  if (end.missing.empty()) return meeting.Values();
  return absl::DeadlineExceededError(absl::StrCat("rank ", end.missing.front(), " has not come"));
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
  auto places =
      ExchangeHosts(store, rank, size, absl::StrCat(local.begin, "-", local.end), timeout);
  if (!places.ok()) return places.status();
  std::vector<RankRange> ranges;
  for (const std::string& place : *places) ranges.push_back(ParseRange(place));
  auto hosts = HostsFrom(ranges);
  if (hosts.has_value()) return *std::move(hosts);
  return absl::FailedPreconditionError(
      "the ranks do not know, or do not agree, which of them stand on one host");
}

std::vector<std::string> HostsKeys(int size) { return StoreMeeting::Keys(kHosts, size); }

}  // namespace ddp::internal
