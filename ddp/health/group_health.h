#ifndef DDP_HEALTH_GROUP_HEALTH_H_
#define DDP_HEALTH_GROUP_HEALTH_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "ddp/common/membership.h"
#include "ddp/health/group_failure.h"

namespace ddp::internal {

// The exception that a call on a failed group throws.
struct GroupError {
  enum class Kind : uint8_t { kCommunication, kPeerFailed, kReduction };

  Kind kind = Kind::kCommunication;
  int peer = -1;  // kPeerFailed: the rank at fault
  std::string message;
  bool is_cause = false;  // no failure was known: report `message` as this rank's failure

  friend bool operator==(const GroupError&, const GroupError&) = default;
};

// The state of a group on one rank, and what a call on the group throws in it.
//
//   usable    no failure of this incarnation is known
//   failed    a failure is known, and this rank has not thrown for it yet
//   raised    this rank has thrown for the failure; the next forward renews the group
//   gone      a rank will never come back: every call throws, and no renewal helps
//
// Begin() starts the next incarnation, which is usable again unless a rank is gone. A failure
// report of an earlier incarnation is ignored. A report of a later incarnation is kept until that
// incarnation begins.
//
// A *retired* communicator is one that cannot be used, whatever the state of the group. Each
// communicator knows that of itself, and says so to OnUse().
//
// Pure: no store, no thread, no clock. A FailureMonitor owns it and guards it by its mutex.
class GroupHealth {
 public:
  explicit GroupHealth(const Membership& membership) : membership_(membership) {}

  // ---- Events.

  // Starts an incarnation, in which this rank may have another number.
  void Begin(const Membership& membership);
  // Records a failure. Returns true when it is the first of the current incarnation.
  bool OnFailure(int64_t incarnation, const GroupFailure& failure);
  // Records a rank that will never come back. The first one stays.
  void OnGone(GroupFailure failure);
  // Records that this rank throws for the failure of this incarnation, or has reported its own.
  // Returns true when that was recorded before.
  bool Raise();

  // ---- Decisions. Each error is raised when it is returned.

  // The operation `what` failed on this rank with `reason`. A known failure is the cause.
  GroupError OnOperationFailed(const std::string& what, const std::string& reason);
  // This rank found an error that no operation of the group caused.
  GroupError OnOwnError(GroupError::Kind kind, std::string message);
  // A call is about to use the group for `what`. Nothing: it may. The communicator is retired
  // afterwards, if there is an error.
  std::optional<GroupError> OnUse(bool retired, const std::string& what);
  // A failure ended the wait for the other ranks in `what`.
  GroupError OnWaitEnded(const std::string& what);

  // The first step of a synchronized forward.
  enum class Forward : uint8_t { kGoesOn, kRenews, kThrows };
  // `error` is set with kThrows.
  Forward OnForward(std::optional<GroupError>* error);

  // The error of a group in which a rank is gone.
  std::optional<GroupError> GoneError() const;

  // ---- State.

  const Membership& membership() const { return membership_; }
  int64_t incarnation() const { return membership_.incarnation; }
  bool failed() const { return failure_.has_value(); }
  const std::optional<GroupFailure>& failure() const { return failure_; }
  const std::optional<GroupFailure>& gone() const { return gone_; }

 private:
  GroupError Caused(const GroupFailure& failure, std::string message) const;

  Membership membership_;
  std::optional<GroupFailure> failure_;    // of this incarnation
  std::map<int64_t, GroupFailure> later_;  // by incarnation
  bool raised_ = false;
  std::optional<GroupFailure> gone_;
};

}  // namespace ddp::internal

#endif  // DDP_HEALTH_GROUP_HEALTH_H_
