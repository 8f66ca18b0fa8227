#include "elastic/rendezvous/heartbeat_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ddp::elastic {
namespace {

// Interval between two rows of a node: all nodes of a job together send under a thousand rows per
// second.
constexpr absl::Duration kRowIntervalMin = absl::Seconds(1);
constexpr absl::Duration kRowIntervalPerNode = absl::Milliseconds(1);
// Spreads the first heartbeats of all nodes over up to half of the lease: under ten thousand per
// second.
constexpr absl::Duration kFirstIntervalPerNode = absl::Microseconds(150);
constexpr double kBusyChange = 0.05;

constexpr double kStepsPerSecondMax = 1e9;

// A node sends at least one full heartbeat in three leases. By default three leases hold 18
// heartbeats: 17 light ones and a full one.
constexpr int kLeasesPerFull = 3;
constexpr int kLightPerFullMax = 17;

// Two clocks drift apart by less than this many seconds per second.
constexpr double kDriftMax = 1e-4;
// No answer takes this long. A larger difference means that a clock was set.
constexpr absl::Duration kAnswerLateMax = absl::Seconds(2);

}  // namespace

void HeartbeatPlan::Start(const Rhythm& rhythm, absl::Time now, double row_share, double share) {
  rhythm_ = rhythm;
  BeInFull();
  report_.step = -1;
  busy_us_said_ = -1;
  row_at_ = now + rhythm_.interval * row_share;
  // All nodes have just learned of the round, and their first heartbeats are full: spread them.
  const absl::Duration first = std::max(
      rhythm_.interval, std::min(rhythm_.lease / 2, kFirstIntervalPerNode * rhythm_.nodes));
  due_ = now + first * (0.3 + 0.7 * share);
}

void HeartbeatPlan::ForgetWhatWasSaid() {
  row_said_.clear();
  busy_us_said_ = -1;
}

void HeartbeatPlan::BeInFullAt(absl::Time now) {
  BeInFull();
  due_ = now;
}

int HeartbeatPlan::LightPerFull() const {
  const int wanted = (rhythm_.nodes - 1) / rhythm_.full_heartbeats;
  const double per_lease = std::floor(absl::FDivDuration(rhythm_.lease, rhythm_.interval));
  const double most = std::clamp(kLeasesPerFull * per_lease - 1, 0.0, 1.0 * kLightPerFullMax);
  return std::clamp(wanted, 0, static_cast<int>(most));
}

std::vector<std::string> HeartbeatPlan::Compose(absl::Time now) {
  row_sent_.clear();
  busy_us_sent_ = -1;
  if (now >= row_at_) {
    if (report_.row != row_said_) row_sent_ = report_.row;
    const int64_t change = std::abs(report_.busy_us - busy_us_said_);
    if (report_.busy_us >= 0 &&
        (busy_us_said_ < 0 || change > kBusyChange * static_cast<double>(busy_us_said_))) {
      busy_us_sent_ = report_.busy_us;
    }
  }
  const double rate = std::isfinite(report_.steps_per_second)
                          ? std::clamp(report_.steps_per_second, 0.0, kStepsPerSecondMax)
                          : 0.0;
  return {absl::StrCat(std::max<int64_t>(-1, report_.step)), absl::StrFormat("%.3f", rate),
          busy_us_sent_ >= 0 ? absl::StrCat(busy_us_sent_) : "", row_sent_,
          LightPerFull() > 0 ? "1" : ""};
}

// An answer takes time to arrive, so the server's clock seems to be behind. The largest value of
// server_ahead_ is the best one, less the drift since it was found.
void HeartbeatPlan::CompareClocks(absl::Time now, absl::Time server_now) {
  const absl::Duration ahead = server_now - now;
  const absl::Duration known = server_ahead_.value_or(ahead) - (now - compared_at_) * kDriftMax;
  const bool is_known = server_ahead_.has_value() && ahead > known - kAnswerLateMax;
  server_ahead_ = is_known ? std::max(known, ahead) : ahead;
  compared_at_ = now;
}

absl::Time HeartbeatPlan::NextDue(absl::Time now, double share) const {
  const absl::Time due = now + rhythm_.interval * (0.9 + 0.2 * share);
  if (!server_ahead_.has_value()) return due;
  const absl::Duration slot = rhythm_.interval / kSlotsPerInterval;
  const absl::Duration server_due = due + *server_ahead_ - absl::UnixEpoch();
  const absl::Duration into_slot = server_due - absl::Floor(server_due, slot);
  return due - into_slot + (into_slot < slot / 2 ? absl::ZeroDuration() : slot);
}

void HeartbeatPlan::OnLightAnswer(absl::Time now, double share) {
  light_left_ = std::max(0, light_left_ - 1);
  due_ = NextDue(now, share);
}

void HeartbeatPlan::OnFullAnswer(absl::Time now, std::optional<absl::Time> server_now,
                                 double share) {
  light_left_ = LightPerFull();
  // All nodes may have sent this full heartbeat at once; their next full ones are spread.
  if (std::exchange(out_of_turn_, false)) light_left_ = static_cast<int>(light_left_ * share);
  if (server_now.has_value()) CompareClocks(now, *server_now);
  due_ = NextDue(now, share);
  if (row_sent_.empty() && busy_us_sent_ < 0) return;
  if (!row_sent_.empty()) row_said_ = row_sent_;
  if (busy_us_sent_ >= 0) busy_us_said_ = busy_us_sent_;
  row_at_ = now + std::max(kRowIntervalMin, kRowIntervalPerNode * rhythm_.nodes);
}

}  // namespace ddp::elastic
