#include "testing/accelerator/runtime/runtime.h"

#include <execinfo.h>

#include <cstdlib>
#include <exception>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "testing/accelerator/runtime/lateness.h"

namespace ddp::testing {
namespace {

// So far below zero that no budget is spent before the first BeginStep().
constexpr int64_t kNoStep = std::numeric_limits<int64_t>::min() / 2;

std::string CallersStack() {
  constexpr int kFrames = 24;
  void* frames[kFrames];
  const int count = backtrace(frames, kFrames);
  const std::unique_ptr<char*, decltype(&std::free)> names(backtrace_symbols(frames, count),
                                                           &std::free);
  std::string text;
  for (int i = 0; names && i < count; ++i) absl::StrAppend(&text, "\n    ", names.get()[i]);
  return text;
}

}  // namespace

Runtime::Runtime(const RuntimeOptions& options) : options_(options), step_syncs_(kNoStep) {
  const auto stream_at = [this](StreamPlace place) -> Stream& { return StreamAt(place); };
  MemoryPool::Options pool{.limit = options_.memory_limit, .poison = options_.poison};
  for (auto& memory : device_memory_) memory = std::make_unique<MemoryPool>(pool, stream_at);
  pool.kind = DoubleMapping::Kind::kPinned;
  pinned_memory_ = std::make_unique<MemoryPool>(pool, stream_at);
}

Runtime::~Runtime() {
  std::vector<Stream*> streams;
  for (Device& device : devices_) {
    MutexLock lock(device.mutex);
    for (const auto& [id, stream] : device.streams) streams.push_back(stream.get());
  }
  for (Stream* stream : streams) stream->Finish();
  for (Stream* stream : streams) stream->Synchronize();
}

int64_t Runtime::PoolStream(int device) {
  Device& chosen = devices_.at(device);
  MutexLock lock(chosen.mutex);
  return 1 + chosen.next_pool_stream++ % kPoolStreams;
}

int64_t Runtime::NewStream(int device) {
  Device& chosen = devices_.at(device);
  MutexLock lock(chosen.mutex);
  return chosen.next_new_stream++;
}

void Runtime::Launch(StreamPlace place, const std::string& name, std::function<void()> task) {
  Check(place.device);
  Stream& stream = StreamAt(place);
  stream.Launch([this, &device = devices_.at(place.device), name, kernel = ++kernels_,
                 task = std::move(task)] { RunTask(device, name, kernel, task); });
  if (!options_.launch_blocking) return;
  stream.Synchronize();
  Check(place.device);
}

void Runtime::RunTask(Device& device, const std::string& name, int64_t kernel,
                      const std::function<void()>& task) {
  {
    MutexLock lock(device.mutex);
    if (!device.error.empty()) return;
  }
  std::string error;
  try {
    if (kernel == options_.fail_kernel) throw DeviceError("it fails by DDP_SIM_FAIL_KERNEL");
    task();
    return;
  } catch (const std::exception& e) {
    error = e.what();
  } catch (...) {
    error = "an unknown exception";
  }
  MutexLock lock(device.mutex);
  if (device.error.empty()) {
    device.error = absl::StrCat("kernel ", kernel, " (", name, ") failed: ", error);
  }
}

bool Runtime::Query(StreamPlace place) {
  Check(place.device);
  return StreamAt(place).idle();
}

void Runtime::Synchronize(StreamPlace place) {
  CountSync();
  StreamAt(place).Synchronize();
  Check(place.device);
}

void Runtime::SynchronizeDevice(int device) {
  CountSync();
  std::vector<Stream*> streams;
  {
    Device& chosen = devices_.at(device);
    MutexLock lock(chosen.mutex);
    for (const auto& [id, stream] : chosen.streams) streams.push_back(stream.get());
  }
  for (Stream* stream : streams) stream->Synchronize();
  Check(device);
}

void Runtime::Record(Event& event, StreamPlace place) {
  Check(place.device);
  event.completion_ = StreamAt(place).Record();
}

void Runtime::Block(const Event& event, StreamPlace place) {
  Check(place.device);
  if (event.completion_) StreamAt(place).WaitFor(event.completion_);
}

bool Runtime::Query(const Event& event) { return !event.completion_ || event.completion_->done(); }

void Runtime::Synchronize(const Event& event) {
  CountSync();
  if (!event.completion_) return;
  event.completion_->Hurry();
  event.completion_->Wait();
}

double Runtime::ElapsedMs(const Event& begin, const Event& end) {
  for (const Event* event : {&begin, &end}) {
    if (!event->timed_) throw DeviceError("an event that is not timed has no time");
    if (!event->completion_ || !event->completion_->done()) {
      throw DeviceError("an event that was not reached has no time");
    }
  }
  return absl::ToDoubleMilliseconds(end.completion_->time() - begin.completion_->time());
}

void* Runtime::Allocate(StreamPlace place, size_t bytes) {
  Check(place.device);
  if (bytes == 0) return nullptr;
  void* pointer = device_memory_.at(place.device)->Allocate(bytes, place);
  if (pointer != nullptr) return pointer;
  throw DeviceError(absl::StrCat("out of memory on device ", place.device, ": ", bytes,
                                 " bytes wanted, ", MemoryUse(place.device).allocated,
                                 " allocated, limit ", options_.memory_limit));
}

void* Runtime::AllocatePinned(size_t bytes) {
  if (bytes == 0) return nullptr;
  void* pointer = pinned_memory_->Allocate(bytes);
  if (pointer == nullptr) {
    throw DeviceError(absl::StrCat("out of pinned memory: ", bytes, " bytes wanted"));
  }
  return pointer;
}

void Runtime::Free(void* pointer) noexcept {
  if (MemoryPool* pool = PoolOf(pointer)) pool->Free(pointer);
}

void Runtime::RecordUse(const void* pointer, StreamPlace place) {
  if (MemoryPool* pool = PoolOf(pointer)) pool->RecordUse(pointer, place);
}

std::optional<int> Runtime::DeviceOf(const void* pointer) const {
  for (int device = 0; device < kDevices; ++device) {
    if (device_memory_[device]->Contains(pointer)) return device;
  }
  return std::nullopt;
}

void* Runtime::KernelView(const void* pointer) const {
  const MemoryPool* pool = PoolOf(pointer);
  return pool != nullptr ? pool->KernelView(pointer) : const_cast<void*>(pointer);
}

void Runtime::CountSync() {
  const int64_t count = ++step_syncs_;
  if (options_.sync_budget && count > *options_.sync_budget) {
    throw DeviceError(absl::StrCat("host synchronization ", count,
                                   " of a step; DDP_SIM_SYNC_BUDGET allows ", *options_.sync_budget,
                                   "; it comes from", CallersStack()));
  }
}

void Runtime::Check(int device) const {
  const Device& checked = devices_.at(device);
  MutexLock lock(checked.mutex);
  if (!checked.error.empty()) throw DeviceError(checked.error);
}

Stream& Runtime::StreamAt(StreamPlace place) {
  Device& device = devices_.at(place.device);
  MutexLock lock(device.mutex);
  std::unique_ptr<Stream>& stream = device.streams[place.stream];
  if (!stream) {
    stream = std::make_unique<Stream>(place, [this, place](int64_t number) {
      return Lateness(options_.seed, place, number, options_.lateness);
    });
  }
  return *stream;
}

MemoryPool* Runtime::PoolOf(const void* pointer) const {
  if (const std::optional<int> device = DeviceOf(pointer)) return device_memory_[*device].get();
  return pinned_memory_->Contains(pointer) ? pinned_memory_.get() : nullptr;
}

}  // namespace ddp::testing
