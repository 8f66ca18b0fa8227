#include "ddp/health/group_health.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp::internal {

void GroupHealth::Begin(const Membership& membership) {
  const int64_t incarnation = membership.incarnation;
  membership_ = membership;
  raised_ = false;
  operation_failed_ = false;
  failure_.reset();
  const auto known = later_.find(incarnation);
  if (known != later_.end()) failure_ = known->second;
  later_.erase(later_.begin(), later_.upper_bound(incarnation));
}

bool GroupHealth::OnFailure(int64_t incarnation, const GroupFailure& failure) {
  if (incarnation > membership_.incarnation) {
    later_.try_emplace(incarnation, failure);
    return false;
  }
  if (incarnation < membership_.incarnation || failure_.has_value()) return false;
  failure_ = failure;
  return true;
}

void GroupHealth::OnGone(GroupFailure failure) {
  if (!gone_.has_value()) gone_ = std::move(failure);
}

bool GroupHealth::Raise() { return std::exchange(raised_, true); }

GroupError GroupHealth::OnOperationFailed(const std::string& what, const std::string& reason) {
  raised_ = true;
  if (failure_.has_value() && failure_->rank < 0) {
    return {.message = absl::StrCat("rank ", membership_.rank, ": stopped in ", what, ": ",
                                    failure_->reason)};
  }
  if (failure_.has_value() && failure_->rank != membership_.rank) {
    return Caused(*failure_,
                  absl::StrCat("rank ", membership_.rank, ": stopped in ", what, ", because rank ",
                               failure_->rank, " failed: ", failure_->reason));
  }
  return {.message = absl::StrCat("rank ", membership_.rank, ": ", what,
                                  " failed: ", failure_.has_value() ? failure_->reason : reason),
          .is_cause = true};
}

GroupError GroupHealth::OnOwnError(GroupError::Kind kind, std::string message) {
  raised_ = true;
  return {.kind = kind, .message = std::move(message), .is_cause = true};
}

std::optional<GroupError> GroupHealth::OnUse(bool retired, const std::string& what) {
  if (!retired && !failure_.has_value()) return std::nullopt;
  // A failure for which this rank has not thrown yet is thrown as if it had stopped this operation.
  // The group may have thrown it without a communicator.
  if (!retired && !gone_.has_value() && !raised_) return OnOperationFailed(what, "");
  if (gone_.has_value()) return GoneError();
  raised_ = true;
  std::string message = absl::StrCat(
      "rank ", membership_.rank,
      ": the process group cannot be used any more, until all ranks renew it (the ",
      "next synchronized forward does, or ProcessGroup::renew()): ",
      failure_.has_value() ? failure_->ToString() : std::string("an operation failed"));
  if (failure_.has_value() && failure_->rank != membership_.rank) {
    return Caused(*failure_, std::move(message));
  }
  return GroupError{.message = std::move(message)};
}

GroupError GroupHealth::OnWaitEnded(const std::string& what) {
  raised_ = true;
  const GroupFailure failure = failure_.value_or(GroupFailure());
  return Caused(failure, absl::StrCat("rank ", membership_.rank, ": stopped in ", what,
                                      ", because ", failure.ToString()));
}

GroupHealth::Forward GroupHealth::OnForward(std::optional<GroupError>* error) {
  if (!failure_.has_value()) return Forward::kGoesOn;
  if (gone_.has_value()) {
    *error = GoneError();
    return Forward::kThrows;
  }
  if (Raise()) return Forward::kRenews;
  if (failure_->rank == membership_.rank) {
    *error = GroupError{
        .kind = operation_failed_ ? GroupError::Kind::kCommunication : GroupError::Kind::kReduction,
        .message = failure_->reason};
    return Forward::kThrows;
  }
  const std::string who =
      failure_->rank < 0 ? "the ranks failed" : absl::StrCat("rank ", failure_->rank, " failed");
  *error =
      Caused(*failure_, absl::StrCat("rank ", membership_.rank, ": ", who,
                                     " since this rank's last collective: ", failure_->reason));
  return Forward::kThrows;
}

std::optional<GroupError> GroupHealth::GoneError() const {
  if (!gone_.has_value()) return std::nullopt;
  return GroupError{
      .kind = GroupError::Kind::kPeerFailed,
      .peer = gone_->rank,
      .message = absl::StrCat("rank ", membership_.rank,
                              ": the process group cannot be used any more, because rank ",
                              gone_->rank, " is gone: ", gone_->reason)};
}

// No rank alone is at fault: then the error names none.
GroupError GroupHealth::Caused(const GroupFailure& failure, std::string message) const {
  if (failure.rank < 0) return {.message = std::move(message)};
  return {
      .kind = GroupError::Kind::kPeerFailed, .peer = failure.rank, .message = std::move(message)};
}

}  // namespace ddp::internal
