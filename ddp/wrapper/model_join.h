#ifndef DDP_WRAPPER_MODEL_JOIN_H_
#define DDP_WRAPPER_MODEL_JOIN_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "ddp/join.h"
#include "ddp/reducer/delayed_all_reduce.h"
#include "ddp/reducer/reducer.h"

namespace ddp {
struct DistributedDataParallelOptions;
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

class BufferSync;
class ModelStatistics;
class ModelSynchronizer;
class ModelView;

// One model's side of a Join. While this rank has inputs, it announces each group of the model's
// collectives to the ranks that have joined (see ModelEvent); once this rank has joined, it repeats
// the collectives of the others.
//
// Thread-compatible.
class ModelJoin : public Joinable {
 public:
  // The model and its parts, which outlive this object. `group`, and what `delayed` points to, may
  // change while no Join is active.
  struct Parts {
    ModelSynchronizer& synchronizer;
    const ModelView& model;
    const DistributedDataParallelOptions& options;
    const std::shared_ptr<ProcessGroup>& group;
    ModelStatistics& statistics;
    BufferSync& buffers;
    Reducer& reducer;
    DelayedAllReduce* delayed;  // null: no parameter is delayed

    // Runs when this rank joins. Throws when the last pass is not finished.
    std::function<void()> begin;
    // Makes the model on all ranks equal to rank `source`'s. Collective.
    std::function<void(int source)> equalize;
  };
  explicit ModelJoin(Parts parts) : parts_(std::move(parts)) {}

  bool active() const { return join_ != nullptr; }
  bool was_active() const { return was_active_; }
  ModelSynchronizer& synchronizer() const { return parts_.synchronizer; }

  // Announces a synchronized forward, where joined ranks have to take part in it: with the
  // synchronization of buffers before or after it, or with throw_on_early_termination. Returns the
  // rank whose buffers count: 0 without a Join.
  int AnnounceForward(bool buffers_before, bool buffers_after);
  // The reduction that was announced last is complete.
  void OnReductionComplete() { in_event_ = false; }

  // Returns when delayed parameters are reduced outside of a Join. With the same graph on every
  // rank, the trigger has the same place among the buckets. `has_buckets`: not all parameters are
  // delayed.
  static DelayedAllReduce::When DelayedStart(const DistributedDataParallelOptions& options,
                                             bool has_buckets);

  // The interface of Joinable.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  std::shared_ptr<ProcessGroup> join_process_group() override { return parts_.group; }
  void enter_join(Join* join) override;
  void leave_join() override;
  std::string join_name() const override;
  std::string join_event_name(int event) const override;
  bool in_join_event() const override { return join_ != nullptr && in_event_; }

 private:
  class Shadow;

  bool has_buckets() const { return !parts_.reducer.parameters().empty(); }
  Reducer::PassStart StartOf(const JoinRound& round) const;
  void ShadowRound(const JoinRound& round);
  void Finish(int last_joiner);

  const Parts parts_;
  Join* join_ = nullptr;
  JoinOptions options_;
  bool was_active_ = false;
  bool in_event_ = false;  // a reduction is announced and not complete
};

}  // namespace ddp::internal

#endif  // DDP_WRAPPER_MODEL_JOIN_H_
