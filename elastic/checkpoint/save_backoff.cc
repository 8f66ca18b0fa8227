#include "elastic/checkpoint/save_backoff.h"

#include <algorithm>

namespace ddp::elastic {

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
