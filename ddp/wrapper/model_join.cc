#include "ddp/wrapper/model_join.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/join/model_event.h"
#include "ddp/model/model_statistics.h"
#include "ddp/model/model_view.h"
#include "ddp/options.h"
#include "ddp/process_group.h"
#include "ddp/wrapper/buffer_sync.h"
#include "ddp/wrapper/model_setup.h"

namespace ddp::internal {

// The hook of a Join: repeats the collectives of the other ranks on a rank without inputs.
class ModelJoin::Shadow : public JoinHook {
 public:
  explicit Shadow(ModelJoin* join) : join_(join) {}

  void on_join() override { join_->parts_.begin(); }
  void main_hook(const JoinRound& round) override { join_->ShadowRound(round); }
  void post_hook(bool, int last_joiner) override { join_->Finish(last_joiner); }

 private:
  ModelJoin* const join_;
};

std::unique_ptr<JoinHook> ModelJoin::join_hook(const JoinOptions& options) {
  if (parts_.reducer.hook_name() == kMixedPrecisionHook && !options.divide_by_initial_world_size) {
    throw ConfigurationError(
        "mixed_precision reduces by a hook, which divides by the world size: a Join over it needs "
        "divide_by_initial_world_size");
  }
  parts_.statistics.CheckJoin();
  options_ = options;
  return std::make_unique<Shadow>(this);
}

void ModelJoin::enter_join(Join* join) {
  join_ = join;
  was_active_ = true;
  in_event_ = false;
  parts_.reducer.set_announce([this](PassParts parts) {
    const JoinRound round = join_->notify(*this, ModelEvent{.parts = parts}.Encode());
    in_event_ = true;
    return StartOf(round);
  });
  parts_.statistics.set_announce([this] {
    return join_->notify(*this, ModelEvent{.kind = ModelEvent::Kind::kStatistics}.Encode())
        .source();
  });
  if (parts_.delayed == nullptr) return;
  parts_.delayed->set_start(has_buckets() ? DelayedAllReduce::When::kAfterBuckets
                                          : DelayedAllReduce::When::kAtTriggerAlone);
  parts_.delayed->set_announce([this] {
    const ModelEvent event{.kind = ModelEvent::Kind::kDelayed};
    return StartOf(join_->notify(*this, event.Encode())).divisor;
  });
}

void ModelJoin::leave_join() {
  join_ = nullptr;
  parts_.reducer.set_announce({});
  parts_.statistics.set_announce(nullptr);
  if (parts_.delayed == nullptr) return;
  parts_.delayed->set_announce({});
  parts_.delayed->set_start(DelayedStart(parts_.options, has_buckets()));
}

DelayedAllReduce::When ModelJoin::DelayedStart(const DistributedDataParallelOptions& options,
                                               bool has_buckets) {
  if (!has_buckets) return DelayedAllReduce::When::kAtTriggerAlone;
  return options.find_unused_parameters || options.static_graph
             ? DelayedAllReduce::When::kAfterBuckets
             : DelayedAllReduce::When::kAtTrigger;
}

std::string ModelJoin::join_name() const { return parts_.model.name(); }

std::string ModelJoin::join_event_name(int event) const {
  return ModelEvent::Decode(event).ToString();
}

int ModelJoin::AnnounceForward(bool buffers_before, bool buffers_after) {
  if (join_ == nullptr) return 0;
  if (!buffers_before && !buffers_after && !options_.throw_on_early_termination) return 0;
  const ModelEvent event{.kind = ModelEvent::Kind::kForward,
                         .buffers_before = buffers_before,
                         .buffers_after = buffers_after};
  const JoinRound round = join_->notify(*this, event.Encode());
  return round.source();
}

// The same on all ranks.
Reducer::PassStart ModelJoin::StartOf(const JoinRound& round) const {
  const bool by_all = options_.divide_by_initial_world_size;
  return {.divisor = by_all ? parts_.group->size() : round.num_active(), .source = round.source()};
}

void ModelJoin::ShadowRound(const JoinRound& round) {
  const int source = round.source();
  const ModelEvent event = ModelEvent::Decode(round.event);
  BufferSync& buffers = parts_.buffers;
  switch (event.kind) {
    case ModelEvent::Kind::kDelayed:
      return parts_.delayed->Shadow();
    case ModelEvent::Kind::kStatistics:
      return parts_.statistics.Shadow(source);
    case ModelEvent::Kind::kPass:
      parts_.reducer.Shadow(event.parts, StartOf(round));
      if (parts_.delayed != nullptr) parts_.delayed->Shadow();
      return buffers.Finish(*parts_.group);
    case ModelEvent::Kind::kForward:
      if (event.buffers_before) {
        buffers.Run(*parts_.group, BufferCommHookLocation::kPreForward, source);
      }
      if (event.buffers_after) {
        buffers.Run(*parts_.group, BufferCommHookLocation::kPostForward, source);
      }
  }
}

void ModelJoin::Finish(int last_joiner) {
  parts_.buffers.Finish(*parts_.group);
  parts_.equalize(last_joiner);
  if (!parts_.options.static_graph) return;
  // A rank that never had inputs has not counted the graph. Then all ranks count again.
  ProcessGroup& group = *parts_.group;
  const at::Tensor counted =
      at::tensor({parts_.reducer.must_count() ? 0 : 1}, at::kInt).to(group.device());
  Communicator::Pending pending = group.communicator().AllReduceMin(counted, {"the end of a join"});
  group.communicator().Wait(pending);
  if (group.to_host(counted).item<int>() == 0) parts_.reducer.ForgetCounts();
}

}  // namespace ddp::internal
