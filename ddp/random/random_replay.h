#ifndef DDP_RANDOM_RANDOM_REPLAY_H_
#define DDP_RANDOM_RANDOM_REPLAY_H_

#include <cstdint>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace ddp::internal {

// The random numbers that LibTorch's operations have drawn on one thread, to be drawn again later.
//
// LibTorch's default generator of the CPU is one for all threads of the process. To set it back
// would repeat numbers in the threads that draw meanwhile, and would mix theirs into the repeated
// ones. So a replay leaves the default generator alone: LibTorch's dispatcher hands each operation
// that takes a generator, and was called without one, a generator of the replay. A recording needs
// the state of the default generator at each draw. Therefore an operation of a recording draws from
// a copy, and the default generator, which stays locked meanwhile, continues after the copy.
//
// Covers the operations of LibTorch ("aten::") on the CPU, on the thread of the recording, without
// a generator of their own. A program that draws from the default generator by its own hand is not
// recorded. A hook of LibTorch that runs within an operation (a profiler's, for saved tensors) must
// not draw from the default generator: it is locked then. A traced operation draws from it without
// the lock, so no other thread may draw while a recording is traced. Costs some 10 us for each
// recorded operation that draws, and 10 ms before main() in a program that links this file.
// Operations that do not draw cost nothing.
//
// A value. Thread-compatible.
class RandomNumbers {
 private:
  friend class RandomDraw;
  friend class RandomFrame;
  // Draws that follow each other without a draw of another thread in between.
  struct Run {
    int64_t first_draw;
    at::Tensor state;  // of the generator before it
  };
  void Add(const at::Tensor& before, const at::Tensor& after);

  std::vector<Run> runs_;
  int64_t draws_ = 0;
  at::Tensor end_;  // the state after the last draw, while recorded
};

// The innermost recording or replay of a thread counts. One that is made within a replay records
// what the replay draws. Each ends on the thread that made it, in reverse order.
class RandomFrame {
 public:
  RandomFrame(const RandomFrame&) = delete;
  RandomFrame& operator=(const RandomFrame&) = delete;

 protected:
  // Both null: has no effect.
  RandomFrame(RandomNumbers* recorded, const RandomNumbers* replayed);
  ~RandomFrame();

 private:
  friend class RandomDraw;
  at::Generator& NextOfReplay();

  RandomNumbers* const recorded_;
  const RandomNumbers* const replayed_;
  RandomFrame* outer_ = nullptr;
  // Of a replay.
  at::Generator generator_;
  int64_t draw_ = 0;
  size_t run_ = 0;
};

// Records the random numbers of this thread while it lives. Throws ConfigurationError when another
// part of the program has taken the dispatch key that this needs. Null: has no effect.
class [[nodiscard]] RandomRecording : private RandomFrame {
 public:
  explicit RandomRecording(RandomNumbers* into) : RandomFrame(into, nullptr) {}
};

// Draws `numbers` again on this thread while it lives. Null: has no effect.
class [[nodiscard]] RandomReplay : private RandomFrame {
 public:
  explicit RandomReplay(const RandomNumbers* numbers) : RandomFrame(nullptr, numbers) {}
};

}  // namespace ddp::internal

#endif  // DDP_RANDOM_RANDOM_REPLAY_H_
