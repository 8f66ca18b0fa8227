#ifndef DDP_COMM_MEETING_STORE_MEETING_H_
#define DDP_COMM_MEETING_STORE_MEETING_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ddp/comm/meeting/group_store.h"
#include "ddp/common/membership.h"

namespace ddp::internal {

// A barrier of all ranks of a group in the store, at which each rank leaves a value. A renewal,
// a monitored barrier and the comparison of collectives are built on it. A rank "arrives" at the
// meeting by writing its value.
//
// A meeting ends with a verdict: one text, written once (compareSet), equal for all ranks, also for
// a rank that comes later. The last rank to arrive writes kMet. A rank whose wait times out, or
// that knows of a failure, proposes another text; so does a rank that leaves the group, for
// the next renewal. The first text stays. So all ranks agree on the outcome of a meeting, and every
// rank waits for one key, without polling.
//
// Cost per rank: four store commands to arrive and wait (five for the last rank), and one more to
// read all values (on a store without multiGet, one per value).
// Thread-compatible. All methods throw what the store throws, when it fails.
class StoreMeeting {
 public:
  // Verdict of a meeting at which all ranks arrived.
  static constexpr char kMet[] = "met";

  // `name` must be used for one meeting only.
  StoreMeeting(std::shared_ptr<GroupStore> store, std::string name, const Membership& membership);

  // Returns the key of the verdict in the store.
  static std::string VerdictKey(const std::string& name);
  std::string verdict_key() const { return VerdictKey(name_); }

  // Returns all keys that a meeting of `size` ranks leaves in the store.
  static std::vector<std::string> Keys(const std::string& name, int size);

  // Arrives with `value`. Call it once for each rank and meeting. HasArrived() returns true when
  // this rank's value is in the store: a caller that repeats a meeting after the store failed then
  // does not call Arrive() again.
  void Arrive(const std::string& value);
  bool HasArrived();

  // Blocks until there is a verdict and returns it. Returns nullopt after `timeout`.
  std::optional<std::string> AwaitVerdict(absl::Duration timeout);

  // Proposes a verdict. Returns the verdict that holds: this one, or an earlier one.
  std::string Decide(const std::string& verdict);

  // Returns the ranks that have not arrived. Costs one command, and one per rank when any has not.
  std::vector<int> Missing();

  // Returns the values of all ranks, by rank. Only after the verdict kMet.
  std::vector<std::string> Values();

  // Removes this rank's value, and on rank 0 the verdict and the number of arrivals, so the store
  // does not grow. Call it only when no rank can still be in the meeting: after all ranks have
  // arrived at a later one.
  void Forget();

 private:
  std::vector<std::string> ValueKeys() const;

  std::shared_ptr<GroupStore> store_;
  std::string name_;
  int rank_;
  int size_;
};

// Result of a meeting, equal on all ranks. `missing` has the ranks that had not arrived when the
// first wait timed out; it is empty when the meeting did not end by a timeout.
struct MeetingEnd {
  std::string verdict;
  std::vector<int> missing;
};

// Arrives with `value` and blocks until there is a verdict. After `timeout`, ends the meeting with
// a verdict that names the missing ranks. Throws what the store throws.
MeetingEnd AttendMeeting(StoreMeeting& meeting, const std::string& value, absl::Duration timeout);

}  // namespace ddp::internal

#endif  // DDP_COMM_MEETING_STORE_MEETING_H_
