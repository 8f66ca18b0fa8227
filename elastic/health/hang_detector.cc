#include "elastic/health/hang_detector.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"

namespace ddp::elastic {
namespace {

// When one rank reaches its limit, a rank that has used this share of its own is stalled too. They
// stopped together, so the first to reach its limit need not be the cause.
constexpr double kStalledShare = 0.5;

bool Waits(const HealthPage::Snapshot& page) { return WaitsForPeers(page.phase, page.tells_waits); }

}  // namespace

HangDetector::HangDetector(const Options& options) : options_(options) {}

void HangDetector::Begin(absl::Time now, int nodes) {
  nodes_ = nodes;
  begin_ = looked_ = counted_since_ = waits_counted_since_ = now;
  others_at_work_ = false;
  ranks_.clear();
  earlier_steps_ += generation_steps_;
  generation_steps_ = 0;
}

// Returns the page's stamp, clamped to possible times.
absl::Time HangDetector::Stamp(int64_t monotonic_ns, absl::Time now) const {
  return std::clamp(absl::FromUnixNanos(monotonic_ns), begin_, std::max(begin_, now));
}

void HangDetector::Observe(int local_rank, const HealthPage::Snapshot& page, absl::Time now) {
  if (begin_ == absl::InfinitePast()) Begin(now, nodes_);
  // The caller should look at least four times per floor; a longer gap means it was stopped.
  if (now - looked_ > options_.floor * 0.75) counted_since_ = now;
  looked_ = std::max(looked_, now);

  if (page.worker != HealthPage::Worker::kNotAttached) attached_.insert(local_rank);
  if (!attached_.contains(local_rank)) return;
  const auto [found, is_new] = ranks_.try_emplace(local_rank);
  Rank& rank = found->second;
  if (is_new) rank.observed = rank.commit_after = begin_;
  Learn(rank, page, now);
  const bool was_slow = rank.is_slow;
  const absl::Time was_since = rank.since;
  const bool interrupts = !page.has_step || !IsPartOfStep(page.phase);
  rank.is_slow = interrupts || page.stopped_as_asked || page.phase == Phase::kData;
  const absl::Time phase_start = Stamp(page.phase_start_monotonic_ns, now);
  if (rank.is_slow && !was_slow) rank.slow_since = phase_start;
  const bool by_phase = page.has_step && interrupts;
  rank.since = Stamp(by_phase ? page.phase_start_monotonic_ns : page.step_start_monotonic_ns, now);
  // The others may have waited for this rank. From now on they wait for a step, or for the rest of
  // its interruption. The data of a usual step holds up nobody.
  const bool got_on = !rank.is_slow || rank.since > was_since;
  const bool held_up =
      rank.page.phase != Phase::kData || now - rank.slow_since > options_.floor * kStalledShare;
  if (was_slow && got_on && held_up) {
    counted_since_ =
        std::max({counted_since_, rank.since, rank.is_slow ? rank.since : phase_start});
  }
  rank.page = page;
}

// Learns from the commits since the last look. The page claims how long they took; the time between
// two looks bounds that.
void HangDetector::Learn(Rank& rank, const HealthPage::Snapshot& page, absl::Time now) {
  if (page.commits != rank.page.commits) {
    const absl::Duration bound = now - rank.commit_after;
    longest_step_ =
        std::max(longest_step_, std::min(absl::Microseconds(page.longest_step_us), bound));
    rank.commit_after = rank.observed;
  }
  rank.observed = now;
  // A bound that no real counter reaches, so that sums do not overflow.
  constexpr int64_t kManySteps = int64_t{1} << 40;
  generation_steps_ = std::max(generation_steps_, std::min(page.commits, kManySteps));
}

void HangDetector::SetOthersAtWork(bool are_at_work, absl::Time now) {
  if (std::exchange(others_at_work_, are_at_work) && !are_at_work) waits_counted_since_ = now;
}

void HangDetector::Excuse(absl::Time now) {
  counted_since_ = now;
  for (auto& [local_rank, rank] : ranks_) rank.commit_after = now;
}

void HangDetector::Forget(int local_rank) { ranks_.erase(local_rank); }

bool HangDetector::IsOn() const {
  return options_.floor > absl::ZeroDuration() &&
         earlier_steps_ + generation_steps_ >= options_.min_steps;
}

bool HangDetector::SomebodyIsSlow() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const auto& entry) { return entry.second.is_slow; });
}

absl::Duration HangDetector::Limit(const Rank& rank) const {
  if (nodes_ > 1 && others_at_work_ && Waits(rank.page)) return absl::InfiniteDuration();
  absl::Duration floor = options_.floor;
  if (SomebodyIsSlow()) {
    floor = std::max(floor, options_.slow_floor);
  } else if (nodes_ > 1 && Waits(rank.page)) {
    floor = std::max(floor, options_.waiting_floor);
  }
  return std::max(floor, longest_step_ * options_.factor);
}

std::optional<HangDetector::Hang> HangDetector::Check(absl::Time now, double share) const {
  if (!IsOn()) return std::nullopt;
  bool is_hung = false;
  const std::pair<const int, Rank>* suspect = nullptr;
  // Suspects in order: working before waiting, lower steps first, longer stalls first.
  const auto order = [](const std::pair<const int, Rank>& entry) {
    const Rank& rank = entry.second;
    const int64_t step = rank.page.has_step ? rank.page.step : -1;
    return std::make_tuple(Waits(rank.page), step, rank.since, entry.first);
  };
  for (const auto& entry : ranks_) {
    const absl::Duration stalled_for = StalledFor(entry.second, now);
    const absl::Duration limit = Limit(entry.second) * share;
    if (stalled_for >= limit) is_hung = true;
    if (stalled_for < limit * kStalledShare) continue;
    if (suspect == nullptr || order(entry) < order(*suspect)) suspect = &entry;
  }
  if (!is_hung) return std::nullopt;
  return Describe(*suspect, now);
}

absl::Duration HangDetector::StalledFor(const Rank& rank, absl::Time now) const {
  const absl::Time since = std::max(rank.since, counted_since_);
  return now - (Waits(rank.page) ? std::max(since, waits_counted_since_) : since);
}

HangDetector::Hang HangDetector::Describe(const std::pair<const int, Rank>& entry,
                                          absl::Time now) const {
  const Rank& rank = entry.second;
  return {.local_rank = entry.first,
          .stalled_for = StalledFor(rank, now),
          .longest_step = longest_step_,
          .limit = Limit(rank),
          .phase = rank.page.phase,
          .waits_for_peers = Waits(rank.page),
          .step = rank.page.has_step ? rank.page.step : -1};
}

std::optional<HangDetector::AtWork> HangDetector::FindAtWork(absl::Time now) const {
  std::optional<AtWork> found;
  if (!IsOn()) return found;
  for (const auto& [local_rank, rank] : ranks_) {
    const absl::Duration stalled_for = now - rank.since;
    if (Waits(rank.page) || stalled_for < kWorthTelling) continue;
    if (found.has_value() && found->stalled_for >= stalled_for) continue;
    found = AtWork{local_rank, rank.page.phase, stalled_for};
  }
  return found;
}

std::optional<HangDetector::Hang> HangDetector::FindLongWait(absl::Time now) const {
  if (!IsOn() || !others_at_work_) return std::nullopt;
  const absl::Duration least = std::min(options_.slow_floor, options_.waiting_floor) / 2;
  const std::pair<const int, Rank>* longest = nullptr;
  for (const auto& entry : ranks_) {
    if (!Waits(entry.second.page) || now - entry.second.since < least) continue;
    if (longest == nullptr || entry.second.since < longest->second.since) longest = &entry;
  }
  return longest == nullptr ? std::nullopt : std::optional(Describe(*longest, now));
}

std::string DescribeHang(const HangDetector::Hang& hang) {
  const auto rounded = [](absl::Duration duration) {
    const absl::Duration unit =
        duration < absl::Seconds(10) ? absl::Milliseconds(1) : absl::Seconds(1);
    return absl::FormatDuration(absl::Trunc(duration, unit));
  };
  return absl::StrCat("made no step for ", rounded(hang.stalled_for), ", in ",
                      std::string(PhaseName(hang.phase)),
                      hang.waits_for_peers ? " (which waits for peers)" : "",
                      "; the longest step took ", rounded(hang.longest_step));
}

}  // namespace ddp::elastic
