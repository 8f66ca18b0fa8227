#ifndef DDP_STATISTICS_STATISTICS_LAYERS_H_
#define DDP_STATISTICS_STATISTICS_LAYERS_H_

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/process_group/model_group.h"

namespace ddp::internal {

// The mark of a module class whose forward takes batch statistics over all ranks: a second base
// class of ddp::SyncBatchNorm2dImpl and the like.
class StatisticsModule {
 public:
  virtual ~StatisticsModule() = default;

  // Returns the group of the layer's own; null: that of the model.
  virtual std::shared_ptr<ModelGroup> statistics_group() const = 0;
};

// A layer with batch statistics over all ranks.
struct StatisticsLayer {
  bool training = false;              // its forward has collectives
  std::shared_ptr<ModelGroup> group;  // of its own; null: that of the model
  std::vector<at::Tensor> buffers;    // its defined buffers
};

}  // namespace ddp::internal

#endif  // DDP_STATISTICS_STATISTICS_LAYERS_H_
