#include "testing/simulator/story.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "testing/simulator/random.h"

namespace ddp::testing {
namespace {

constexpr int64_t kSecond = 1000000;

int DrawHosts(uint64_t seed, Random& random) {
  if (seed % 100 == 0) return 1000;
  const double draw = random.Fraction();
  if (draw < 0.30) return 2;
  if (draw < 0.90) return static_cast<int>(random.Between(2, 12));
  if (draw < 0.99) return static_cast<int>(random.Between(12, 64));
  return static_cast<int>(random.Between(64, 200));
}

void DrawJob(Story& story, Random& random) {
  const int hosts = story.hosts;
  story.max_nodes =
      random.Chance(0.2) ? std::max(1, hosts - static_cast<int>(random.Between(1, 2))) : hosts;
  const int slack = random.Chance(0.3) ? 0 : static_cast<int>(random.Between(1, 1 + hosts / 3));
  story.min_nodes = std::max(1, story.max_nodes - slack);
  story.max_restarts = static_cast<int>(random.Between(0, 8));
  story.no_progress_limit = random.Chance(0.3) ? 0 : 3;
  story.quarantine_strikes = random.Chance(0.3) ? 0 : 3;
  story.lease_us = random.Chance(0.5) ? 3 * kSecond : random.Between(1, 8) * kSecond;
  if (hosts >= 200) story.lease_us = std::max(story.lease_us, 4 * kSecond);
  story.has_id = !random.Chance(0.15);
  story.last_call_us = random.Between(0, 5) * kSecond;
  story.training_s = static_cast<double>(random.Between(2, hosts >= 200 ? 8 : 25));
  story.steps_per_second = static_cast<double>(random.Between(2, 50));
  story.slow_factor = 1.5 + 1.5 * random.Fraction();
  story.checkpoint_every = static_cast<int>(random.Between(1, 50));
  story.worker_start_s = random.Chance(0.1) ? 3 : 0.2;
  story.victim_chance = random.Fraction();
  story.commits_steps = random.Chance(0.8);
  // Hang detection needs committed steps.
  const bool looks_for_hangs = story.commits_steps && hosts < 200;
  if (looks_for_hangs) story.hang_floor_us = random.Between(1, 4) * kSecond;
  story.stop_aware_chance = random.Chance(0.5) ? 1 : 0;
  story.stubborn_chance = random.Chance(0.3) ? random.Fraction() : 0;
  story.nproc_max = random.Chance(0.5) ? 1 : static_cast<int>(random.Between(2, 4));
  if (hosts >= 200) story.nproc_max = 1;
  if (random.Chance(0.02)) story.bad_host = static_cast<int>(random.Between(0, hosts - 1));
  story.node_ranks = story.max_nodes == hosts && random.Chance(0.1);
}

void DrawMachines(Story& story, Random& random) {
  story.start_spread_us = random.Between(0, 4) * kSecond;
  if (random.Chance(0.5)) {
    story.clock_skew_us = random.Between(0, 7200) * kSecond;
    story.clock_drift = random.Fraction() * 1e-3;
  }
  story.comeback_chance = random.Chance(0.5) ? 1 : random.Fraction();
  story.comeback_mean_s = random.Chance(0.2) ? 0.05 : 4;
  NetworkConditions& network = story.network;
  network.delay_mean_us = random.Chance(0.2) ? 20000 : 400;
  // Half of the networks have no faults; the others have some kinds.
  if (random.Chance(0.5)) return;
  const auto rate = [&random](double most) {
    return random.Chance(0.5) ? random.Fraction() * most : 0;
  };
  network.lose_request = rate(0.03);
  network.lose_reply = rate(0.03);
  network.swallow = rate(0.01);
  network.duplicate = rate(0.05);
  network.lose_push = random.Chance(0.2) ? 1 : rate(0.5);
  network.break_subscription = rate(0.1);
}

FaultKind DrawKind(Random& random) {
  static constexpr FaultKind kFrequent[] = {
      FaultKind::kWorkerCrash, FaultKind::kWorkerCrash,     FaultKind::kWorkerCrash,
      FaultKind::kWorkerCrash, FaultKind::kAgentKilled,     FaultKind::kAgentStopped,
      FaultKind::kHostLost,    FaultKind::kHostLost,        FaultKind::kHostFrozen,
      FaultKind::kCutOff,      FaultKind::kAgentTerminated, FaultKind::kStorePaused,
      FaultKind::kNewcomer,    FaultKind::kStoreRestarted,  FaultKind::kStoreRolledBack,
      FaultKind::kStoreWiped,  FaultKind::kRoundForgotten,  FaultKind::kWorkerHangs,
      FaultKind::kHostSlows,   FaultKind::kFamilyKilled,
  };
  return kFrequent[random.Between(0, std::size(kFrequent) - 1)];
}

// Draws the faults. Some stories have one kind only, so that faults of this kind overlap.
void DrawFaults(Story& story, Random& random) {
  story.faults_end_us = random.Between(5, story.hosts >= 200 ? 12 : 30) * kSecond;
  const auto count = random.Between(0, 10);
  const bool one_kind = random.Chance(0.3);
  const FaultKind only = DrawKind(random);
  for (int64_t i = 0; i < count; ++i) {
    Fault fault;
    fault.kind = one_kind ? only : DrawKind(random);
    // Some faults come in bursts: within the recovery from another fault.
    fault.at_us = !story.faults.empty() && random.Chance(0.4)
                      ? story.faults.back().at_us + random.Exponential(0.3 * kSecond)
                      : random.Between(0, story.faults_end_us);
    fault.at_us = std::min(fault.at_us, story.faults_end_us);
    const double mean_s = random.Chance(0.5) ? 0.5 : 6;
    fault.duration_us = std::min(random.Exponential(mean_s * kSecond), 30 * kSecond);
    if (fault.kind == FaultKind::kRoundForgotten) {
      // A short outage, so that a node that was not told of the round returns before the others.
      fault.duration_us = random.Between(1000, 60000);
    }
    if (random.Chance(0.2)) {
      const int64_t jump_s = random.Between(0, 3600);
      fault.clock_jump_us = (jump_s % 2 == 0 ? jump_s : -jump_s) * kSecond;
    }
    story.faults.push_back(fault);
  }
  std::sort(story.faults.begin(), story.faults.end(),
            [](const Fault& a, const Fault& b) { return a.at_us < b.at_us; });
}

// Drawn last, so that the other draws of a seed stay the same.
void DrawSlowEffects(Story& story, Random& random) {
  if (random.Chance(0.5)) return;
  story.slow_stray_chance = random.Chance(0.5) ? random.Fraction() * 0.3 : 0;
  story.slow_stray_us = random.Between(100, 8000) * 1000;
  story.slow_exec_chance = random.Chance(0.5) ? random.Fraction() * 0.3 : 0;
  story.slow_exec_us = random.Between(10, 3000) * 1000;
  story.kill_timeout_us = random.Between(1, 10) * kSecond;
}

void AddFault(Story& story, const Fault& fault) {
  const auto is_later = [&fault](const Fault& other) { return other.at_us > fault.at_us; };
  story.faults.insert(std::find_if(story.faults.begin(), story.faults.end(), is_later), fault);
}

// The faults and options that guards of the job are for.
void DrawGuards(Story& story, Random& random) {
  if (random.Chance(0.3)) story.max_node_losses = static_cast<int>(random.Between(0, 4));
  if (story.hosts <= 64 && random.Chance(0.03)) {
    AddFault(story, {.at_us = random.Between(0, story.faults_end_us),
                     .kind = FaultKind::kStoreAway,
                     .duration_us = 15 * 60 * kSecond});
    story.training_s = static_cast<double>(random.Between(2, 1200));
  }
  if (random.Chance(0.5)) story.scale_up_delay_us = random.Between(1, 5) * kSecond;
  if (story.min_nodes % 2 == 0 && story.max_nodes % 2 == 0 && random.Chance(0.2)) {
    story.node_unit = 2;
  }
  if (random.Chance(0.1)) {
    story.max_world = static_cast<int>(
        random.Between(story.min_nodes * story.nproc_max, story.max_nodes * story.nproc_max));
  }
  if (story.hosts <= 64 && random.Chance(0.05)) {
    AddFault(story, {.at_us = random.Between(0, story.faults_end_us),
                     .kind = FaultKind::kNewcomers,
                     .duration_us = random.Between(1, 10) * kSecond});
    if (random.Chance(0.5)) story.max_nodes += 100;
  }
  if (random.Chance(0.1)) {
    AddFault(story, {.at_us = random.Between(0, story.faults_end_us),
                     .kind = FaultKind::kHostLostForever,
                     .duration_us = random.Between(100, 6000) * 1000});
  }
}

// A worker fails while the job drains for a newcomer, on the way to the common step.
void DrawFailureInADrain(Story& story, Random& random) {
  if (!random.Chance(0.04) || story.node_unit > 1 || story.hosts > 64) return;
  story.max_nodes = std::max(story.max_nodes, story.hosts + 2);
  story.max_world = 0;
  story.commits_steps = true;
  story.stop_aware_chance = 1;
  story.steps_per_second = static_cast<double>(random.Between(1, 3));
  const int64_t at_us = random.Between(story.faults_end_us / 4, story.faults_end_us / 2);
  AddFault(story, {.at_us = at_us, .kind = FaultKind::kNewcomer});
  AddFault(story, {.at_us = at_us + story.scale_up_delay_us + random.Between(0, kSecond),
                   .kind = FaultKind::kWorkerCrash});
}

}  // namespace

const char* FaultName(FaultKind kind) {
  static constexpr const char* kNames[kFaultKinds] = {
      "worker crash",     "worker hangs",  "host slows",     "agent killed",  "agent stopped",
      "agent terminated", "family killed", "host lost",      "host frozen",   "host cut off",
      "store paused",     "store restart", "store rollback", "store wiped",   "round forgotten",
      "newcomer",         "newcomers",     "store away",     "endless losses"};
  return kNames[static_cast<int>(kind)];
}

Story MakeStory(uint64_t seed, int hosts) {
  Random random(seed);
  Story story;
  story.seed = seed;
  const int drawn = DrawHosts(seed, random);
  story.hosts = hosts > 0 ? hosts : drawn;
  DrawJob(story, random);
  DrawMachines(story, random);
  DrawFaults(story, random);
  DrawSlowEffects(story, random);
  DrawGuards(story, random);
  DrawFailureInADrain(story, random);
  return story;
}

elastic::JobSpec JobOf(const Story& story) {
  elastic::JobSpec job;
  job.run_id = story.has_id ? "simulated" : "none";
  if (!story.has_id) job.fingerprint = "the same program";
  job.limits = {.max_restarts = story.max_restarts,
                .min_nodes = story.min_nodes,
                .max_nodes = story.max_nodes};
  job.rules.last_call = absl::Microseconds(story.last_call_us);
  job.rules.no_progress_limit = story.no_progress_limit;
  job.rules.quarantine_strikes = story.quarantine_strikes;
  job.rules.max_node_losses = story.max_node_losses;
  job.rules.scale_up_delay = absl::Microseconds(story.scale_up_delay_us);
  job.rules.node_unit = story.node_unit;
  job.rules.quarantine_cooldown = absl::Microseconds(story.quarantine_cooldown_us);
  job.rules.lease = absl::Microseconds(story.lease_us);
  job.times.rendezvous_timeout = absl::Microseconds(story.rendezvous_timeout_us);
  job.times.fault_grace = absl::Microseconds(story.fault_grace_us);
  job.times.shutdown_timeout = absl::Microseconds(story.shutdown_timeout_us);
  job.times.kill_timeout = absl::Microseconds(story.kill_timeout_us);
  job.times.exit_barrier_timeout = absl::Microseconds(story.exit_barrier_timeout_us);
  job.times.store_outage_timeout = absl::Microseconds(story.store_outage_timeout_us);
  job.hangs.floor = absl::Microseconds(story.hang_floor_us);
  job.hangs.waiting_floor = absl::Microseconds(HangWaitingLimitUs(story));
  return job;
}

int64_t HangLimitUs(const Story& story) {
  if (story.hang_floor_us == 0) return 0;
  const double step_us = kSecond / story.steps_per_second * story.slow_factor;
  return std::max(story.hang_floor_us, static_cast<int64_t>(5 * step_us));
}

int64_t HangWaitingLimitUs(const Story& story) {
  return 2 * HangLimitUs(story) + 2 * story.lease_us + kSecond;
}

int64_t WayUs(const Story& story) {
  // The kernel and the agent, and requests that wait for one another.
  return kSecond / 20 + 15 * static_cast<int64_t>(story.network.delay_mean_us);
}

std::string DebugString(const Story& story) {
  std::string text = absl::StrCat(
      "seed ", story.seed, ": ", story.hosts, " hosts, ", story.has_id ? "" : "no run id, ",
      "--nnodes=", story.min_nodes, ":", story.max_nodes, ", up to ", story.nproc_max,
      " workers each, --max-restarts=", story.max_restarts, ", lease ", story.lease_us / kSecond,
      "s, ", story.training_s, "s of training");
  for (const Fault& fault : story.faults) {
    absl::StrAppend(&text, "; ", FaultName(fault.kind), " at ",
                    static_cast<double>(fault.at_us) / kSecond);
  }
  return text;
}

}  // namespace ddp::testing
