#ifndef DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_STALL_WATCH_H_
#define DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_STALL_WATCH_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace ddp::elastic {

// Logs calls to a file system that do not return. A file server that is unreachable blocks its
// clients inside the kernel, without an error and without a time limit.
//
//   StallWatch watch(absl::Seconds(10), [](const std::string& line) { LOG(WARNING) << line; });
//   {
//     const StallWatch::Call call(&watch, "open", path);
//     fd = open(path.c_str(), ...);
//   }
//
// `say` gets one line for a call that has lasted longer than `patience`, and another line when that
// call returns. The watch looks twice in `patience`: the first line comes up to half of `patience`
// late, and a call that returns before the look gives no line.
//
// Threads: any thread may make a Call. The watch's own thread calls `say` for a call in progress;
// the caller's thread calls `say` when the call returns. So `say` must be thread-safe. A Call locks
// a mutex twice, briefly.
class StallWatch {
 public:
  using Say = std::function<void(const std::string& line)>;

  // Starts the thread. With an infinite `patience` there is no thread and no line. Without a free
  // thread, calls are not watched.
  StallWatch(absl::Duration patience, Say say);
  // Ends the thread. No call may be in progress.
  ~StallWatch();
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  // Registers one call from its construction to the end of its scope. `watch` may be null. `verb`
  // and `path` must outlive the scope.
  class Call {
   public:
    Call(StallWatch* watch, const char* verb, const std::string& path);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    StallWatch* const watch_;
    int64_t number_ = 0;
  };

 private:
  struct Entry {
    const char* verb = nullptr;
    const std::string* path = nullptr;
    absl::Time begin;
    bool said = false;
  };

  void Watch();
  void Look() ABSL_LOCKS_EXCLUDED(mutex_);

  const absl::Duration patience_;
  const Say say_;
  const MonotonicClock clock_;

  Mutex mutex_;
  CondVar ends_;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, Entry> in_progress_ ABSL_GUARDED_BY(mutex_);

  std::thread thread_;  // last, because the thread uses all other members
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_STALL_WATCH_H_
