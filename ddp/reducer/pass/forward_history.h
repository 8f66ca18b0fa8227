#ifndef DDP_REDUCER_PASS_FORWARD_HISTORY_H_
#define DDP_REDUCER_PASS_FORWARD_HISTORY_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "ddp/reducer/pass/forward_record.h"

namespace ddp::internal {

// The backward that runs, as autograd and the watch on the outputs describe it.
struct BackwardView {
  int task = -1;  // autograd's number of the backward

  // True when the backward came through a watched output. Then `forwards` are the synchronized
  // forwards that it has passed so far. Otherwise they are all forwards whose nodes the graph of
  // the backward contains.
  bool watched = false;
  const std::vector<ForwardPtr>& forwards;

  // Only with find_unused_parameters: the parameters that the backward cannot reach, ascending.
  const std::vector<int>& unreached;
  // True when the caller named the tensors that get gradients. Then a parameter that is reached may
  // get none.
  bool limited = false;
  // True when the backward came through a watched output of a forward with `collectives`.
  bool collectives = false;
  // The text of the exception that has ended the backward; empty: none has, or it is not known.
  std::string failure = "";
};

// The forwards of one model, and which of them still await the reduction of their gradients.
//
// A gradient belongs to the forwards that its backward passes:
// - One of them awaits its reduction: the gradient is reduced.
// - Otherwise, one of them is synchronized, so already reduced: an error.
// - Otherwise (no_sync, or the bare module): the gradient accumulates on this rank only.
//
// Pure: no graph, no tensor. Thread-compatible.
class ForwardHistory {
 public:
  enum class Origin : uint8_t {
    kBare,     // no forward of this model: the bare module. For the first gradient of a backward;
               // the others are kLocal
    kLocal,    // only forwards under no_sync
    kReduce,   // a forward that awaits its reduction
    kReduced,  // synchronized forwards, all of them reduced
  };

  // `by_output`: every backward is a reduction of its own (find_unused_parameters), so that each
  // output of one forward may have one. Otherwise a forward is reduced as a whole.
  explicit ForwardHistory(bool by_output) : by_output_(by_output) {}

  // Remembers a forward that has ended. `seen`: every backward of it passes a watched output.
  // Otherwise a backward that passes no known forward belongs to this one, until this one is
  // reduced or the next forward ends.
  void Add(const ForwardPtr& forward, bool seen);

  // Returns the forward that created the autograd node `number` of `thread`, itself or by a
  // backward with create_graph, among the last 32 forwards; null when there is none.
  const ForwardPtr* Find(uint64_t thread, uint64_t number) const;

  // Returns the origin of a gradient of `backward`.
  Origin FindOrigin(const BackwardView& backward);

  // Returns the synchronized forwards of a backward that is not watched. Call it after FindOrigin()
  // has returned kReduce for that backward.
  const std::vector<ForwardPtr>& awaiting() const { return awaiting_; }

  bool AwaitsReduction(const ForwardRecord& forward) const;
  bool AnyAwaits(const std::vector<ForwardPtr>& forwards) const;

  // Returns true when a forward given to Keep() still exists and is not reduced.
  bool HasOutstanding() const;
  // Keeps a synchronized forward whose backward will come.
  void Keep(const ForwardPtr& forward) { outstanding_.push_back(forward); }

  // The reduction under way contains gradients of these forwards.
  void AddToPass(const std::vector<ForwardPtr>& forwards);
  // No backward of `forward` will bring a gradient: the reduction under way reduces it with zeros.
  void AddWithoutBackward(const ForwardPtr& forward);
  // The reduction under way is complete. Forgets the kept forwards before the newest reduced one,
  // which are taken to have no backward.
  void FinishPass();

  // Returns those of the last 32 forwards that no backward has passed: synchronized ones in
  // training mode that are neither reduced nor `skipped`. Does not ask whether their graphs still
  // exist, since one rank may keep an output that the others drop.
  std::vector<ForwardPtr> Unpassed() const;

  void Clear();

 private:
  Origin Search(const BackwardView& backward);

  const bool by_output_;
  std::deque<ForwardPtr> recent_;                          // the newest last
  ForwardPtr unseen_;                                      // its backward may pass no known forward
  std::vector<std::weak_ptr<ForwardRecord>> outstanding_;  // synchronized, in order
  std::vector<ForwardPtr> in_pass_;

  // The last backward that came through no watched output.
  int searched_task_ = -1;
  Origin searched_origin_ = Origin::kBare;
  std::vector<ForwardPtr> awaiting_;
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_PASS_FORWARD_HISTORY_H_
