#ifndef DDP_MODEL_MODEL_STATISTICS_H_
#define DDP_MODEL_MODEL_STATISTICS_H_

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ddp/process_group/model_group.h"
#include "ddp/statistics/statistics_context.h"

namespace ddp::internal {

class ModelView;
struct ModelTensors;

// The layers of one model that take batch statistics over all ranks (SyncBatchNorm), on the side of
// the model's wrapper. Tells the layers their ranks, and keeps their running statistics equal.
// Owned by a ModelSynchronizer.
//
// The running statistics are equal on all ranks without a broadcast, with two exceptions:
// - A rank that joined before the last forward did not count that batch.
// - After a failure, some ranks may have counted a batch that others did not count.
//
// Each call reads the layers from the model again, because a module may replace its tensors.
// Thread-compatible.
class ModelStatistics {
 public:
  using Groups = std::vector<std::shared_ptr<ModelGroup>>;

  // Buffers named in `ignored` are not broadcast. Call UseGroup() before any other function except
  // OwnGroups().
  ModelStatistics(std::shared_ptr<const ModelView> model, std::set<std::string> ignored);
  ~ModelStatistics();
  ModelStatistics(const ModelStatistics&) = delete;
  ModelStatistics& operator=(const ModelStatistics&) = delete;

  // Returns true when the model had such a layer at the construction of this object. A layer that
  // comes later throws in its forward.
  bool has_layers() const { return context_->has_layers; }

  // Returns true when a layer is in train(), so that a forward of the model has collectives.
  bool InTraining() const;

  // Returns the groups of layers that have one other than `of_model`, each once. Throws
  // ConfigurationError for a group with more ranks than `of_model`.
  Groups OwnGroups(const ModelGroup& of_model) const;

  // From now on, layers without a group of their own use `of_model`. `own`: of OwnGroups().
  void UseGroup(std::shared_ptr<ModelGroup> of_model, Groups own);
  const Groups& own_groups() const { return context_->own_groups; }

  // Throws ConfigurationError when a layer has a group of its own, which no Join can announce.
  void CheckJoin() const;

  // The begin and the end of a forward of the model, on its thread. Between them, layers find the
  // model's ranks. Forwards may be nested.
  void BeginForward();
  void EndForward();

  // Sets the function by which each sum is announced under a Join; see StatisticsContext::announce.
  // Null: no Join.
  void set_announce(std::function<int()> announce) { context_->announce = std::move(announce); }

  // On a joined rank: takes part in an announced sum. See ShadowSum().
  void Shadow(int source) const { ShadowSum(*context_->group, source); }

  // Returns true when a failure may have left running statistics that differ between the ranks.
  bool may_differ() const { return may_differ_; }
  // Call it with true after a failure, and with false when all buffers have been broadcast.
  void set_may_differ(bool may_differ) { may_differ_ = may_differ && has_layers(); }

  // Makes the running statistics equal on all ranks: those of the rank `source`; in a group of a
  // layer's own, those of the first rank of that group. Collective. Throws as a collective does.
  void Broadcast(int source);

 private:
  void BroadcastBuffers(const ModelTensors& tensors, ModelGroup& group, int source) const;

  const std::shared_ptr<const ModelView> model_;
  const std::set<std::string> ignored_;
  const std::shared_ptr<StatisticsContext> context_ = std::make_shared<StatisticsContext>();
  std::vector<std::unique_ptr<StatisticsScope>> scopes_;  // of the forwards in progress
  bool may_differ_ = false;
};

}  // namespace ddp::internal

#endif  // DDP_MODEL_MODEL_STATISTICS_H_
