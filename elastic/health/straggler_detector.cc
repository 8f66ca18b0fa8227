#include "elastic/health/straggler_detector.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ddp::elastic {
namespace {

bool IsOwn(Phase phase, bool tells_waits) {
  return IsPartOfStep(phase) && !WaitsForPeers(phase, tells_waits);
}

// Returns the lower median: of two ranks the slow one must be found. `values` is not empty.
double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

StragglerDetector::StragglerDetector(const Options& options) : options_(options) {}

void StragglerDetector::Begin(absl::Time now) {
  window_start_ = now;
  ranks_.clear();
  stragglers_.clear();
  busy_us_ = -1;
}

void StragglerDetector::Observe(int local_rank, const HealthPage::Snapshot& page, absl::Time now) {
  if (window_start_ == absl::InfinitePast()) Begin(now);
  if (!page.has_step) return;
  const auto [found, is_new] = ranks_.try_emplace(local_rank);
  Rank& rank = found->second;
  if (is_new) rank.first = page;  // the first step may be long and is in no window
  rank.last = page;
}

// Returns the shares of ranks whose own time is known, and starts the next window.
std::vector<StragglerDetector::Share> StragglerDetector::CloseWindow(absl::Duration length) {
  std::vector<Share> shares;
  for (auto& [local_rank, rank] : ranks_) {
    const double steps = static_cast<double>(rank.last.commits - rank.first.commits);
    if (steps <= 0) {
      rank.first = rank.last;
      continue;
    }
    Share share{.local_rank = local_rank, .tells_waits = rank.last.tells_waits};
    double waited_us = 0;
    double sum_us = 0;
    bool is_sane = true;
    for (size_t i = 0; i < kPhaseCount; ++i) {
      // Totals are not negative (HealthPage::Read), so this does not overflow.
      const int64_t spent_us = rank.last.phase_total_us[i] - rank.first.phase_total_us[i];
      if (spent_us < 0) is_sane = false;
      share.phase_us[i] = static_cast<double>(spent_us) / steps;
      sum_us += static_cast<double>(spent_us);
      const Phase phase = static_cast<Phase>(i);
      if (IsPartOfStep(phase)) share.step_us += share.phase_us[i];
      if (IsOwn(phase, share.tells_waits)) share.own_us += share.phase_us[i];
      if (WaitsForPeers(phase, share.tells_waits)) waited_us += static_cast<double>(spent_us);
    }
    // The totals reach from the last commit before the window to the last one in it.
    const double bound_us = 2 * absl::ToDoubleMicroseconds(length) + 2 * share.step_us;
    if (is_sane && (waited_us > 0 || share.tells_waits) && sum_us <= bound_us)
      shares.push_back(share);
    rank.first = rank.last;
  }
  return shares;
}

StragglerDetector::Straggler StragglerDetector::Compare(const Share& share,
                                                        const std::vector<Share>& all,
                                                        double reference_us) const {
  Straggler straggler{.local_rank = share.local_rank,
                      .factor = share.own_us / std::max(reference_us, 1.0),
                      .own = absl::Microseconds(share.own_us),
                      .reference = absl::Microseconds(reference_us)};
  // Finds the phase in which the rank loses most to its neighbours; its longest phase if they are
  // as slow.
  double most_us = 0;
  double longest_us = -1;
  Phase longest = Phase::kOther;
  for (size_t i = 0; i < kPhaseCount; ++i) {
    const Phase phase = static_cast<Phase>(i);
    if (!IsOwn(phase, share.tells_waits)) continue;
    std::vector<double> spent;
    for (const Share& other : all) spent.push_back(other.phase_us[i]);
    const double behind_us = share.phase_us[i] - Median(std::move(spent));
    if (behind_us > most_us) {
      most_us = behind_us;
      straggler.phase = phase;
    }
    if (share.phase_us[i] > longest_us) {
      longest_us = share.phase_us[i];
      longest = phase;
    }
  }
  if (most_us < (share.own_us - reference_us) / 4) straggler.phase = longest;
  return straggler;
}

std::vector<StragglerDetector::Straggler> StragglerDetector::Check(absl::Time now,
                                                                   int64_t job_median_us) {
  const absl::Duration length = now - window_start_;
  if (options_.factor <= 0 || ranks_.empty() || length < options_.window) return {};
  for (const auto& [local_rank, rank] : ranks_) {
    if (rank.last.commits < rank.first.commits) continue;  // invalid counts: CloseWindow drops them
    if (rank.last.commits - rank.first.commits < options_.min_steps) return {};
  }
  window_start_ = now;
  const std::vector<Share> shares = CloseWindow(length);
  stragglers_.clear();
  busy_us_ = -1;
  if (shares.empty()) return {};

  std::vector<double> own;
  for (const Share& share : shares) own.push_back(share.own_us);
  busy_us_ = static_cast<int64_t>(*std::max_element(own.begin(), own.end()));
  double reference_us = own.size() > 1 ? Median(own) : own[0];
  if (job_median_us >= 0) reference_us = std::min(reference_us, static_cast<double>(job_median_us));

  std::vector<Straggler> news;
  for (const Share& share : shares) {
    Rank& rank = ranks_[share.local_rank];
    const bool is_slow = share.own_us > reference_us * options_.factor &&
                         share.own_us - reference_us >= options_.min_share * share.step_us;
    rank.slow_windows = is_slow ? std::min(rank.slow_windows + 1, options_.windows + 1) : 0;
    if (rank.slow_windows < options_.windows) continue;
    stragglers_.push_back(Compare(share, shares, reference_us));
    if (rank.slow_windows == options_.windows) news.push_back(stragglers_.back());
  }
  return news;
}

std::string DescribeStraggler(const StragglerDetector::Straggler& straggler) {
  const auto rounded = [](absl::Duration duration) {
    const absl::Duration unit =
        duration < absl::Milliseconds(10) ? absl::Microseconds(1) : absl::Milliseconds(1);
    return absl::FormatDuration(absl::Trunc(duration, unit));
  };
  return absl::StrCat("takes ", rounded(straggler.own), " of its own for a step, ",
                      absl::StrFormat("%.1f", straggler.factor), " times the median of ",
                      rounded(straggler.reference), ", most of it lost in ",
                      std::string(PhaseName(straggler.phase)));
}

}  // namespace ddp::elastic
