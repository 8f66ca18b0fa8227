// How a layer with batch statistics over all ranks (SyncBatchNorm) finds its ranks, and how it adds
// up numbers over them.
//
// A layer without a group of its own uses the model that runs the forward: the wrapper opens a
// StatisticsScope around the forward of its module, on the thread of the forward. The layer reads
// the scope, and its backward uses what its forward has found.
//
// Under a Join every sum is an event. A rank with inputs announces the event; then one rank
// broadcasts the size of the sum, and the sum follows. A joined rank takes part with zeros. So a
// joined rank needs no knowledge of the layers.
#ifndef DDP_STATISTICS_STATISTICS_CONTEXT_H_
#define DDP_STATISTICS_STATISTICS_CONTEXT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/process_group/model_group.h"

namespace ddp::internal {

// The model whose forward runs: a value that its wrapper changes and its layers read. Outlives the
// wrapper where a graph keeps it. Thread-compatible.
struct StatisticsContext {
  std::shared_ptr<ModelGroup> group;

  // Under a Join: announces a sum over `group`, and returns the rank that broadcasts its size.
  // Empty: no Join.
  std::function<int()> announce;

  // False: the wrapper was made when its module had no such layer.
  bool has_layers = false;

  // The groups that layers have of their own, without `group`. The wrapper reports its failures to
  // these groups too.
  std::vector<std::shared_ptr<ModelGroup>> own_groups;
};

// Sets the context of this thread while it lives. Scopes may be nested; the innermost counts.
class [[nodiscard]] StatisticsScope {
 public:
  explicit StatisticsScope(std::shared_ptr<StatisticsContext> context);
  ~StatisticsScope();
  StatisticsScope(const StatisticsScope&) = delete;
  StatisticsScope& operator=(const StatisticsScope&) = delete;

  // Returns the context of the innermost scope of this thread; null: there is none.
  static std::shared_ptr<StatisticsContext> Current();

 private:
  std::shared_ptr<StatisticsContext> before_;
};

// The ranks of one forward of a layer, kept for its backward. Thread-compatible.
class StatisticsRanks {
 public:
  // Returns the ranks for a forward that runs now: those of `own`, or of the current context when
  // `own` is null. Blocks and throws as ensure_usable() for a group of the layer's own. Within a
  // StatisticsReplay, returns the next ranks of that.
  //
  // Throws ConfigurationError, naming the remedy:
  // - when there is no group
  // - when the wrapper was made before the layer, or before the layer got its group
  // - for a group of its own under a Join
  static StatisticsRanks OfForward(const std::shared_ptr<ModelGroup>& own);

  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }

  // Returns the element-wise sum of `part` over all ranks, on the device of `part`. `part` has the
  // type double and one size on all ranks, is contiguous and may be changed. Collective: one
  // all-reduce; under a Join also the announcement and a broadcast.
  //
  // Throws ReductionError when the group was renewed since OfForward(). Throws as a collective
  // does. Throws CommunicationError, after a report, when the sizes differ under a Join.
  at::Tensor Sum(const at::Tensor& part, const char* what) const;

 private:
  StatisticsRanks(std::shared_ptr<ModelGroup> group, std::shared_ptr<StatisticsContext> context);
  static StatisticsRanks Find(const std::shared_ptr<ModelGroup>& own);
  bool Announced() const;
  void CompareSize(int64_t size, int source) const;

  std::shared_ptr<ModelGroup> group_;
  std::shared_ptr<StatisticsContext> context_;  // null: a group of its own
  int64_t incarnation_;
};

// While it lives, records the ranks that each layer on this thread uses. A checkpoint records those
// of the first forward of its segment. Recordings may be nested; then each of them records.
class [[nodiscard]] StatisticsRecording {
 public:
  // `ranks` must outlive the recording.
  explicit StatisticsRecording(std::vector<StatisticsRanks>* ranks);
  ~StatisticsRecording();
  StatisticsRecording(const StatisticsRecording&) = delete;
  StatisticsRecording& operator=(const StatisticsRecording&) = delete;
};

// While it lives, the forwards on this thread are a recomputation: layers use `ranks`, in this
// order, and do not change their running statistics.
class [[nodiscard]] StatisticsReplay {
 public:
  // Layers add leaf tensors to `markers`. A layer makes such a leaf only to have a backward; no
  // caller reads its gradient. Both arguments must outlive the replay.
  StatisticsReplay(const std::vector<StatisticsRanks>& ranks, std::vector<at::Tensor>* markers);
  ~StatisticsReplay();
  StatisticsReplay(const StatisticsReplay&) = delete;
  StatisticsReplay& operator=(const StatisticsReplay&) = delete;

  // Returns the innermost replay of this thread; null: no recomputation.
  static StatisticsReplay* Current();

  // Returns the ranks of the next layer. Throws ConfigurationError when the first forward ran fewer
  // layers.
  const StatisticsRanks& Next();
  void AddMarker(const at::Tensor& marker) { markers_->push_back(marker); }

 private:
  const std::vector<StatisticsRanks>& ranks_;
  std::vector<at::Tensor>* const markers_;
  size_t next_ = 0;
  StatisticsReplay* before_;
  std::vector<std::vector<StatisticsRanks>*> recordings_before_;
};

// Throws ConfigurationError: a layer has a group of its own under a Join.
[[noreturn]] void ThrowOwnGroupUnderJoin();

// Takes part with zeros in an announced sum of the ranks with inputs, on a joined rank. `source`:
// the rank that broadcasts the size. Throws as a collective does.
void ShadowSum(ModelGroup& group, int source);

}  // namespace ddp::internal

#endif  // DDP_STATISTICS_STATISTICS_CONTEXT_H_
