// Two simulated devices in user space: streams, events and memory that behave as CUDA's do, without
// LibTorch. A program that is wrong for want of an order between streams, or between a stream and
// the host, is wrong here too, in nearly every run.
#ifndef DDP_TESTING_ACCELERATOR_RUNTIME_RUNTIME_H_
#define DDP_TESTING_ACCELERATOR_RUNTIME_RUNTIME_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "base/mutex.h"
#include "testing/accelerator/runtime/block_cache.h"
#include "testing/accelerator/runtime/completion.h"
#include "testing/accelerator/runtime/memory_pool.h"
#include "testing/accelerator/runtime/options.h"
#include "testing/accelerator/runtime/stream.h"
#include "testing/accelerator/runtime/stream_place.h"

namespace ddp::testing {

// A kernel of the device has failed, or the device cannot do what it is asked for.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A point of a stream. Each Runtime::Record() makes it another point; waits that were made before
// keep the former one. Thread-compatible.
class Event {
 public:
  explicit Event(bool timed = false) : timed_(timed) {}

 private:
  friend class Runtime;
  const bool timed_;
  std::shared_ptr<Completion> completion_;  // null: not recorded yet
};

// The devices of a process. Thread-safe; an Event is not.
//
// Errors. The first task that throws breaks its device, as on a GPU: tasks launched on it no longer
// run, and every later call for it throws DeviceError with that error. Only Free*() never throw.
//
// Synchronizations. Calls that make the host wait are counted, each time, whether or not work is
// left. More of them than RuntimeOptions::sync_budget after a BeginStep() throw DeviceError with
// the caller's stack.
class Runtime {
 public:
  static constexpr int kDevices = 2;
  // Streams 1 to kPoolStreams are the pool's.
  static constexpr int64_t kPoolStreams = 8;

  explicit Runtime(const RuntimeOptions& options);
  // Runs what was launched. Blocks for ever if a task does.
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  const RuntimeOptions& options() const { return options_; }
  int device_count() const { return kDevices; }

  // ---- Streams.

  // Returns a stream of the pool, in turn.
  int64_t PoolStream(int device);
  // Returns a stream that nobody else has.
  int64_t NewStream(int device);
  // Appends a kernel. `name` is for error messages.
  void Launch(StreamPlace place, const std::string& name, std::function<void()> task);
  // Whether the stream has run all of its tasks.
  bool Query(StreamPlace place);
  // Blocks until the stream has run all of its tasks.
  void Synchronize(StreamPlace place);
  void SynchronizeDevice(int device);

  // ---- Events. An event that was not recorded counts as reached.

  void Record(Event& event, StreamPlace place);
  // Lets no later task of the stream run before the event.
  void Block(const Event& event, StreamPlace place);
  bool Query(const Event& event);
  void Synchronize(const Event& event);
  // Returns the time from one event to another, on the device. Throws DeviceError unless both are
  // timed and reached.
  double ElapsedMs(const Event& begin, const Event& end);

  // ---- Memory. The host faults at an address of device memory; only KernelView() may be used.

  // Returns memory of the device that the stream owns; null for 0 bytes. Throws DeviceError when
  // the device has no memory left. That breaks nothing.
  void* Allocate(StreamPlace place, size_t bytes);
  // Likewise memory of the host that a device reads and writes without the host's waiting.
  void* AllocatePinned(size_t bytes);
  // Frees memory of either kind, null included.
  void Free(void* pointer) noexcept;
  // Keeps the memory at `pointer`, of either kind, from reuse after its Free() until the work that
  // `place` has by then is done. Pinned memory needs it for each use. Other memory: no effect.
  void RecordUse(const void* pointer, StreamPlace place);
  // Gives back what was freed.
  void EmptyCache(int device) { device_memory_.at(device)->ReleaseFree(); }

  // Returns the device whose memory `pointer` lies in.
  std::optional<int> DeviceOf(const void* pointer) const;
  bool IsPinned(const void* pointer) const { return pinned_memory_->Contains(pointer); }
  // Returns the address by which a kernel uses `pointer`, which may lie anywhere.
  void* KernelView(const void* pointer) const;
  BlockCache::Use MemoryUse(int device) const { return device_memory_.at(device)->use(); }

  // ---- Synchronizations by the host.

  void BeginStep() { step_syncs_ = 0; }
  // Since BeginStep(). Before the first one it is negative, and there is no budget.
  int64_t step_syncs() const { return step_syncs_; }
  // Counts one. For a wait that is none of the above, as on a collective's completion.
  void CountSync();

  // Returns the number of the next collective of the process, from 1.
  int64_t NextCollective() { return ++collectives_; }

  // Throws the error of a broken device.
  void Check(int device) const;

 private:
  struct Device {
    mutable Mutex mutex;
    std::map<int64_t, std::unique_ptr<Stream>> streams ABSL_GUARDED_BY(mutex);  // made when used
    int64_t next_pool_stream ABSL_GUARDED_BY(mutex) = 0;
    int64_t next_new_stream ABSL_GUARDED_BY(mutex) = kPoolStreams + 1;
    std::string error ABSL_GUARDED_BY(mutex);  // empty: none
  };

  Stream& StreamAt(StreamPlace place);
  void RunTask(Device& device, const std::string& name, int64_t kernel,
               const std::function<void()>& task);
  MemoryPool* PoolOf(const void* pointer) const;

  const RuntimeOptions options_;
  std::atomic<int64_t> kernels_ = 0;
  std::atomic<int64_t> collectives_ = 0;
  std::atomic<int64_t> step_syncs_;
  // The memory outlives the streams, whose tasks may free some.
  std::array<std::unique_ptr<MemoryPool>, kDevices> device_memory_;
  std::unique_ptr<MemoryPool> pinned_memory_;
  std::array<Device, kDevices> devices_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_RUNTIME_RUNTIME_H_
