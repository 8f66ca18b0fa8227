// Compares the kernels of ddp/comm/kernels with memcpy, in one run.
//
//   bazel run --config=opt //tools/bench:kernels_benchmark
//
// Two threads stand for two ranks, each on a processor of its own. In every round, all subjects
// take turns, so that a slower machine is slower for all of them. A time is that of the slower
// thread. A figure is the median over the rounds, with the first and the third quartile. A ratio is
// the median of the rounds' own ratios.

#include <gflags/gflags.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "ddp/comm/kernels/compress.h"
#include "ddp/comm/kernels/element_type.h"
#include "ddp/comm/kernels/reduce.h"

DEFINE_int32(rounds, 21, "rounds of every measurement");
DEFINE_int32(reduce_mib, 64, "MiB of each reduced buffer");
DEFINE_int32(compress_mb, 25, "MB of floats in each compressed buffer");

namespace ddp {
namespace {

using internal::ElementType;

constexpr int kThreads = 2;
constexpr size_t kAlignment = 4096;

// Memory whose pages are there already. Zeros, which are numbers of any type.
class Buffer {
 public:
  explicit Buffer(size_t bytes)
      : data_(static_cast<std::byte*>(
            aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment))) {
    if (data_ == nullptr) abort();
    std::memset(data_.get(), 0, bytes);
  }

  template <class T = std::byte>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

struct Subject {
  std::string name;
  std::function<void(int thread)> run;
  std::vector<double> ms;  // one of each round
};

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

// Runs all subjects in turn, after one round that is not measured.
void Measure(std::vector<Subject>& subjects) {
  std::barrier meeting(kThreads);
  const auto work = [&](int thread) {
    PinTo(thread);
    for (int round = 0; round <= FLAGS_rounds; ++round) {
      for (Subject& subject : subjects) {
        meeting.arrive_and_wait();
        const int64_t start = MonotonicNanoseconds();
        subject.run(thread);
        meeting.arrive_and_wait();
        const double ms = (MonotonicNanoseconds() - start) / 1e6;
        if (thread == 0 && round > 0) subject.ms.push_back(ms);
      }
    }
  };
  std::thread second(work, 1);
  std::thread first(work, 0);
  first.join();
  second.join();
}

struct Quartiles {
  double low = 0;
  double median = 0;
  double high = 0;
};

Quartiles QuartilesOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t last = values.size() - 1;
  return {values[last / 4], values[last / 2], values[last * 3 / 4]};
}

// Prints each subject's time and its ratio to the first subject.
void Print(const std::string& title, const std::vector<Subject>& subjects) {
  printf("\n%s\n", title.c_str());
  for (const Subject& subject : subjects) {
    std::vector<double> ratios;
    for (size_t i = 0; i < subject.ms.size(); ++i) {
      ratios.push_back(subject.ms[i] / subjects[0].ms[i]);
    }
    const Quartiles time = QuartilesOf(subject.ms);
    const Quartiles ratio = QuartilesOf(ratios);
    printf("  %-44s %8.2f ms [%.2f..%.2f]   %.2f [%.2f..%.2f]\n", subject.name.c_str(), time.median,
           time.low, time.high, ratio.median, ratio.low, ratio.high);
  }
}

// Both threads reduce a half of all buffers in place.
Subject Reduction(const std::string& name, ElementType type, size_t bytes,
                  std::vector<std::byte*> buffers, double factor = 1) {
  return {name, [=](int thread) {
            const size_t count = bytes / SizeOf(type) / kThreads;
            std::vector<const std::byte*> inputs;
            std::vector<std::byte*> outputs;
            for (std::byte* buffer : buffers) {
              outputs.push_back(buffer + thread * (bytes / kThreads));
              inputs.push_back(outputs.back());
            }
            ReduceTree(internal::ReduceKind::kSum, type, inputs, outputs, count, factor);
          }};
}

void BenchmarkReduce() {
  const size_t bytes = static_cast<size_t>(FLAGS_reduce_mib) << 20;
  std::vector<Buffer> memory;
  for (int i = 0; i < 4; ++i) memory.emplace_back(bytes);
  std::byte* const a = memory[0].as();
  std::byte* const b = memory[1].as();
  std::byte* const c = memory[2].as();
  std::byte* const d = memory[3].as();
  std::vector<Subject> subjects;
  subjects.push_back({"memcpy, each thread a whole buffer", [=](int thread) {
                        std::memcpy(thread == 0 ? c : d, thread == 0 ? a : b, bytes);
                      }});
  subjects.push_back(Reduction("float, 2 buffers", ElementType::kFloat, bytes, {a, b}));
  subjects.push_back(
      Reduction("float, 2 buffers, with a factor", ElementType::kFloat, bytes, {a, b}, 1.0 / 3));
  subjects.push_back(Reduction("double, 2 buffers", ElementType::kDouble, bytes, {a, b}));
  subjects.push_back(Reduction("bfloat16, 2 buffers", ElementType::kBfloat16, bytes, {a, b}));
  subjects.push_back(Reduction("half, 2 buffers", ElementType::kHalf, bytes, {a, b}));
  subjects.push_back(Reduction("int32, 2 buffers", ElementType::kInt32, bytes, {a, b}));
  subjects.push_back(Reduction("float, 3 buffers", ElementType::kFloat, bytes, {a, b, c}));
  subjects.push_back(Reduction("float, 4 buffers", ElementType::kFloat, bytes, {a, b, c, d}));
  // Out of place: each thread reads a half of two buffers, and writes it to both others.
  subjects.push_back({"float, 2 buffers into 2 others", [=](int thread) {
                        const size_t start = thread * (bytes / kThreads);
                        const std::byte* const from[] = {a + start, b + start};
                        std::byte* const to[] = {c + start, d + start};
                        ReduceTree(internal::ReduceKind::kSum, ElementType::kFloat, from, to,
                                   bytes / kThreads / sizeof(float));
                      }});
  Measure(subjects);
  Print("Sum of buffers of " + std::to_string(FLAGS_reduce_mib) + " MiB in place, by two threads",
        subjects);
}

// Rounds to nearest even, one number at a time. For numbers that are not NaN.
uint16_t RoundToBfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

void BenchmarkCompress() {
  const size_t count = static_cast<size_t>(FLAGS_compress_mb) * 1000000 / sizeof(float);
  std::vector<Buffer> from, to, scratch;
  for (int i = 0; i < kThreads; ++i) {
    from.emplace_back(count * sizeof(float));
    to.emplace_back(count * sizeof(float));
    scratch.emplace_back(count * sizeof(float));
  }
  const auto floats = [&](int thread) { return from[thread].as<float>(); };
  const auto shorts = [&](int thread) { return to[thread].as<uint16_t>(); };
  std::vector<Subject> subjects;
  subjects.push_back({"memcpy of the floats", [&](int thread) {
                        std::memcpy(to[thread].as(), floats(thread), count * sizeof(float));
                      }});
  subjects.push_back({"bfloat16, three steps: copy, scale, round", [&](int thread) {
                        float* const copy = scratch[thread].as<float>();
                        std::memcpy(copy, floats(thread), count * sizeof(float));
                        for (size_t i = 0; i < count; ++i) copy[i] *= 0.3f;
                        uint16_t* const result = shorts(thread);
                        for (size_t i = 0; i < count; ++i) result[i] = RoundToBfloat16(copy[i]);
                      }});
  subjects.push_back({"Divided as bfloat16, by 2", [&](int thread) {
                        internal::DivideAs(ElementType::kBfloat16, floats(thread), 2, count,
                                           shorts(thread));
                      }});
  subjects.push_back({"Divided as bfloat16, by 3", [&](int thread) {
                        internal::DivideAs(ElementType::kBfloat16, floats(thread), 3, count,
                                           shorts(thread));
                      }});
  subjects.push_back({"Divided as half, by 2", [&](int thread) {
                        internal::DivideAs(ElementType::kHalf, floats(thread), 2, count,
                                           shorts(thread));
                      }});
  subjects.push_back({"Widened from bfloat16", [&](int thread) {
                        internal::WidenFrom(ElementType::kBfloat16, shorts(thread), count,
                                            floats(thread));
                      }});
  subjects.push_back({"Widened from half", [&](int thread) {
                        internal::WidenFrom(ElementType::kHalf, shorts(thread), count,
                                            floats(thread));
                      }});
  Measure(subjects);
  Print(
      "Conversion of " + std::to_string(FLAGS_compress_mb) + " MB of floats by each of two threads",
      subjects);
}

int Main() {
  double load = 0;
  getloadavg(&load, 1);
  printf("load average %.2f; median [first..third quartile]; ratio to memcpy in the same round\n",
         load);
  BenchmarkReduce();
  BenchmarkCompress();
  return 0;
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  return ddp::Main();
}
