#include "elastic/rendezvous/heartbeat_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

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

}  // namespace

void HeartbeatPlan::Start(const Rhythm& rhythm, absl::Time now, double row_share, double share) {
  rhythm_ = rhythm;
  report_.step = -1;
  busy_us_said_ = -1;
  report_.max_world_size = max_world_said_ = 0;
  report_.at_work.reset();
  at_work_said_ = false;
  row_at_ = now + rhythm_.interval * row_share;
  // All nodes have just learned of the round: spread their first heartbeats.
  const absl::Duration first = std::max(
      rhythm_.interval, std::min(rhythm_.lease / 2, kFirstIntervalPerNode * rhythm_.nodes));
  due_ = now + first * (0.3 + 0.7 * share);
}

void HeartbeatPlan::ForgetWhatWasSaid() {
  row_said_.clear();
  busy_us_said_ = -1;
  max_world_said_ = 0;
}

std::vector<ScriptArgument> HeartbeatPlan::Compose(absl::Time now) {
  row_sent_.clear();
  busy_us_sent_ = -1;
  at_work_sent_.clear();
  if (now >= row_at_) {
    if (const auto& work = report_.at_work; work.has_value()) {
      // Said again and again, because the server keeps one rank of the job only.
      at_work_sent_ =
          absl::StrCat(std::max<int64_t>(0, absl::ToInt64Milliseconds(work->stalled_for)), " ",
                       work->rank, " ", work->phase);
    } else if (at_work_said_) {
      at_work_sent_ = "-";
    }
    if (report_.row != row_said_) row_sent_ = report_.row;
    const int64_t change = std::abs(report_.busy_us - busy_us_said_);
    if (report_.busy_us >= 0 &&
        (busy_us_said_ < 0 || change > kBusyChange * static_cast<double>(busy_us_said_))) {
      busy_us_sent_ = report_.busy_us;
    }
  }
  max_world_sent_ = report_.max_world_size != max_world_said_ ? report_.max_world_size : 0;
  const double rate = std::isfinite(report_.steps_per_second)
                          ? std::clamp(report_.steps_per_second, 0.0, kStepsPerSecondMax)
                          : 0.0;
  return {{"step", absl::StrCat(std::max<int64_t>(-1, report_.step))},
          {"rate", absl::StrFormat("%.3f", rate)},
          {"busy_us", busy_us_sent_ >= 0 ? absl::StrCat(busy_us_sent_) : ""},
          {"report", row_sent_},
          {"max_world", max_world_sent_ > 0 ? absl::StrCat(max_world_sent_) : ""},
          {"at_work", at_work_sent_}};
}

void HeartbeatPlan::OnAnswer(absl::Time now, double share) {
  due_ = now + rhythm_.interval * (0.9 + 0.2 * share);
  if (max_world_sent_ > 0) max_world_said_ = max_world_sent_;
  if (row_sent_.empty() && busy_us_sent_ < 0 && at_work_sent_.empty()) return;
  if (!at_work_sent_.empty()) at_work_said_ = at_work_sent_ != "-";
  if (!row_sent_.empty()) row_said_ = row_sent_;
  if (busy_us_sent_ >= 0) busy_us_said_ = busy_us_sent_;
  row_at_ = now + std::max(kRowIntervalMin, kRowIntervalPerNode * rhythm_.nodes);
}

}  // namespace ddp::elastic
