#include "testing/simulator/run_seeds.h"

#include <algorithm>
#include <array>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/mutex.h"
#include "testing/simulator/story.h"

namespace ddp::testing {
namespace {

constexpr double kMicrosPerHour = 3600e6;
constexpr int kSizeClasses[] = {1000, 65, 13, 5, 2, 1};

int SizeClassOf(int hosts) {
  return *std::find_if(std::begin(kSizeClasses), std::end(kSizeClasses),
                       [hosts](int smallest) { return hosts >= smallest; });
}

void Add(const SimulationResult& result, SimulationResult& total) {
  total.simulated_us += result.simulated_us;
  total.events += result.events;
  total.agents += result.agents;
  total.generations += result.generations;
  total.charged += result.charged;
  for (int kind = 0; kind < kFaultKinds; ++kind) total.faults[kind] += result.faults[kind];
  for (const auto& [end, agents] : result.ends) total.ends[end] += agents;
  const SimulatedStore::Counts& from = result.messages;
  SimulatedStore::Counts& to = total.messages;
  to.scripts += from.scripts;
  to.lost_requests += from.lost_requests;
  to.lost_replies += from.lost_replies;
  to.swallowed += from.swallowed;
  to.duplicates += from.duplicates;
  to.pushed += from.pushed;
  to.lost_pushes += from.lost_pushes;
  to.broken_subscriptions += from.broken_subscriptions;
}

// State shared by the threads. Thread-safe.
class Work {
 public:
  explicit Work(const SeedRange& range) : range_(range) {}

  // Takes the next seed. Returns false when there is none.
  bool Next(uint64_t& seed) {
    const MutexLock lock(mutex_);
    const bool failed_enough = static_cast<int>(summary_.failures.size()) >= range_.failures_max;
    if (failed_enough || taken_ == range_.count) return false;
    seed = range_.first + taken_++;
    return true;
  }

  void Done(const Story& story, const SimulationResult& result) {
    const MutexLock lock(mutex_);
    if (result.violation) summary_.failures.emplace_back(story.seed, *result.violation);
    SeedSummary::SizeClass& size = summary_.by_hosts[SizeClassOf(story.hosts)];
    ++size.seeds;
    size.events += result.events;
    size.agents += result.agents;
    size.simulated_hours += static_cast<double>(result.simulated_us) / kMicrosPerHour;
    Add(result, summary_.total);
  }

  SeedSummary Take() {
    const MutexLock lock(mutex_);
    std::sort(summary_.failures.begin(), summary_.failures.end());
    return summary_;
  }

 private:
  const SeedRange range_;
  Mutex mutex_;
  uint64_t taken_ ABSL_GUARDED_BY(mutex_) = 0;
  SeedSummary summary_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

SeedSummary RunSeeds(const SeedRange& range, const AgentCode& code) {
  Work work(range);
  const auto run = [&work, &range, &code] {
    uint64_t seed = 0;
    while (work.Next(seed)) {
      const Story story = MakeStory(seed, range.hosts);
      work.Done(story, Simulate(story, code));
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < range.threads; ++i) threads.emplace_back(run);
  run();
  for (std::thread& thread : threads) thread.join();
  return work.Take();
}

std::string DebugString(const SeedSummary& summary) {
  std::string text;
  for (const auto& [hosts, size] : summary.by_hosts) {
    absl::StrAppendFormat(&text,
                          "%6d seeds of %d hosts or more: %d agents, %.1f hours, %d events\n",
                          size.seeds, hosts, size.agents, size.simulated_hours, size.events);
  }
  const SimulationResult& total = summary.total;
  absl::StrAppendFormat(&text, "%.1f hours simulated, %d generations, %d restarts charged\n",
                        static_cast<double>(total.simulated_us) / kMicrosPerHour, total.generations,
                        total.charged);
  absl::StrAppend(&text, "faults:");
  for (int kind = 0; kind < kFaultKinds; ++kind) {
    absl::StrAppend(&text, kind > 0 ? ", " : " ", total.faults[kind], " ",
                    FaultName(static_cast<FaultKind>(kind)));
  }
  const SimulatedStore::Counts& messages = total.messages;
  absl::StrAppend(
      &text, "\nmessages: ", messages.scripts, " scripts run; lost: ", messages.lost_requests,
      " requests, ", messages.lost_replies, " replies, ", messages.swallowed, " without a word; ",
      messages.duplicates, " doubled; ", messages.pushed, " pushes, ", messages.lost_pushes,
      " of them lost, ", messages.broken_subscriptions, " broken off\nends of agents:");
  const char* comma = " ";
  for (const auto& [end, agents] : total.ends) {
    absl::StrAppend(&text, comma, agents, " ", end);
    comma = ", ";
  }
  return text + "\n";
}

}  // namespace ddp::testing
