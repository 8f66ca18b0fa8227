#ifndef DDP_MODEL_NN_MODULE_VIEW_H_
#define DDP_MODEL_NN_MODULE_VIEW_H_

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ddp/model/model_view.h"
#include "ddp/statistics/statistics_layers.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace ddp::internal {

// Returns the layers of `module` and its submodules that take batch statistics over all ranks, in
// the order of registration: modules of a class that derives from StatisticsModule, and modules
// that have a mark (ddp/statistics/module_marks.h).
std::vector<StatisticsLayer> FindStatisticsLayers(const torch::nn::Module& module);

// The view of a module written in C++. Shares ownership of the module. Thread-compatible.
class NnModuleView final : public ModelView {
 public:
  explicit NnModuleView(std::shared_ptr<torch::nn::Module> module);

  std::string name() const override;
  std::vector<NamedTensor> parameters() const override;
  std::vector<NamedTensor> buffers() const override;
  // Returns the weights of Embedding and EmbeddingBag modules with the option sparse.
  std::set<const c10::TensorImpl*> sparse_parameters() const override;
  std::vector<StatisticsLayer> statistics_layers() const override;
  bool is_training() const override;

 private:
  const std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace ddp::internal

#endif  // DDP_MODEL_NN_MODULE_VIEW_H_
