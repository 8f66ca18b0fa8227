#include "ddp/rpc/first_meeting.h"

#include <limits>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/text_fields.h"
#include "ddp/comm/meeting/store_meeting.h"

namespace ddp::rpc::internal {

using ddp::internal::StoreMeeting;

namespace {

constexpr char kFirst[] = "first";
constexpr char kMeeting[] = "meeting";

int64_t RandomNumber() {
  std::random_device device;
  return std::uniform_int_distribution<int64_t>(1, std::numeric_limits<int64_t>::max())(device);
}

}  // namespace

FirstMeeting MeetFirst(std::shared_ptr<ddp::internal::GroupStore> store, const std::string& name,
                       const ddp::internal::Membership& membership, absl::Duration timeout) {
  FirstMeeting result;
  const std::string mine = absl::StrCat(RandomNumber(), " ", membership.size, " ", name);
  const std::string first = store->SetIfNew(kFirst, mine);
  StoreMeeting meeting(std::move(store), kMeeting, membership);
  int size = 0;
  std::string first_name;
  if (!ReadFields(first, ' ', result.world, size, first_name)) {
    result.mismatch = absl::StrCat("the store has \"", first,
                                   "\" from another program or version of this library");
    return result;
  }
  if (size != membership.size) {
    result.mismatch =
        absl::StrCat("worker ", first_name, " has world_size ", size, ", and worker ", name,
                     " has world_size ", membership.size, ": give all workers the same");
    meeting.Decide(result.mismatch);
    return result;
  }
  meeting.Arrive(name);
  const std::optional<std::string> verdict = meeting.AwaitVerdict(timeout);
  if (!verdict.has_value()) {
    result.late = absl::StrJoin(meeting.Missing(), ", ");
  } else if (*verdict != StoreMeeting::kMet) {
    result.mismatch = *verdict;
  }
  return result;
}

}  // namespace ddp::rpc::internal
