// Free of LibTorch.
#ifndef DDP_COMMON_RPC_PLACE_H_
#define DDP_COMMON_RPC_PLACE_H_

#include <cstdint>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace ddp::internal {

// The place of a process among the workers of remote calls (ddp/rpc), for the ranks of a process
// group that wait for this process. A value.
struct RpcPlace {
  enum class Meeting { kNone, kBarrier, kShutdown };

  int64_t world = 0;     // a number that only the workers of one rpc::init() share; 0: no worker
  int64_t meetings = 0;  // the calls of barrier() and shutdown() so far
  Meeting waits_in = Meeting::kNone;  // the last of these calls, when it waits for other workers

  friend bool operator==(const RpcPlace&, const RpcPlace&) = default;
};

// The place of this process. ddp/rpc sets it; the log of a process group's collectives reads it.
// Thread-safe.
class OwnRpcPlace {
 public:
  static void SetWorld(int64_t world) {
    State& state = Get();
    const MutexLock lock(state.mutex);
    state.place.world = world;
  }

  // Returns the place as `thread` has it: without the meeting when another thread waits in it.
  static RpcPlace Of(std::thread::id thread) {
    State& state = Get();
    const MutexLock lock(state.mutex);
    RpcPlace place = state.place;
    if (state.waiting != thread) place.waits_in = RpcPlace::Meeting::kNone;
    return place;
  }

  // This thread waits in a meeting while the object lives.
  class Waiting {
   public:
    explicit Waiting(RpcPlace::Meeting meeting) {
      State& state = Get();
      const MutexLock lock(state.mutex);
      ++state.place.meetings;
      state.place.waits_in = meeting;
      state.waiting = std::this_thread::get_id();
    }
    ~Waiting() {
      State& state = Get();
      const MutexLock lock(state.mutex);
      state.place.waits_in = RpcPlace::Meeting::kNone;
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
  };

 private:
  struct State {
    Mutex mutex;
    RpcPlace place ABSL_GUARDED_BY(mutex);
    std::thread::id waiting ABSL_GUARDED_BY(mutex);
  };
  static State& Get() {
    static State* const state = new State;  // read by threads that may run while the process ends
    return *state;
  }
};

}  // namespace ddp::internal

#endif  // DDP_COMMON_RPC_PLACE_H_
