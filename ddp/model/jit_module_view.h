#ifndef DDP_MODEL_JIT_MODULE_VIEW_H_
#define DDP_MODEL_JIT_MODULE_VIEW_H_

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ddp/model/model_view.h"

namespace torch::jit {
struct Module;
}  // namespace torch::jit

namespace ddp::internal {

// The view of a TorchScript module. Shares the module's object with the caller. Thread-compatible.
class JitModuleView final : public ModelView {
 public:
  // Throws ConfigurationError when the module has no method forward, or no parameter at all, as
  // after torch.jit.freeze.
  explicit JitModuleView(const torch::jit::Module& module);
  ~JitModuleView() override;

  std::string name() const override;
  std::vector<NamedTensor> parameters() const override;
  std::vector<NamedTensor> buffers() const override;
  // Returns the parameters that the code of forward gives directly to torch.embedding or
  // torch.embedding_bag with sparse=True. Scripted and traced modules both have such code.
  std::set<const c10::TensorImpl*> sparse_parameters() const override;
  bool is_training() const override;

 private:
  const std::unique_ptr<torch::jit::Module> module_;
};

}  // namespace ddp::internal

#endif  // DDP_MODEL_JIT_MODULE_VIEW_H_
