#ifndef DDP_MODEL_MODEL_VIEW_H_
#define DDP_MODEL_MODEL_VIEW_H_

#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/statistics/statistics_layers.h"

namespace ddp::internal {

struct NamedTensor {
  std::string name;  // "layer.weight"
  at::Tensor tensor;
};

// Gives the wrapper's core (ModelSynchronizer) access to a user's module: its tensors by name,
// whatever the module's type. There is one implementation for each type of module.
//
// Every call reads the module again, because a module may replace its tensors. The tensors returned
// are the module's own: a write to one of them changes the module.
//
// Thread-compatible.
class ModelView {
 public:
  virtual ~ModelView() = default;

  // Returns the name of the module's type, for messages.
  virtual std::string name() const = 0;

  // Return the tensors of the module and of its submodules, in the order of registration. A tensor
  // with several names is there once for each name. A tensor may be undefined.
  virtual std::vector<NamedTensor> parameters() const = 0;
  virtual std::vector<NamedTensor> buffers() const = 0;

  // Returns the parameters whose gradient will be sparse: weights of an embedding with sparse=true.
  virtual std::set<const c10::TensorImpl*> sparse_parameters() const = 0;

  // Returns the layers that take batch statistics over all ranks.
  virtual std::vector<StatisticsLayer> statistics_layers() const { return {}; }

  // Returns true in train(), false in eval().
  virtual bool is_training() const = 0;
};

}  // namespace ddp::internal

#endif  // DDP_MODEL_MODEL_VIEW_H_
