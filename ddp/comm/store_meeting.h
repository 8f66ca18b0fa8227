#ifndef DDP_COMM_STORE_MEETING_H_
#define DDP_COMM_STORE_MEETING_H_

#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "absl/time/time.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace ddp::internal {

// A meeting of all ranks of a group in the store: each leaves a value, and all come to know how it
// ended. What a renewal, a monitored barrier and the comparison of collectives are made of.
//
// It ends with a verdict: one text, written once, by whoever has something to say first, and the
// same for everyone, also for a rank that comes later. The last rank to come writes kMet; one that
// has lost patience, or knows of a failure, writes another text. So no two ranks ever differ about
// whether a meeting took place, and everyone waits for one key, without polling.
//
// Per rank: three commands to the store to come and to wait, one more to read all values.
// Thread-compatible. All methods throw what the store throws, when it fails.
class StoreMeeting {
 public:
  // The verdict of a meeting to which all came.
  static constexpr char kMet[] = "met";

  // `name` is used for one meeting only.
  StoreMeeting(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int size);

  // Where the verdict is, in the store.
  static std::string VerdictKey(const std::string& name);
  std::string verdict_key() const { return VerdictKey(name_); }

  // Once, and first. Where the store may fail and the meeting be tried again: unless HasArrived().
  void Arrive(const std::string& value);
  bool HasArrived();

  // Nullopt: there is none after `timeout`.
  std::optional<std::string> AwaitVerdict(absl::Duration timeout);

  // Proposes a verdict and returns the one that holds: this one, or an earlier one.
  std::string Decide(const std::string& verdict);

  // Who has not come. One command per rank, if not all have.
  std::vector<int> Missing();

  // What the ranks left, in rank order. Only after the verdict kMet.
  std::vector<std::string> Values();

  // Removes what this rank left, so that the store does not grow. Only when no rank can still be
  // in the meeting: once all have come to a later one.
  void Forget();

 private:
  std::string ValueKey(int rank) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
  int rank_;
  int size_;
};

// Runs one meeting to its end: comes with `value` and waits for the verdict. After `timeout` it
// ends the meeting for want of those who are missing; `missing` names them, the same on every rank.
struct MeetingEnd {
  std::string verdict;
  std::vector<int> missing;
};
MeetingEnd AttendMeeting(StoreMeeting& meeting, const std::string& value, absl::Duration timeout);

// "rank 1", "ranks 1, 3": for messages.
std::string RankList(const std::vector<int>& ranks);

}  // namespace ddp::internal

#endif  // DDP_COMM_STORE_MEETING_H_
