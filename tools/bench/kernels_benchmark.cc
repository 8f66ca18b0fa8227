// The kernels of ddp/comm/kernels beside memcpy.
//
//   bazel run --config=opt //tools/bench:kernels_benchmark -- --benchmark_repetitions=21
//       --benchmark_enable_random_interleaving --benchmark_report_aggregates_only
//
// Two threads stand for two ranks, each on a processor of its own. A time is the mean of both. The
// repetitions of all subjects take turns at random, so that a slower machine is slower for all of
// them. Reductions are in place: each thread reduces a half of all buffers. Conversions are of a
// buffer for each thread.

#include <benchmark/benchmark.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ddp/comm/kernels/compress.h"
#include "ddp/comm/kernels/element_type.h"
#include "ddp/comm/kernels/reduce.h"

namespace ddp {
namespace {

using benchmark::State;
using internal::ElementType;

constexpr int kThreads = 2;
constexpr size_t kBytes = size_t{64} << 20;  // of each reduced buffer
constexpr size_t kPart = kBytes / kThreads;
constexpr size_t kFloats = 25'000'000 / sizeof(float);  // of each converted buffer

// Returns memory whose pages are there already. Zeros, which are numbers of any type.
std::byte* Buffer(int number) {
  static const std::array<std::byte*, 3 * kThreads> buffers = [] {
    std::array<std::byte*, 3 * kThreads> made{};
    for (std::byte*& buffer : made) {
      buffer = static_cast<std::byte*>(aligned_alloc(4096, kBytes));
      if (buffer == nullptr) abort();
      std::memset(buffer, 0, kBytes);
    }
    return made;
  }();
  return buffers[number];
}

float* Floats(const State& state) { return reinterpret_cast<float*>(Buffer(state.thread_index())); }
uint16_t* Shorts(const State& state) {
  return reinterpret_cast<uint16_t*>(Buffer(kThreads + state.thread_index()));
}

void PinTo(int thread) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || thread-- > 0) continue;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(cpu, &own);
    pthread_setaffinity_np(pthread_self(), sizeof(own), &own);
    return;
  }
}

// Runs `kernel` in each iteration, on the thread's own processor.
template <class Kernel>
void Time(State& state, const Kernel& kernel) {
  cpu_set_t before;
  sched_getaffinity(0, sizeof(before), &before);
  PinTo(state.thread_index());
  for (auto _ : state) {
    kernel();
    benchmark::ClobberMemory();
  }
  sched_setaffinity(0, sizeof(before), &before);  // the first thread runs all benchmarks
}

void Copy(State& state, size_t bytes) {
  Time(state, [&] { std::memcpy(Shorts(state), Floats(state), bytes); });
}

void Reduce(State& state, ElementType type, int buffers, double factor) {
  std::vector<const std::byte*> inputs;
  std::vector<std::byte*> outputs;
  for (int i = 0; i < buffers; ++i) {
    outputs.push_back(Buffer(i) + state.thread_index() * kPart);
    inputs.push_back(outputs.back());
  }
  const size_t count = kPart / SizeOf(type);
  Time(state,
       [&] { ReduceTree(internal::ReduceKind::kSum, type, inputs, outputs, count, factor); });
}

// Each thread reads a half of two buffers, and writes it to both others.
void ReduceOutOfPlace(State& state, ElementType type) {
  const size_t start = state.thread_index() * kPart;
  const std::byte* const from[] = {Buffer(0) + start, Buffer(1) + start};
  std::byte* const to[] = {Buffer(2) + start, Buffer(3) + start};
  Time(state,
       [&] { ReduceTree(internal::ReduceKind::kSum, type, from, to, kPart / SizeOf(type)); });
}

// Rounds to nearest even, one number at a time. For numbers that are not NaN.
uint16_t RoundToBfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// The conversion to bfloat16 in three steps: copy, scale, round.
void ThreeSteps(State& state, float factor) {
  auto* const copy = reinterpret_cast<float*>(Buffer(2 * kThreads + state.thread_index()));
  Time(state, [&] {
    std::memcpy(copy, Floats(state), kFloats * sizeof(float));
    for (size_t i = 0; i < kFloats; ++i) copy[i] *= factor;
    for (size_t i = 0; i < kFloats; ++i) Shorts(state)[i] = RoundToBfloat16(copy[i]);
  });
}

void DivideAs(State& state, ElementType type, int divisor) {
  Time(state, [&] { internal::DivideAs(type, Floats(state), divisor, kFloats, Shorts(state)); });
}

void WidenFrom(State& state, ElementType type) {
  Time(state, [&] { internal::WidenFrom(type, Shorts(state), kFloats, Floats(state)); });
}

#define DDP_KERNEL(...) \
  BENCHMARK_CAPTURE(__VA_ARGS__)->Threads(kThreads)->UseRealTime()->Unit(benchmark::kMillisecond)

DDP_KERNEL(Copy, 64_MiB, kBytes);
DDP_KERNEL(Reduce, float_2_buffers, ElementType::kFloat, 2, 1);
DDP_KERNEL(Reduce, float_2_buffers_with_a_factor, ElementType::kFloat, 2, 1.0 / 3);
DDP_KERNEL(Reduce, double_2_buffers, ElementType::kDouble, 2, 1);
DDP_KERNEL(Reduce, bfloat16_2_buffers, ElementType::kBfloat16, 2, 1);
DDP_KERNEL(Reduce, half_2_buffers, ElementType::kHalf, 2, 1);
DDP_KERNEL(Reduce, int32_2_buffers, ElementType::kInt32, 2, 1);
DDP_KERNEL(Reduce, float_3_buffers, ElementType::kFloat, 3, 1);
DDP_KERNEL(Reduce, float_4_buffers, ElementType::kFloat, 4, 1);
DDP_KERNEL(ReduceOutOfPlace, float_2_buffers_into_2_others, ElementType::kFloat);
DDP_KERNEL(Copy, 25_MB, kFloats * sizeof(float));
DDP_KERNEL(ThreeSteps, bfloat16, 0.3f);
DDP_KERNEL(DivideAs, bfloat16_by_2, ElementType::kBfloat16, 2);
DDP_KERNEL(DivideAs, bfloat16_by_3, ElementType::kBfloat16, 3);
DDP_KERNEL(DivideAs, half_by_2, ElementType::kHalf, 2);
DDP_KERNEL(WidenFrom, bfloat16, ElementType::kBfloat16);
DDP_KERNEL(WidenFrom, half, ElementType::kHalf);

}  // namespace
}  // namespace ddp

BENCHMARK_MAIN();
