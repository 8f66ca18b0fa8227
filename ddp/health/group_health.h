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
  // True when this rank's own error is the cause: FailureMonitor::Report() sends `message` to the
  // peers, unless a failure is known already.
  bool is_cause = false;

  friend bool operator==(const GroupError&, const GroupError&) = default;
};

// The state of a group on one rank, and what a call on the group throws in it.
//
//   usable    no failure of this incarnation is known
//   failed    a failure is known, and this rank has not thrown for it yet
//   raised    this rank has thrown for the failure, or has reported its own; the next synchronized
//             forward renews the group
//   gone      a rank will never come back: every call that needs the group throws
//
// Begin() starts the next incarnation, which is usable again unless a rank is gone. A failure
// report of an earlier incarnation is ignored. A report of a later incarnation is kept until that
// incarnation begins.
//
// A *retired* communicator is one that cannot be used, whatever the state of the group. The caller
// of OnUse() tells whether its communicator is retired.
//
// Pure: no store, no thread, no clock. Thread-compatible: a FailureMonitor owns it and guards it by
// its mutex.
class GroupHealth {
 public:
  explicit GroupHealth(const Membership& membership) : membership_(membership) {}

  // ---- Events.

  // Starts an incarnation, in which this rank and the size of the group may be others.
  void Begin(const Membership& membership);
  // Records a failure. Returns true when it is the first of the current incarnation.
  bool OnFailure(int64_t incarnation, const GroupFailure& failure);
  // Records that the failure that this rank reports next is one of an operation, for which it then
  // throws CommunicationError.
  void OnOperation() { operation_failed_ = true; }
  // Records a rank that will never come back. The first one stays.
  void OnGone(GroupFailure failure);
  // Records that this rank throws for the failure of this incarnation, or has reported its own.
  // Returns true when that was recorded before.
  bool Raise();

  // ---- Decisions. Returning an error also does Raise(), except for a rank that is gone.

  // Returns the error of the operation `what`, which failed on this rank with `reason`. If a
  // failure is known, the error names it as the cause.
  GroupError OnOperationFailed(const std::string& what, const std::string& reason);
  // Returns the error `message` of this rank, which no failure of an operation caused.
  GroupError OnOwnError(GroupError::Kind kind, std::string message);
  // Decides whether a call may use the group for `what`: returns nullopt, or the error to throw.
  // `retired`: the caller's communicator is retired. After an error, the caller retires it.
  std::optional<GroupError> OnUse(bool retired, const std::string& what);
  // Returns the error of a wait for the other ranks in `what` that a failure ended.
  GroupError OnWaitEnded(const std::string& what);

  // What a synchronized forward does first: goes on, renews the group, or throws.
  enum class Forward : uint8_t { kGoesOn, kRenews, kThrows };
  // Decides it. Sets `error` with kThrows only.
  Forward OnForward(std::optional<GroupError>* error);

  // Returns the error of a group in which a rank is gone; nullopt when none is.
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
  bool operation_failed_ = false;  // by OnOperation()
  std::optional<GroupFailure> gone_;
};

}  // namespace ddp::internal

#endif  // DDP_HEALTH_GROUP_HEALTH_H_
