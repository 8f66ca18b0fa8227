#include "elastic/checkpoint/file_system/stall_watch.h"

#include <sys/prctl.h>

#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/blocked_signals.h"

namespace ddp::elastic {
namespace {

// Formats in whole seconds; below one second, in milliseconds.
std::string Text(absl::Duration duration) {
  const absl::Duration unit =
      duration < absl::Seconds(1) ? absl::Milliseconds(1) : absl::Seconds(1);
  return absl::FormatDuration(absl::Trunc(duration, unit));
}

}  // namespace

StallWatch::StallWatch(absl::Duration patience, Say say)
    : patience_(patience), say_(std::move(say)) {
  if (patience_ == absl::InfiniteDuration()) return;
  const BlockedSignals blocked;
  try {
    thread_ = std::thread([this] {
      prctl(PR_SET_NAME, "ddp-stall-watch");
      Watch();
    });
  } catch (const std::system_error&) {  // no thread is available: calls are not watched
  }
}

StallWatch::~StallWatch() {
  {
    MutexLock lock(mutex_);
    ending_ = true;
  }
  ends_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

void StallWatch::Watch() {
  while (true) {
    {
      MutexLock lock(mutex_);
      if (!ending_) ends_.WaitFor(mutex_, patience_ / 2);
      if (ending_) return;
    }
    Look();
  }
}

void StallWatch::Look() {
  std::vector<std::string> lines;
  {
    MutexLock lock(mutex_);
    const absl::Time now = clock_.Now();
    for (auto& [number, entry] : in_progress_) {
      if (entry.said || now - entry.begin < patience_) continue;
      entry.said = true;
      lines.push_back(absl::StrCat("the file system has not answered for ", Text(now - entry.begin),
                                   ": waiting to ", entry.verb, " ", *entry.path,
                                   ". Its mount may have stalled"));
    }
  }
  for (const std::string& line : lines) say_(line);
}

StallWatch::Call::Call(StallWatch* watch, const char* verb, const std::string& path)
    : watch_(watch) {
  if (watch_ == nullptr) return;
  const absl::Time now = watch_->clock_.Now();
  MutexLock lock(watch_->mutex_);
  number_ = ++watch_->calls_;
  watch_->in_progress_[number_] = {.verb = verb, .path = &path, .begin = now};
}

StallWatch::Call::~Call() {
  if (watch_ == nullptr) return;
  Entry entry;
  {
    MutexLock lock(watch_->mutex_);
    const auto found = watch_->in_progress_.find(number_);
    entry = found->second;
    watch_->in_progress_.erase(found);
  }
  if (!entry.said) return;
  watch_->say_(absl::StrCat("the file system answers again after ",
                            Text(watch_->clock_.Now() - entry.begin), ": ", *entry.path));
}

}  // namespace ddp::elastic
