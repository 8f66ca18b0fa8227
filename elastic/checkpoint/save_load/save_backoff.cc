#include "elastic/checkpoint/save_load/save_backoff.h"

#include <algorithm>

namespace ddp::elastic {

bool MayPass(const absl::Status& error) {
  switch (error.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kDeadlineExceeded:  // a rank did not call save(): ranks are out of step
      return false;
    default:
      return true;
  }
}

void SaveBackoff::Failed(absl::Time now) {
  pause_ = std::min(options_.max, failures_ == 0 ? options_.first : pause_ * 2);
  ++failures_;
  next_ = now + pause_;
}

void SaveBackoff::Saved() {
  failures_ = 0;
  pause_ = absl::ZeroDuration();
  next_ = absl::InfinitePast();
}

}  // namespace ddp::elastic
