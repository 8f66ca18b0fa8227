// Plants the four mistakes that programs for devices make. The device shows each of them for every
// seed, and the right form of the same program is right for every seed.
#include <thread>

#include "absl/time/time.h"
#include "base/under_sanitizer.h"
#include "gtest/gtest.h"
#include "testing/accelerator/runtime/runtime.h"

namespace ddp::testing {
namespace {

constexpr int kSeeds = 50;
constexpr int kRounds = 20;
constexpr StreamPlace kCompute{.stream = 0};
constexpr StreamPlace kCopies{.stream = 1};

// Each program makes kRounds rounds, and returns how many of them gave a wrong number.

float* View(Runtime& runtime, void* pointer) {
  return static_cast<float*>(runtime.KernelView(pointer));
}

// Makes later work of `second` wait for the work that `first` has so far.
void Order(Runtime& runtime, StreamPlace first, StreamPlace second) {
  Event event;
  runtime.Record(event, first);
  runtime.Block(event, second);
}

// Lets the stream run to its end with its lateness. A host that synchronizes would end the
// lateness, and the streams would race instead.
void RunLate(Runtime& runtime, StreamPlace stream) {
  while (!runtime.Query(stream)) std::this_thread::yield();
}

int ProduceAndConsume(Runtime& runtime, bool right) {
  int wrong = 0;
  float* x = View(runtime, runtime.Allocate(kCompute, sizeof(float)));
  for (int round = 0; round < kRounds; ++round) {
    runtime.Launch(kCompute, "produce", [x, round] { *x = static_cast<float>(round); });
    if (right) Order(runtime, kCompute, kCopies);
    runtime.Launch(kCopies, "consume", [x, round, &wrong] { wrong += !(*x == round); });
    Order(runtime, kCopies, kCompute);
  }
  runtime.Synchronize(kCopies);
  return wrong;
}

int FreeInUse(Runtime& runtime, bool right) {
  int wrong = 0;
  for (int round = 0; round < kRounds; ++round) {
    void* pointer = runtime.Allocate(kCompute, sizeof(float));
    float* x = View(runtime, pointer);
    runtime.Launch(kCompute, "produce", [x, round] { *x = static_cast<float>(round); });
    Order(runtime, kCompute, kCopies);
    runtime.Launch(kCopies, "consume", [x, round, &wrong] { wrong += !(*x == round); });
    if (right) runtime.RecordUse(pointer, kCopies);
    runtime.Free(pointer);
  }
  RunLate(runtime, kCopies);
  runtime.Synchronize(kCopies);
  return wrong;
}

int RefillPinnedMemory(Runtime& runtime, bool right) {
  int wrong = 0;
  auto* x = static_cast<float*>(runtime.AllocatePinned(sizeof(float)));
  for (int round = 0; round < kRounds; ++round) {
    *x = static_cast<float>(round);
    runtime.Launch(kCopies, "copy", [x, round, &wrong] { wrong += !(*x == round); });
    if (right) runtime.Synchronize(kCopies);
  }
  runtime.Synchronize(kCopies);
  return wrong;
}

int ReadOnTheHost(Runtime& runtime, bool right) {
  int wrong = 0;
  auto* x = static_cast<float*>(runtime.AllocatePinned(sizeof(float)));
  for (int round = 0; round < kRounds; ++round) {
    runtime.Launch(kCopies, "copy to the host", [x, round] { *x = static_cast<float>(round); });
    if (right) runtime.Synchronize(kCopies);
    wrong += !(*x == round);
  }
  runtime.Synchronize(kCopies);
  return wrong;
}

using Program = int (*)(Runtime& runtime, bool right);

// Returns for how many seeds the program gave a wrong number.
int WrongSeeds(Program program, bool right) {
  int wrong = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Runtime runtime({.seed = seed, .lateness = absl::Milliseconds(2)});
    wrong += program(runtime, right) > 0;
  }
  return wrong;
}

void ExpectSeen(Program program) {
  EXPECT_EQ(WrongSeeds(program, /*right=*/true), 0);
  // The mistakes are data races, which ThreadSanitizer reports.
  if (kUnderSanitizer) return;
  EXPECT_EQ(WrongSeeds(program, /*right=*/false), kSeeds);
}

TEST(HazardsTest, AMissingWaitIsSeen) { ExpectSeen(ProduceAndConsume); }

TEST(HazardsTest, AMissingRecordStreamIsSeen) { ExpectSeen(FreeInUse); }

TEST(HazardsTest, AnEarlyReuseOfPinnedMemoryIsSeen) { ExpectSeen(RefillPinnedMemory); }

TEST(HazardsTest, ACopyToTheHostThatNobodyWaitsForIsSeen) { ExpectSeen(ReadOnTheHost); }

}  // namespace
}  // namespace ddp::testing
