#include "elastic/timers/worker_timers.h"

#include <signal.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"

namespace ddp::elastic {
namespace {

constexpr int64_t kVersion = 1;

absl::Status Bad(const char* what) {
  return absl::InvalidArgumentError(absl::StrCat("a timer request with ", what));
}

bool IsInteger(const nlohmann::json& object, const char* name) {
  return object.contains(name) && object[name].is_number_integer();
}

}  // namespace

absl::StatusOr<TimerRequest> ParseTimerRequest(const std::string& line) {
  if (line.size() > TimerRequest::kMaxBytes) return Bad("more bytes than a pipe takes at once");
  const nlohmann::json object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return Bad("no JSON object");
  if (!IsInteger(object, "version") || object["version"].get<int64_t>() != kVersion) {
    return Bad("another version than 1");
  }
  TimerRequest request;
  if (!IsInteger(object, "pid")) return Bad("no pid");
  request.pid = object["pid"].get<int64_t>();
  if (request.pid <= 0 || request.pid > std::numeric_limits<int32_t>::max()) return Bad("no pid");
  if (!object.contains("scope_id") || !object["scope_id"].is_string()) return Bad("no scope_id");
  request.scope = object["scope_id"].get<std::string>();
  if (!object.contains("expiration_time") || !object["expiration_time"].is_number()) {
    return Bad("no expiration_time");
  }
  request.expiration_unix_s = object["expiration_time"].get<double>();
  if (!std::isfinite(request.expiration_unix_s)) return Bad("no expiration_time");
  if (!IsInteger(object, "signal")) return Bad("no signal");
  const int64_t signal = object["signal"].get<int64_t>();
  if (signal >= _NSIG) return Bad("no signal");
  request.signal = static_cast<int>(std::max<int64_t>(signal, 0));
  return request;
}

absl::Status WorkerTimers::Apply(int local_rank, const TimerRequest& request, absl::Time deadline) {
  const std::pair<int64_t, std::string> key(request.pid, request.scope);
  if (request.is_release()) {
    timers_.erase(key);
    return absl::OkStatus();
  }
  if (timers_.size() >= kMaxTimers && !timers_.contains(key)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("more than ", kMaxTimers, " timers of workers run"));
  }
  timers_[key] = {.local_rank = local_rank, .deadline = deadline, .signal = request.signal};
  return absl::OkStatus();
}

void WorkerTimers::Forget(int local_rank) {
  std::erase_if(timers_,
                [local_rank](const auto& entry) { return entry.second.local_rank == local_rank; });
}

absl::Time WorkerTimers::next_deadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [key, timer] : timers_) next = std::min(next, timer.deadline);
  return next;
}

std::vector<WorkerTimers::Expired> WorkerTimers::TakeExpired(absl::Time now) {
  struct First {
    absl::Time deadline;
    Expired expired;
  };
  std::map<int, First> first;  // by local rank
  std::set<int64_t> processes;
  for (const auto& [key, timer] : timers_) {
    if (timer.deadline > now) continue;
    processes.insert(key.first);
    if (timer.signal == 0) continue;
    const auto [entry, is_new] = first.try_emplace(timer.local_rank);
    if (!is_new && entry->second.deadline <= timer.deadline) continue;
    entry->second = {timer.deadline, {timer.local_rank, key.second, timer.signal}};
  }
  std::erase_if(timers_, [&](const auto& entry) { return processes.contains(entry.first.first); });
  std::vector<Expired> expired;
  for (auto& [local_rank, one] : first) expired.push_back(std::move(one.expired));
  return expired;
}

}  // namespace ddp::elastic
