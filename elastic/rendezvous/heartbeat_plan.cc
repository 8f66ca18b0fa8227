#include "elastic/rendezvous/heartbeat_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ddp::elastic {
namespace {

// What nodes say for people goes to the server at most so often, so that all nodes of a job
// together stay under a thousand rows per second.
constexpr absl::Duration kRowIntervalMin = absl::Seconds(1);
constexpr absl::Duration kRowIntervalPerNode = absl::Milliseconds(1);
constexpr double kBusyChange = 0.05;

constexpr double kStepsPerSecondMax = 1e9;

// As many as a lease has of them by default, but for the full one.
constexpr int kLightPerFullMax = 5;

absl::Time NextAfter(absl::Time now, absl::Duration interval, double share) {
  return now + interval * (0.9 + 0.2 * share);
}

}  // namespace

void HeartbeatPlan::Start(const Rhythm& rhythm, absl::Time now, double row_share, double share) {
  rhythm_ = rhythm;
  light_left_ = 0;
  report_.step = -1;
  busy_us_said_ = -1;
  row_at_ = now + rhythm_.interval * row_share;
  due_ = now + rhythm_.interval * (0.3 + 0.7 * share);
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
  const auto per_lease = static_cast<int>(absl::FDivDuration(rhythm_.lease, rhythm_.interval));
  return std::clamp(wanted, 0, std::min(per_lease - 1, kLightPerFullMax));
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

void HeartbeatPlan::OnLightAnswer(absl::Time now, double share) {
  light_left_ = std::max(0, light_left_ - 1);
  due_ = NextAfter(now, rhythm_.interval, share);
}

void HeartbeatPlan::OnFullAnswer(absl::Time now, double share) {
  light_left_ = LightPerFull();
  due_ = NextAfter(now, rhythm_.interval, share);
  if (row_sent_.empty() && busy_us_sent_ < 0) return;
  if (!row_sent_.empty()) row_said_ = row_sent_;
  if (busy_us_sent_ >= 0) busy_us_said_ = busy_us_sent_;
  row_at_ = now + std::max(kRowIntervalMin, kRowIntervalPerNode * rhythm_.nodes);
}

}  // namespace ddp::elastic
