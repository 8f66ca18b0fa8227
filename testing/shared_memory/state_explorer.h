// Visits every state that a small model of concurrent steps can reach.
#ifndef DDP_TESTING_SHARED_MEMORY_STATE_EXPLORER_H_
#define DDP_TESTING_SHARED_MEMORY_STATE_EXPLORER_H_

#include <cstddef>
#include <cstring>
#include <deque>
#include <string>
#include <type_traits>
#include <unordered_set>

namespace ddp::internal {

// The outcome of Explore(). `violation` is empty when the model keeps its rules in every state.
struct Exploration {
  std::string violation;
  size_t states = 0;
};

// Explores all interleavings of a model from `initial` on, and stops at the first violation.
//
// `State` is a struct of bytes without padding: two states with equal bytes are one state. A model
// has
//   template <typename Emit> std::string Next(const State&, const Emit& emit) const;
//     Calls emit(state) for each state that one step of one actor leads to. Calls
//     emit(state, false) for a step that may also never come, such as a death. Returns the rule
//     that a step breaks, or an empty string.
//   bool IsEnd(const State&) const;
//     True when nothing has to happen any more. A state that is no end, and from which no step is
//     sure to come, is a violation: all actors wait, and none will ever go on.
template <typename Model, typename State>
Exploration Explore(const Model& model, const State& initial) {
  static_assert(std::is_trivially_copyable_v<State> && alignof(State) == 1);
  const auto key = [](const State& state) {
    return std::string(reinterpret_cast<const char*>(&state), sizeof state);
  };
  Exploration result;
  std::unordered_set<std::string> seen = {key(initial)};
  std::deque<State> waiting = {initial};
  while (!waiting.empty() && result.violation.empty()) {
    const State state = waiting.front();
    waiting.pop_front();
    bool advanced = false;
    result.violation = model.Next(state, [&](const State& next, bool sure = true) {
      advanced = advanced || sure;
      if (seen.insert(key(next)).second) waiting.push_back(next);
    });
    if (result.violation.empty() && !advanced && !model.IsEnd(state)) {
      result.violation = "all wait for ever";
    }
  }
  result.states = seen.size();
  return result;
}

}  // namespace ddp::internal

#endif  // DDP_TESTING_SHARED_MEMORY_STATE_EXPLORER_H_
