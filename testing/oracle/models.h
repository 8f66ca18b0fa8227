#ifndef DDP_TESTING_ORACLE_MODELS_H_
#define DDP_TESTING_ORACLE_MODELS_H_

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace ddp::testing {

// Base of the oracle's models. They have the same layers, names and order of registration as in
// models.py, which describes the purpose of each model.
class OracleModel : public torch::nn::Module {
 public:
  // Returns the outputs of batch `x` on `rank` at `step`.
  virtual at::Tensor forward(const at::Tensor& x, int rank, int step) = 0;
  virtual at::Tensor Loss(const at::Tensor& outputs, const at::Tensor& y) const = 0;
};

// Makes a model by its name in the table of scenarios. Returns null for an unknown name.
std::shared_ptr<OracleModel> MakeOracleModel(const std::string& name);

}  // namespace ddp::testing

#endif  // DDP_TESTING_ORACLE_MODELS_H_
